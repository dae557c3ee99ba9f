"""Serves a language model over HTTP, with the API of OpenAI: `python -m generate.serve`."""
