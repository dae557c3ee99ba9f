"""Config files: one run per file, each with a function `get_config`."""
