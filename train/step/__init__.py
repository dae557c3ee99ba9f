"""The training and evaluation steps, and the optimizer update, as pure functions."""
