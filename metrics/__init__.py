"""Appends numbers by step to JSON lines and TensorBoard files. A crash leaves them readable."""
