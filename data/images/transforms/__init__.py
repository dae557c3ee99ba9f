"""Random and deterministic transforms of images."""
