"""Starts the processes of a run, on one machine or under a cluster scheduler."""
