"""Optimizers, learning-rate schedules, parameter averages and frozen parameters."""
