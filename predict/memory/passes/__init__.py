"""Passes over a program before it is estimated: they change it or find properties of values."""
