"""Text models, one file per model family."""
