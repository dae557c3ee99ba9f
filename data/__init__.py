"""Corpora of text and images: reading, tokenization, augmentation, and batches."""
