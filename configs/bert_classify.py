"""Trains a BERT or RoBERTa from published weights to give texts, or pairs of them, a label.

Hardware: any that holds the model; see `mesh` for more than one device.

    python -m train.main --config=configs/bert_classify.py --config.init_from=PATH \
        --config.data.paths=reviews.jsonl --workdir=runs/classify

PATH is a folder of Hugging Face's: config.json, *.safetensors and tokenizer.json. Each line of the
.jsonl has the fields `text` and `label`; `data.text_field` and `data.label_field` name others, and
`data.pair_field` that of a second text. The labels are those found in it.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common


def get_config() -> ConfigDict:
    """Returns the config."""
    config = common.get_config()
    config.model = ConfigDict()
    config.model.name = "bert"  # RoBERTa too
    config.model.head = "sequence"
    config.model.dropout = 0.1
    config.model.num_labels = placeholder(int)  # None: the data's
    config.data.name = "text"
    config.data.objective = "classification"
    config.data.tokenizer = "init_from"
    config.data.sequence_length = 128
    config.data.global_batch_size = 32
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 50
    config.optimizer.schedule = "linear"
    config.optimizer.final_learning_rate_fraction = 0.0
    config.optimizer.weight_decay = 0.01
    config.optimizer.beta2 = 0.999
    config.train.num_steps = 500
    return config
