"""Reads files from strangers and writes next to them safely; every other folder may import this."""
