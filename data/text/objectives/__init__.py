"""Training objectives for text: how rows of a batch are built from tokens."""
