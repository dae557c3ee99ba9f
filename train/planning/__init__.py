"""Plans runs: finds the fastest mesh and settings that fit into memory."""
