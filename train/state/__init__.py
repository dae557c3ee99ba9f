"""The training state: its fields, its layout on the mesh, and its initialization."""
