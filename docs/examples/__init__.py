"""Examples that the documentation explains; `tests/docs` runs them."""
