"""A model that was trained on conversations is exported with its chat template."""

import json

import pytest
import transformers

from convert import to_hf
from data.text.chat.template import ROLES, ChatTemplate
from tests.runs import TINY, arguments
from train.main import main


@pytest.mark.thorough
def test_exported_tokenizer_has_the_chat_template(tmp_path):
    chat = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1!"}]
    lines = (json.dumps({"messages": [*chat, *chat[: 2 * (i % 2)]]}) for i in range(80))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    overrides = (
        *TINY,
        f"data.paths={tmp_path}/chats.jsonl",
        f"data.cache_dir={tmp_path}/cache",
        "data.objective=chat",
        "data.chat_template=roles",
        "data.sequence_length=96",
        "data.validation_fraction=0.0",
        "train.num_steps=2",
    )
    assert main(arguments(tmp_path / "run", overrides)) == 0
    to_hf.convert(tmp_path / "run", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    expected = ChatTemplate(ROLES, "roles", {"eos_token": tokenizer.eos_token}).render(chat)
    assert text == expected == "<|user|>\nSay 1.\n<|assistant|>\n1!<|endoftext|>\n"
