"""Predicts the time of a compiled step on GPUs, and draws it."""
