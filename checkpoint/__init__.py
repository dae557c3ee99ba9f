"""Saves, verifies and restores checkpoints."""

from taibai import refuse_hidden_packages

refuse_hidden_packages()
