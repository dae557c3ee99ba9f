"""Documentation, and the Python modules of its examples."""
