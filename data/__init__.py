"""Corpora of text and images: reading, tokenization, augmentation, and batches."""

from taibai import refuse_hidden_packages

refuse_hidden_packages()
