"""Config files and DeepSpeed JSONs, parsed and validated."""
