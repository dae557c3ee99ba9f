"""Reads the text of a compiled XLA program."""
