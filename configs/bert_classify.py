"""Text classification: fine-tunes a published encoder on labelled texts or text pairs.

Hardware: any that holds the model; set the keys of `mesh` to use more than one device.

    python -m train.main --config=configs/bert_classify.py --config.init_from=PATH \
        --config.data.paths=reviews.jsonl --workdir=runs/classify

PATH is the directory of a Hugging Face model, or `OWNER/NAME` on the hub. Each line or row of the
file has the fields `text` and `label`. Set `data.text_field` and `data.label_field` if yours have
other names, and `data.pair_field` if there is a second text. The labels are read from the file. A
ModernBERT needs `--config.model.name=modernbert`.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    """Return the config."""
    config = common.get_config()
    config.model = ConfigDict()
    config.model.name = "bert"  # also for RoBERTa, DistilBERT and ELECTRA
    config.model.head = "sequence"
    config.model.dropout = 0.1
    config.data.name = "text"
    config.data.objective = "classification"
    config.data.tokenizer = "init_from"
    config.data.sequence_length = 0  # the model's
    config.data.global_batch_size = 32
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 50
    config.optimizer.schedule = "linear"
    config.optimizer.final_learning_rate_fraction = 0.0
    config.optimizer.weight_decay = 0.01
    config.optimizer.beta2 = 0.999
    config.precision.compute = "bfloat16"
    config.train.num_steps = 500
    return config
