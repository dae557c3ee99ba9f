"""Multi-process runs: start-up, consistency checks and messages between processes."""
