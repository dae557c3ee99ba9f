"""Benchmarks of steps, pipelines, data loading, checkpoints, conversion and memory estimates."""
