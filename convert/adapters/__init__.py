"""Adapters of a model on disk: merged into its kernels, and in the format of PEFT."""
