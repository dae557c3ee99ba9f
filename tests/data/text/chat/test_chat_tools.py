"""Conversations in which the assistant calls tools, as tokens and learned tokens."""

import json
import shutil
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
import transformers

from data.corpus import load_corpus
from data.text.chat.conversations import open_chats
from data.text.chat.template import ROLES, ChatTemplate, Dialogue, load_template
from data.text.tokenization.file_tokenizer import FileTokenizer
from tests.data.text.chat.test_chat import CONVERSATIONS, chat_tokenizer, config_of

TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Bern?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"at": "Bern"}}}
        ],
    },
    {"role": "tool", "name": "f", "content": "21"},
    {"role": "assistant", "content": "It has 21 degrees."},
]
FUNCTIONS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [FUNCTIONS, json.dumps(FUNCTIONS)], ids=["list", "text"])
def test_conversations_may_call_tools(tools, tmp_path):
    content = chat_tokenizer()
    reference: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(content), chat_template=TOOLS
    )
    expected = reference.apply_chat_template(CALLS, tools=FUNCTIONS)["input_ids"]
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tools.jinja").write_text(TOOLS)
    line = {"messages": CALLS, "tools": tools}
    config = config_of(
        tmp_path,
        [line] * 4,
        tokenizer=str(tmp_path / "tokenizer.json"),
        chat_template=str(tmp_path / "tools.jinja"),
        sequence_length=512,
    )
    row = load_corpus(config).train.example(0, ())
    tokens = [*row["tokens"][row["segment_ids"] == 1], row["targets"][row["segment_ids"] == 1][-1]]
    assert tokens == expected
    # Texts and calls of the assistant are learned; the tool's answer is not.
    learned = FileTokenizer(content, "x").decode(row["targets"][row["weights"] > 0])
    call = '{"name": "f", "arguments": {"at": "Bern"}}<|im_end|>\n'
    assert learned.startswith(f"{call}It has 21 degrees.<|im_end|>\n")


def test_tables_have_no_arguments_that_a_call_lacks(tmp_path):
    """A table gives all objects of a column the same fields."""
    other: Any = json.loads(json.dumps(CALLS))
    other[1]["tool_calls"][0]["function"]["arguments"] = {"unit": "K"}
    rows = [{"messages": messages, "tools": FUNCTIONS} for messages in (CALLS, other) * 2]
    (tmp_path / "tokenizer.json").write_text(chat_tokenizer())
    (tmp_path / "tools.jinja").write_text(TOOLS)
    settings = {
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "chat_template": str(tmp_path / "tools.jinja"),
        "sequence_length": 512,
    }
    expected = load_corpus(config_of(tmp_path, rows, **settings))
    table = tmp_path / "chats.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(table))
    found = load_corpus(config_of(tmp_path, rows, **settings, paths=(str(table),)))
    for name, values in expected.train.example(0, ()).items():
        np.testing.assert_array_equal(found.train.example(0, ())[name], values)


@pytest.mark.parametrize("tools", [None, [], "", "null", "[]"])
def test_there_may_be_no_tools(tools, tmp_path):
    line = {"messages": CONVERSATIONS[0], "tools": tools}
    (dialogue,) = open_chats(config_of(tmp_path, [line] * 4))["train"][0]
    assert dialogue.tools is None


def test_tools_must_be_a_list(tmp_path):
    config = config_of(tmp_path, [{"messages": CALLS, "tools": {"name": "f"}}] * 4)
    with pytest.raises(ValueError, match=r"line 1: 'tools' is .* must be a list of functions"):
        load_corpus(config)


@pytest.mark.parametrize("layout", ["list", "files"])
def test_conversations_with_tools_have_their_own_template(layout, tmp_path):
    """Tokenizers name it `tool_use`, in a list or in a file."""
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m.content + '\n' }}{% endfor %}"
    with_tools = "{{ tools | tojson }}" + plain
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": with_tools}]
    reference: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(chat_tokenizer()),
        chat_template={each["name"]: each["template"] for each in named},
    )
    reference.save_pretrained(tmp_path)
    if layout == "list":
        shutil.rmtree(tmp_path / "additional_chat_templates")
        (tmp_path / "chat_template.jinja").unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": named})
        )
    template = load_template("", tmp_path, "</s>")
    messages = CONVERSATIONS[0]
    for tools in (None, FUNCTIONS):
        expected = reference.apply_chat_template(messages, tools=tools, tokenize=False)
        assert template.learned(Dialogue(messages, tools=tools)).text == expected
    assert [*template.files.values()] == [plain, with_tools]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"content": "4", "tool_calls": None},
        {"content": "4", "reasoning": "2 + 2"},
        {"content": "4", "thinking": "2 + 2", "reasoning_content": None},
    ],
)
def test_fields_of_messages_are_those_that_transformers_renders(answer):
    """Fields that are null do not exist, and reasoning has several names."""
    text = (
        "{% for m in messages %}{{ m['role'] }}:{{ m.content }}{{ m.reasoning_content }}"
        "{{ m.thinking }}{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}"
        "{% endfor %}"
    )
    messages = [CONVERSATIONS[0][0], {"role": "assistant", **answer}]
    reference: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(chat_tokenizer()), chat_template=text
    )
    expected = reference.apply_chat_template(messages, tokenize=False)
    assert ChatTemplate(text, "x.jinja", {}).render(messages) == expected


def test_assistant_that_begins_needs_a_template_with_marks():
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "Hi"}, *CONVERSATIONS[0]]
    with pytest.raises(ValueError, match=r"no prompt before message 0.*% generation %"):
        ChatTemplate(plain, "x.jinja", {}).learned(Dialogue(messages))
    found = ChatTemplate(ROLES, "x.jinja", {"eos_token": "."}).learned(Dialogue(messages))
    assert found.text[slice(*found.spans[0])] == "Hi."
