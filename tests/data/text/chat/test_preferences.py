"""Pairs of answers become rows: formats of lines, learned tokens, packing, and errors."""

import json
from typing import Any

import numpy as np
import pytest

from data.config import DataConfig
from data.corpus import load_corpus
from data.image_config import ImageConfig
from data.shapes import example_shapes
from data.text.objectives.preference import PreferenceExamples

_USER = {"role": "user", "content": "2 + 2?"}
_FIRST = [{"role": "assistant", "content": "Why?"}, {"role": "user", "content": "Tell me."}]
_GOOD = {"role": "assistant", "content": "four"}
_BAD = {"role": "assistant", "content": "fish"}
TEXTS = {"prompt": "2 + 2?", "chosen": "four", "rejected": "fish"}


def config(path, **settings: Any) -> DataConfig:
    given: dict[str, Any] = {
        "sequence_length": 128,
        "global_batch_size": 1,
        "chat_template": "roles",
        **settings,
    }
    return DataConfig(
        name="text",
        paths=(f"{path}/*.jsonl",),
        objective="preference",
        tokenizer="bytes",
        cache_dir=str(path / "cache"),
        validation_fraction=0,
        **given,
    )


def rows_of(tmp_path, *lines: dict, **settings: Any) -> PreferenceExamples:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = load_corpus(config(tmp_path, **settings)).train
    assert isinstance(rows, PreferenceExamples)
    return rows


def texts(row: dict, name: str, number: int) -> str:
    """Return the tokens of a segment as text, or the targets of an answer."""
    is_in = row["segment_ids" if name == "tokens" else "answers"] == number
    return bytes(byte for byte in row[name][is_in].tolist() if byte < 256).decode()


@pytest.mark.parametrize(
    "line",
    [
        TEXTS,
        {"prompt": [_USER], "chosen": [_GOOD], "rejected": [_BAD]},
        {"prompt": "2 + 2?", "chosen": [_GOOD], "rejected": "fish"},
        {"chosen": [_USER, _GOOD], "rejected": [_USER, _BAD]},
        {"prompt": "2 + 2?", "chosen": [_USER, _GOOD], "rejected": [_USER, _BAD]},
    ],
)
def test_all_formats_of_a_line_give_the_same_row(line, tmp_path):
    rows = rows_of(tmp_path, line)
    assert len(rows) == 1
    row = rows[0]
    assert texts(row, "tokens", 1) == "<|user|>\n2 + 2?\n<|assistant|>\nfour\n"[:-1]
    assert texts(row, "tokens", 2) == "<|user|>\n2 + 2?\n<|assistant|>\nfish\n"[:-1]
    assert (texts(row, "targets", 1), texts(row, "targets", 2)) == ("four", "fish")
    assert (row["answers"] == 1).sum() == len("four") + 1  # and the end of the answer
    assert row["weights"].tolist() == [1.0, 0.0]


def test_answers_that_both_conversations_share_are_not_learned(tmp_path):
    shared = [_USER, *_FIRST]
    line = {"chosen": [*shared, _GOOD], "rejected": [*shared, _BAD]}
    row = rows_of(tmp_path, line, sequence_length=256)[0]
    assert "Why?" in texts(row, "tokens", 1)
    assert (texts(row, "targets", 1), texts(row, "targets", 2)) == ("four", "fish")


def test_rows_have_the_declared_shapes_and_the_reference_of_their_number(tmp_path):
    rows = rows_of(tmp_path, *[TEXTS] * 5)
    assert len(rows) == 5  # a pair takes 78 tokens
    rows.reference_log_probs = np.arange(20, dtype=np.float32).reshape(5, 2, 2)
    shapes = example_shapes(config(tmp_path), ImageConfig())
    found = {name: (value.shape, value.dtype) for name, value in rows[3].items()}
    assert found == shapes
    assert rows[3]["reference_log_probs"].tolist() == [[12, 13], [14, 15]]


def test_pairs_are_packed_up_to_one_for_64_tokens(tmp_path):
    rows = rows_of(tmp_path, *[TEXTS] * 5, sequence_length=192)
    assert [int(rows[i]["weights"].sum()) for i in range(len(rows))] == [2, 2, 1]
    row = rows[0]
    assert texts(row, "targets", 3) == "four" and texts(row, "targets", 4) == "fish"
    starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=0) > 0)
    assert row["positions"][starts].tolist() == [0, 0, 0, 0]


def test_long_pairs_are_cut_and_left_out_without_an_answer(tmp_path, caplog):
    long = TEXTS | {"chosen": "x" * 200}
    lost = TEXTS | {"prompt": "y" * 200}
    rows = rows_of(tmp_path, long, lost, TEXTS)
    assert len(rows) == 2
    row = rows[0]
    assert (row["segment_ids"] == 1).sum() == 64
    assert set(texts(row, "targets", 1)) == {"x"} and texts(row, "targets", 2) == "fish"
    assert "2 of 3 lines have conversations of more than 65 tokens" in caplog.text
    assert "1 of 3 lines are left out" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"line 1 has the fields .* but not 'rejected'"),
        (TEXTS | {"chosen": 3}, r"'chosen' must be a text or a list of messages"),
        (TEXTS | {"chosen": [{"role": "user"}]}, r"message 0 is .* must have the strings 'role'"),
        ({"chosen": [_GOOD], "rejected": [_BAD]}, r"after a prompt that is the same for both"),
        (TEXTS | {"chosen": [_USER]}, r"'chosen' must have an answer of the role 'assistant'"),
    ],
)
def test_unusable_lines_are_refused(line, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path, line)


def test_other_fields_can_be_named(tmp_path):
    line = {"question": "2 + 2?", "good": "four", "bad": "fish"}
    row = rows_of(tmp_path, line, preference_fields=("question", "good", "bad"))[0]
    assert texts(row, "targets", 2) == "fish"
    with pytest.raises(ValueError, match=r"preference_fields=.* must be 3 non-empty strings"):
        config(tmp_path, preference_fields=("good", "bad"))
