"""Saves, verifies and restores checkpoints."""
