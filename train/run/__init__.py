"""Builds a run from a config, and checks that its parts are compatible."""
