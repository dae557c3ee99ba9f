"""Runs a pipeline schedule inside one compiled step."""
