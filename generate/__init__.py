"""Generates text with trained models, on the same blocks and meshes as training."""
