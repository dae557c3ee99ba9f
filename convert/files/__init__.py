"""Files of an exported model other than its weights: model card, image preprocessor, tokenizer."""
