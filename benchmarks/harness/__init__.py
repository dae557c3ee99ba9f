"""Shared parts of the benchmarks: interleaved timing, reports, PyTorch peers, GPU cases."""
