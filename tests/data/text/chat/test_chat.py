"""Chat templates, learned tokens and packed rows match transformers."""

import datetime
import json
import re
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

from data.batches import train_batches
from data.config import DataConfig
from data.corpus import load_corpus
from data.text.chat.conversations import end_of_answers
from data.text.chat.template import ROLES, ChatTemplate, Dialogue, load_template
from data.text.tokenization.file_tokenizer import FileTokenizer

_NAMES = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

#: Templates in the formats that models use, without and with marks of the assistant's text.
TEMPLATES = {
    "ChatML": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "Llama 3": (
        "{{ '<|begin_of_text|>' }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "Mistral": (
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system = messages[0]['content'] %}\n"
        "    {%- set loop_messages = messages[1:] %}\n"
        "{%- else %}\n    {%- set loop_messages = messages %}\n{%- endif %}\n"
        "{{- bos_token }}\n"
        "{%- for message in loop_messages %}\n"
        "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
        "        {{- raise_exception('roles must alternate') }}\n    {%- endif %}\n"
        "    {%- if message['role'] == 'user' %}\n"
        "        {%- if loop.first and system is defined %}\n"
        "            {{- '[INST] ' + system + '\n\n' + message['content'] + ' [/INST]' }}\n"
        "        {%- else %}\n"
        "            {{- '[INST] ' + message['content'] + ' [/INST]' }}\n        {%- endif %}\n"
        "    {%- else %}\n"
        "        {%- generation %}{{- ' ' + message['content'] + eos_token }}"
        "{%- endgeneration %}\n    {%- endif %}\n{%- endfor %}\n"
    ),
    "roles": ROLES,
}
CONVERSATIONS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Größe von 2 + 2?"},
        {"role": "assistant", "content": "4 – größer: 4 > 3."},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "6"},
    ],
    [
        {"role": "user", "content": "<|im_end|> Hi {{ 7 * 7 }}"},
        {"role": "assistant", "content": "ö"},
    ],
]


def _without_tags(template: str) -> str:
    return re.sub(r"\{%-? (end)?generation -?%\}", "", template)


