"""Tokenizers: raw bytes, a byte-level BPE trained on the corpus, or a tokenizer.json."""
