"""Metrics files, progress display and throughput of a run."""
