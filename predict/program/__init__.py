"""Reads a compiled XLA program: its instructions, communication, memory and FLOPs."""
