"""One module per Hugging Face model family: its architectures, keys, and weight names."""