def chat_tokenizer() -> str:
    """Return a tokenizer.json of bytes with special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*_NAMES, *alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_NAMES))
    return tokenizer.to_str()


@pytest.fixture(scope="module")
def content():
    return chat_tokenizer()


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["five messages", "two messages"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_tokens_and_masks_are_those_of_transformers(name, messages, content):
    template = TEMPLATES[name]
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(content), chat_template=template, **_TOKENS
    )
    expected: Any = reference.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = ChatTemplate(template, name, _TOKENS)
    rendered = ours.learned(Dialogue(messages))
    text = rendered.text
    assert text == reference.apply_chat_template(messages, tokenize=False) == ours.render(messages)
    prompt = reference.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True
    )
    assert ours.render(messages[:-1], add_generation_prompt=True) == prompt
    ids, offsets = FileTokenizer(content, "tokenizer.json").encode_with_offsets(text)
    np.testing.assert_array_equal(ids, expected["input_ids"])
    is_learned = [
        any(a < stop and b > start for start, stop in rendered.spans) for a, b in offsets.tolist()
    ]
    np.testing.assert_array_equal(is_learned, np.array(expected["assistant_masks"], bool))
    assert 0 < sum(is_learned) < len(is_learned)


@pytest.mark.parametrize("name", ["ChatML", "Llama 3", "Mistral"])
def test_text_of_the_assistant_is_found_without_tags(name):
    marked = ChatTemplate(TEMPLATES[name], name, _TOKENS)
    plain = ChatTemplate(_without_tags(TEMPLATES[name]), name, _TOKENS)
    for messages in CONVERSATIONS:
        assert plain.learned(Dialogue(messages)) == marked.learned(Dialogue(messages))


def test_template_that_changes_earlier_messages_needs_tags():
    template = (
        "{% for m in messages %}{{ m['role'] + ':' }}"
        "{% if loop.last %}{{ '<think></think>' }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"renders message 2 differently when others follow"):
        ChatTemplate(template, "x.jinja", {}).learned(Dialogue(CONVERSATIONS[0]))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "x.jinja is not a chat template"),
        ("{{ messages[99]['role'] }}", "x.jinja refuses messages"),
        ("{{ raise_exception('no system') }}", "x.jinja refuses messages: no system"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "x.jinja refuses messages"),
        ("{% set _ = messages.append(1) %}", "x.jinja refuses messages"),
        ("{% include '/etc/passwd' %}", "x.jinja refuses messages"),
        ("{{ ('%s %s %s' % ('a',)) }}", "x.jinja refuses messages"),
        ("{{ '{2}'.format(1) }}", "x.jinja refuses messages"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "x.jinja refuses messages"),
    ],
)
def test_bad_templates_are_refused(template, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ChatTemplate(template, "x.jinja", {}).render(CONVERSATIONS[1])


@pytest.mark.parametrize(
    ("name", "token"), [("ChatML", "<|im_end|>"), ("Llama 3", "<|eot_id|>"), ("Mistral", "</s>")]
)
def test_token_that_ends_answers_is_found(name, token, content):
    tokenizer = FileTokenizer(content, "tokenizer.json")
    for text in (TEMPLATES[name], _without_tags(TEMPLATES[name])):
        found = end_of_answers(ChatTemplate(text, name, _TOKENS), tokenizer)
        assert found == _NAMES.index(token)
    # Special tokens before an answer do not end it.
    before = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content }} {% endfor %}"
    assert end_of_answers(ChatTemplate(before, name, _TOKENS), tokenizer) is None


def test_json_in_templates_is_that_of_transformers(content):
    text = (
        "{{ messages | tojson }}{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}"
        "{{ messages | tojson(indent=2) }}"
    )
    reference: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(content), chat_template=text
    )
    expected = reference.apply_chat_template(CONVERSATIONS[0], tokenize=False)
    assert ChatTemplate(text, "x.jinja", {}).render(CONVERSATIONS[0]) == expected


def test_training_has_no_clock():
    text = "{{ strftime_now('%d %b %Y') }}"
    with pytest.raises(ValueError, match=r"must not depend on the date.*data\.chat_template"):
        ChatTemplate(text, "x.jinja", {}).render(CONVERSATIONS[1])
    shown = ChatTemplate(text, "x.jinja", {}, is_repeatable=False).render(CONVERSATIONS[1])
    assert datetime.datetime.strptime(shown, "%d %b %Y").year >= 2026
    # A template that asks first whether there is a clock can be learned.
    text = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
    assert ChatTemplate(text, "x.jinja", {}).render(CONVERSATIONS[1]) == "2024"


def test_template_comes_with_the_tokenizer(tmp_path):
    file = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=r"needs a chat template.*or to 'roles'"):
        load_template("", file, "</s>")
    config = {"chat_template": "A{{ bos_token }}", "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_template("", file, "</s>").render([]) == "A<s>"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_template("", file, "</s>").render([]) == "D"
    (tmp_path / "chat_template.jinja").write_text("B{{ eos_token }}")
    assert load_template("", tmp_path, "</s>").render([]) == "B</s>"
    (tmp_path / "own.jinja").write_text("C")
    assert load_template(str(tmp_path / "own.jinja"), file, "</s>").render([]) == "C"


def config_of(tmp_path, lines, **changes) -> DataConfig:
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {
        "name": "text",
        "paths": (str(tmp_path / "chats.jsonl"),),
        "objective": "chat",
        "tokenizer": "bytes",
        "chat_template": "roles",
        "sequence_length": 96,
        "global_batch_size": 2,
        "validation_fraction": 0.0,
        "cache_dir": str(tmp_path / "cache"),
    }
    return DataConfig(**values | changes)


def _question(i: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Say {'x' * (i % 9)}{i}"},
        {"role": "assistant", "content": f"{i}!"},
    ]


def test_rows_are_whole_conversations_whose_answers_are_learned(tmp_path):
    config = config_of(tmp_path, [{"messages": _question(i)} for i in range(20)])
    corpus: Any = load_corpus(config)
    rows = corpus.train.evaluation_batch(range(len(corpus.train)))
    found = []
    for row in range(len(corpus.train)):
        segments = rows["segment_ids"][row]
        assert (rows["weights"][row][segments == 0] == 0).all()
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            np.testing.assert_array_equal(rows["positions"][row][here], np.arange(here.sum()))
            tokens, targets = rows["tokens"][row][here], rows["targets"][row][here]
            np.testing.assert_array_equal(tokens[1:], targets[:-1])
            text = corpus.tokenizer.decode([*tokens, targets[-1]])
            learned = corpus.tokenizer.decode(targets[rows["weights"][row][here] > 0])
            found.append((text, learned))
    eos = "<|endoftext|>"
    assert found == [
        (f"<|user|>\nSay {'x' * (i % 9)}{i}\n<|assistant|>\n{i}!{eos}\n", f"{i}!{eos}")
        for i in range(20)
    ]
    assert len(corpus.train) < 20  # several conversations are in a row


def test_long_conversations_are_cut_or_left_out(tmp_path, caplog):
    long = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 90}]
    lost = [{"role": "user", "content": "x" * 190}, {"role": "assistant", "content": "y"}]
    corpus = load_corpus(config_of(tmp_path, [{"messages": m} for m in (long, lost, _question(1))]))
    assert "2 of 3 lines have conversations of more than 97 tokens" in caplog.text
    assert re.search(r"1 of 3 lines are left out.*; the first is .*chats.jsonl line 2", caplog.text)
    assert len(corpus.train) == 2
    again = load_corpus(config_of(tmp_path, [{"messages": m} for m in (long, lost, _question(1))]))
    assert again.fingerprint == corpus.fingerprint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "x"}, "line 1 has the fields ['text'], but no messages in data.messages_field"),
        ({"messages": []}, "but no messages in data.messages_field='messages'"),
        ({"messages": [{"role": "user"}]}, "message 0 is {'role': 'user'}, but must have the"),
        ({"messages": _question(1)[:1]}, "has no message of the role 'assistant'"),
    ],
)
def test_bad_lines_are_refused(tmp_path, line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_corpus(config_of(tmp_path, [line]))


def test_bpe_is_trained_on_messages_and_batches_are_read(tmp_path):
    lines = [{"chat": _question(i), "other": 1} for i in range(40)]
    changes = {"tokenizer": "bpe", "vocab_size": 300, "messages_field": "chat"}
    config = config_of(tmp_path, lines, validation_fraction=0.2, **changes)
    corpus: Any = load_corpus(config)
    assert corpus.vocab_size <= 300 and len(corpus.validation) > 0
    batch = next(train_batches(corpus, config, range(2), seed=0))
    assert batch["tokens"].shape == (2, 96) and batch["weights"].sum() > 0
