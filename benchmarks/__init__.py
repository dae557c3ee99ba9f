"""Benchmarks of steps, pipelines, data loading, checkpoints, conversion and memory estimates."""

from taibai import refuse_hidden_packages

refuse_hidden_packages()
