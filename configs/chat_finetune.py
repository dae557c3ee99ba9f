r"""Fine-tunes a published chat model on your conversations, or on pairs of answers.

Hardware: any that holds the model; set the keys of `mesh` to use more than one device.

    python -m train.main --config=configs/chat_finetune.py --config.init_from=PATH \
        --config.data.paths=chats.jsonl --workdir=runs/chat

PATH is the directory of a Hugging Face model, or `OWNER/NAME` on the hub. Its sizes, tokenizer and
chat template are read from there. Append a task to the config, such as `chat_finetune.py:lora`:

    full        all parameters learn the answers of conversations (SFT)
    lora        adapters learn them, in a fraction of the memory
    dpo         all parameters learn which of two answers is better
    dpo_lora    adapters learn it

docs/data.md describes the files. For a model without a chat template, set
`--config.data.chat_template=roles`.
"""

from ml_collections import ConfigDict

from configs import common, sizes

#: Task -> peak learning rate. Adapters need a larger one; DPO, which starts from a model that
#: already gives such answers, needs a smaller one. They are the defaults that TRL's documentation
#: recommends.
TASKS = {"full": 2e-5, "lora": 2e-4, "dpo": 1e-6, "dpo_lora": 5e-6}


def get_config(task: str = "full") -> ConfigDict:
    """Return the config for a key of TASKS."""
    sizes.choose("chat_finetune", task, TASKS)
    config = common.get_config()
    tuning = "lora" if task.endswith("lora") else "full"
    sizes.from_published(config, tuning, TASKS[task])
    config.data.name = "text"
    config.data.objective = "preference" if task.startswith("dpo") else "chat"
    config.train.num_epochs = 1.0 if task.startswith("dpo") else 3.0
    return config
