r"""Fine-tunes a chat model (SFT): a tiny GPT-2 learns to answer questions about 148 capitals.

Hardware: any. A 2-core CPU takes one to two minutes.

    python -m train.main --config=configs/chat.py

Ask it a question:

    python -m generate --model=runs/chat --temperature=0 --max_new_tokens=24 \
        --prompt=$'<|user|>\nWhat is the capital of Peru?\n<|assistant|>\n'

It starts from random weights; chat_finetune.py starts from published ones.
"""

from pathlib import Path

from ml_collections import ConfigDict

from configs import gpt2

EXAMPLES = Path(__file__).parent / "examples"


def get_config() -> ConfigDict:
    """Return the config."""
    config = gpt2.get_config()
    config.data.name = "text"
    config.data.paths = (str(EXAMPLES / "capitals.jsonl"),)
    config.data.objective = "chat"
    config.data.chat_template = "roles"
    config.data.vocab_size = 512
    return config
