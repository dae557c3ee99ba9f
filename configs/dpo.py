r"""Learns preferences (DPO): the model of configs/chat.py learns to give short answers.

Hardware: any. A 2-core CPU takes about half a minute.

    python -m train.main --config=configs/chat.py
    python -m train.main --config=configs/dpo.py

Before, the answer is "The capital of Peru is Lima."; afterwards it is "Lima.":

    python -m generate --model=runs/dpo --temperature=0 --max_new_tokens=24 \
        --prompt=$'<|user|>\nWhat is the capital of Peru?\n<|assistant|>\n'

For another model, set `--config.init_from=PATH`, the directory of a run or of a Hugging Face model.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import common
from configs.chat import EXAMPLES


def get_config() -> ConfigDict:
    """Return the config."""
    config = common.get_config()
    config.init_from = "runs/chat"
    config.model = ConfigDict()
    config.model.name = placeholder(str)  # None: from init_from, like all other keys of `model`
    config.preference.beta = 0.3
    config.data.name = "text"
    config.data.paths = (str(EXAMPLES / "short_answers.jsonl"),)
    config.data.objective = "preference"
    config.data.chat_template = "roles"
    config.data.tokenizer = "init_from"
    config.optimizer.learning_rate = 3e-5
    config.optimizer.weight_decay = 0.0
    config.train.num_steps = 40
    return config
