"""Life of a run: workdir and lock, stop signals, watchdog, divergence, phases, exit codes."""
