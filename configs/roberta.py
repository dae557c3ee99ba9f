"""RoBERTa pretraining on one device: masked tokens of the text of Python's own standard library.

Hardware: any. With the default size, a 2-core CPU takes about 3 minutes to reach a validation loss
of about 5.48 nats per masked token (7.6 at the start).

    python -m train.main --config=configs/roberta.py

`--config=configs/roberta.py:SIZE` selects a published size, for accelerators: base or large. These
need a corpus and a tokenizer of matching size.
"""

from ml_collections import ConfigDict

from configs import bert, sizes

#: name -> (BERT size, learning rate). Liu et al. 2019 (arXiv:1907.11692), table 9.
SIZES = {"base": ("base", 6e-4), "large": ("large", 4e-4)}


def get_config(size: str = "tiny") -> ConfigDict:
    """Return the config for a size: "tiny" or a key of SIZES."""
    sizes.choose("roberta", size, ("tiny", *SIZES))
    of_bert, learning_rate = SIZES.get(size, ("tiny", None))
    config = bert.get_config(of_bert)
    config.data.objective = "masked_lm"
    config.model.head = "masked_lm"
    config.model.num_token_types = 1
    # Positions count the tokens that are not padding, starting at 2. Token 1 is padding, both in
    # RoBERTa's tokenizer and in the tokenizers that Taibai trains.
    config.model.pad_id = 1
    config.model.first_position = 2
    config.model.layer_norm_epsilon = 1e-5
    if learning_rate is not None:
        config.data.vocab_size = 50265
        config.optimizer.learning_rate = learning_rate
        config.optimizer.beta2 = 0.98
        config.optimizer.epsilon = 1e-6
    return config
