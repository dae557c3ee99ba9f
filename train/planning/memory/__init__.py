"""Decides whether a step fits into memory, and finds settings with which it would."""
