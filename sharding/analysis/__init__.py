"""Reads compiled steps: collectives, memory, predicted time, pictures; describes target GPUs."""
