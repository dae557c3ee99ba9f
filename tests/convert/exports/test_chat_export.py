"""A model that was trained on conversations is exported with its chat template."""

import json

import pytest
import tokenizers
import torch
import transformers

from convert import from_hf, to_hf
from convert.source import read_source
from data.text.chat.template import ROLES, ChatTemplate
from generate.prompts import stop_tokens_of, tokenizer_of
from tests.runs import TINY, arguments
from train.main import main

pytestmark = pytest.mark.drawn(2, among="thorough")


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


@pytest.mark.thorough
def test_generation_stops_at_the_token_that_ends_answers(tmp_path):
    """As in transformers, which reads it from generation_config.json."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*names, *alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chatml.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1!"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 80)
    overrides = (
        *TINY,
        f"data.paths={tmp_path}/chats.jsonl",
        f"data.cache_dir={tmp_path}/cache",
        f"data.tokenizer={tmp_path}/tokenizer.json",
        "data.objective=chat",
        f"data.chat_template={tmp_path}/chatml.jinja",
        "data.sequence_length=96",
        "data.validation_fraction=0.0",
        "train.num_steps=2",
    )
    assert main(arguments(tmp_path / "run", overrides)) == 0
    to_hf.convert(tmp_path / "run", tmp_path / "model")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [0, 2]
    for directory in ("run", "model"):
        source = read_source(tmp_path / directory)
        assert stop_tokens_of(source, tokenizer_of(source)) == [0, 2]

    # A run that continues the exported model, whose files name its stop tokens, keeps them.
    more = (*overrides, f"init_from={tmp_path}/model", "data.tokenizer=init_from")
    more = [each for each in more if not each.startswith(("model.", "data.chat_template"))]
    assert main(arguments(tmp_path / "more", [*more, "data.chat_template="])) == 0
    written = json.loads((tmp_path / "more" / "hf" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [0, 2]


@pytest.mark.thorough
def test_runs_keep_the_template_of_conversations_with_tools(tmp_path):
    base = tmp_path / "base"
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=257, n_embd=16, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(base)
    names = ["</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: i for i, token in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(names[:1])
    templates = {"default": ROLES, "tool_use": "{{ tools }}" + ROLES, "rag": "R"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=templates, eos_token=names[0]
    ).save_pretrained(base)
    from_hf.convert(base, tmp_path / "run")
    to_hf.convert(tmp_path / "run", tmp_path / "back")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert again.chat_template == templates

    chat = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "1!"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 80)
    for name, setting in {"same": "", "other": "roles"}.items():
        overrides = (
            f"init_from={base}",
            "data.name=text",
            f"data.paths={tmp_path}/chats.jsonl",
            f"data.cache_dir={tmp_path}/cache",
            "data.objective=chat",
            f"data.chat_template={setting}",
            "data.sequence_length=96",
            "data.validation_fraction=0.0",
            "data.global_batch_size=2",
            "train.num_steps=1",
        )
        assert main(arguments(tmp_path / name, overrides)) == 0
        file = tmp_path / name / "hf" / "additional_chat_templates" / "tool_use.jinja"
        assert file.exists() == (name == "same")
