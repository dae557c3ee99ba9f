"""Vision models, one file per model family."""
