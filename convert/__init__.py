"""Conversion of models from and to the Hugging Face format."""
