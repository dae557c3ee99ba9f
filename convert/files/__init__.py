"""Files beside the weights of an exported model: model card, image preprocessor, tokenizer."""
