"""Models, each written once as if for one device: layers, losses, stacks of blocks."""
