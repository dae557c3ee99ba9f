"""Text corpora: documents, tokenizers, token stores, and token files."""
