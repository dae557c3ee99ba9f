"""Learned parts of conversations: the assistant's text, for all kinds of messages and templates."""

import json
import re
import types
from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils

from data.corpus import load_corpus
from data.text.chat import rendering
from data.text.chat.conversations import end_of_answers
from data.text.chat.template import ROLES, ChatTemplate, Dialogue
from data.text.tokenization.file_tokenizer import FileTokenizer
from tests.data.text.chat.test_chat import CONVERSATIONS, TEMPLATES, chat_tokenizer, config_of
from tests.data.text.chat.test_preferences import rows_of, texts

_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
#: Marks the reasoning, the answer, and the end of the answer on their own, as templates do that
#: have a branch for each.
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}{% generation %}({{ m.reasoning_content }}){% endgeneration %}"
    "{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}"
    "{% generation %}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_THINKING: list[dict[str, Any]] = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "four", "reasoning": "two and two"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "yes"},
]


def _learned(template: ChatTemplate, dialogue: Dialogue) -> list[str]:
    found = template.learned(dialogue)
    return [found.text[start:stop] for start, stop in found.spans]


@pytest.mark.parametrize("messages", [*CONVERSATIONS, _THINKING])
@pytest.mark.parametrize("text", [*TEMPLATES.values(), PARTS], ids=[*TEMPLATES, "parts"])
def test_learned_parts_are_those_of_transformers(text, messages):
    tokens: Any = _TOKENS
    normalized = chat_template_utils._alias_reasoning_fields(messages)
    expected, spans = chat_template_utils.render_jinja_template(
        [normalized], chat_template=text, return_assistant_tokens_mask=True, **tokens
    )
    found = ChatTemplate(text, "x.jinja", _TOKENS).learned(Dialogue(messages))
    assert (found.text, found.spans) == (expected[0], spans[0])


def test_no_message_can_mark_itself(monkeypatch):
    """Not even one that knows how marks look, or whose parts make a mark together."""
    nonce = "0" * 32
    marks = ("\0generation:begin\0", "\0generation:end\0", f"({nonce}", f"{nonce})")
    for content in ("".join(marks), *marks):
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": f"I say {content}."},
            {"role": "user", "content": f"{content} learn this {content}"},
        ]
        assert _learned(ChatTemplate(ROLES, "x.jinja", _TOKENS), Dialogue(messages)) == [
            f"I say {content}.</s>"
        ]
    nonces = iter([nonce, nonce[1:] + "1"])
    monkeypatch.setattr("secrets.token_hex", lambda size: next(nonces))
    # Were the marks known, the text would differ without them, which is an error.
    here: Any = types.SimpleNamespace(call=lambda request, subject: rendering.render(request))
    template = ChatTemplate(ROLES, "x.jinja", _TOKENS, processes=here)
    with pytest.raises(ValueError, match=r"the text of the assistant is not clear"):
        template.learned(Dialogue(messages))


@pytest.mark.parametrize(
    "block", ["{% generation %}{{ m.content }}{% endgeneration %}", "{{ answer(m.content) }}"]
)
def test_marks_in_macros_and_nested_marks_are_found(block):
    text = (
        "{% macro answer(content) %}{% generation %}{% generation %}{{ content }}"
        "{% endgeneration %}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}" + block + "{% else %}"
        "{{ m.content }}{% endif %}\n{% endfor %}"
    )
    template = ChatTemplate(text, "x.jinja", {})
    assert _learned(template, Dialogue(CONVERSATIONS[0])) == ["4 – größer: 4 > 3.", "6"]


def test_changing_marked_text_is_refused():
    text = (
        "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endset %}{{ x[1:] }}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"changes the text of {% generation %}.* not clear"):
        ChatTemplate(text, "x.jinja", {}).learned(Dialogue(CONVERSATIONS[0]))


def test_token_after_an_answer_of_several_parts_is_found():
    tokenizer = FileTokenizer(chat_tokenizer(), "tokenizer.json")
    found = end_of_answers(ChatTemplate(PARTS, "x.jinja", _TOKENS), tokenizer)
    assert found is not None and tokenizer.decode([found]) == "<|im_end|>"


def test_shared_answers_of_several_parts_are_not_learned(tmp_path):
    (tmp_path / "parts.jinja").write_text(PARTS)
    pair = {
        "chosen": [*_THINKING[:3], {"role": "assistant", "content": "yes"}],
        "rejected": [*_THINKING[:3], {"role": "assistant", "content": "no", "thinking": "hm"}],
    }
    rows = rows_of(tmp_path, pair, sequence_length=512, chat_template=str(tmp_path / "parts.jinja"))
    found = [texts(rows[0], "targets", number) for number in (1, 2)]
    assert found == ["yes<|im_end|>", "(hm)no<|im_end|>"]


def test_shared_answers_are_not_learned_if_their_text_changes():
    """One part for each answer is enough to know which parts are shared."""
    text = (
        "{{ messages | length }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    template = ChatTemplate(text, "x.jinja", {})
    given = Dialogue(_THINKING, num_given=3)
    assert _learned(template, given) == ["yes"]
    twice = text.replace("{% generation %}", "{% generation %}!{% endgeneration %}{% generation %}")
    with pytest.raises(ValueError, match=r"renders the first 3 messages differently when others"):
        _learned(ChatTemplate(twice, "x.jinja", {}), given)


def _line(content: str, answer: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


_BARE = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "\n{% endfor %}"
)


def test_lines_of_which_nothing_is_learned_are_counted_and_named(tmp_path, caplog):
    (tmp_path / "bare.jinja").write_text(_BARE)
    lines = [_line("a", "b"), _line("c", ""), _line("d", "e"), _line("f", "")]
    config = config_of(tmp_path, lines, chat_template=str(tmp_path / "bare.jinja"))
    for _ in range(2):  # the second time, from the cache
        caplog.clear()
        corpus = load_corpus(config)
        assert re.search(
            r"2 of 4 lines are left out.*; the first is .*chats.jsonl line 2", caplog.text
        )
    row = corpus.train.example(0, ())
    assert bytes(row["targets"][row["weights"] > 0].tolist()) == b"be"
    assert row["segment_ids"].max() == 2


def test_data_of_which_nothing_is_learned_is_refused(tmp_path):
    (tmp_path / "bare.jinja").write_text(_BARE)
    config = config_of(tmp_path, [_line("a", "")] * 3, chat_template=str(tmp_path / "bare.jinja"))
    with pytest.raises(ValueError, match=r"none of the 3 lines for .*chats.jsonl line 1; inc"):
        load_corpus(config)


@pytest.mark.parametrize("objective", ["chat", "preference"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_half_a_character_is_refused_by_name(objective, tokenizer, tmp_path):
    good: dict[str, Any] = _line("a", "b") | {"prompt": "a", "chosen": "b", "rejected": "c"}
    bad = json.loads(json.dumps(good).replace('"b"', '"b \\ud83d"'))
    config = config_of(
        tmp_path, [good, bad], objective=objective, tokenizer=tokenizer, vocab_size=300
    )
    with pytest.raises(ValueError, match=r"chats.jsonl line 2 has the lone surrogate \\ud83d"):
        load_corpus(config)


def test_whole_characters_may_be_escape_sequences(tmp_path):
    corpus = load_corpus(config_of(tmp_path, [_line("a", "\U0001f642")]))
    row = corpus.train.example(0, ())
    learned = row["targets"][row["weights"] > 0]
    np.testing.assert_array_equal(learned[:4], list("\U0001f642".encode()))
