"""Layers that several models share: attention, positions, norms, blocks."""
