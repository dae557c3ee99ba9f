"""Predicts what a step takes, before it runs: memory, communication and time."""
