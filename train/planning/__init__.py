"""Plans runs: what fits into memory, and which mesh and settings are the fastest."""
