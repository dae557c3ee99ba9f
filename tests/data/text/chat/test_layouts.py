"""Conversations in the layouts of ShareGPT and Alpaca give the rows of the same messages."""

import json

import numpy as np
import pytest

from data.config import DataConfig
from data.corpus import load_corpus

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
MORE = {"role": "user", "content": "Add 1."}
END = {"role": "assistant", "content": "5"}


def turn(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


TURNS = [turn("human", "2 + 2?"), turn("gpt", "4"), turn("human", "Add 1."), turn("gpt", "5")]
CHATS = {
    "ShareGPT": (
        {"id": "x", "system": "Be brief.", "conversations": TURNS},
        [SYSTEM, ASKED, ANSWER, MORE, END],
    ),
    "ShareGPT, in messages": ({"messages": TURNS}, [ASKED, ANSWER, MORE, END]),
    "ShareGPT with a tool": (
        {"conversations": [TURNS[0], turn("observation", "4"), TURNS[1]]},
        [ASKED, {"role": "tool", "content": "4"}, ANSWER],
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        [{"role": "user", "content": "Add.\n2 and 2"}, ANSWER],
    ),
    "Alpaca without input": (
        {"instruction": "2 + 2?", "input": "", "output": "4", "system": "Be brief."},
        [SYSTEM, ASKED, ANSWER],
    ),
    "Alpaca with a history": (
        {"instruction": "Add 1.", "output": "5", "history": [["2 + 2?", "4"]]},
        [ASKED, ANSWER, MORE, END],
    ),
}
PAIRS = {
    "ShareGPT": (
        {
            "conversations": TURNS[:1],
            "chosen": turn("gpt", "4"),
            "rejected": turn("gpt", "5"),
        },
        {"prompt": [ASKED], "chosen": [ANSWER], "rejected": [END]},
    ),
    "Alpaca": (
        {"instruction": "2 +", "input": "2?", "chosen": "4", "rejected": "5"},
        {"prompt": "2 +\n2?", "chosen": "4", "rejected": "5"},
    ),
}


def rows_of(tmp_path, lines, objective: str = "chat", suffix: str = ".jsonl"):
    """Return the rows of lines, which a file with a name of its own has."""
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        cells = [json.dumps(line["messages"]).replace('"', '""') for line in lines]
        path.write_text("messages\n" + "".join(f'"{cell}"\n' for cell in cells))
    config = DataConfig(
        name="text",
        paths=(str(path),),
        objective=objective,
        tokenizer="bytes",
        chat_template="roles",
        sequence_length=160,
        global_batch_size=1,
        validation_fraction=0,
        cache_dir=str(tmp_path / "cache"),
    )
    rows = load_corpus(config).train
    return [rows[i] for i in range(len(rows))]


def assert_equal(found, expected) -> None:
    assert len(found) == len(expected) > 0
    assert found[0]["weights"].sum() > 0
    for row, other in zip(found, expected, strict=True):
        for name, value in other.items():
            np.testing.assert_array_equal(row[name], value, err_msg=name)


@pytest.mark.parametrize("case", CHATS)
def test_chats_are_read_as_messages(case, tmp_path, caplog):
    line, messages = CHATS[case]
    with caplog.at_level("INFO"):
        found = rows_of(tmp_path, [line, line])
    said = [each for each in caplog.messages if "has the layout of" in each]
    assert (
        len(said) == 1
        and f"rows.jsonl line 1 has the layout of {case.split(',')[0].split()[0]}" in said[0]
    )
    assert_equal(found, rows_of(tmp_path, [{"messages": messages}] * 2))


@pytest.mark.parametrize("case", PAIRS)
def test_preferences_are_read_as_messages(case, tmp_path):
    line, plain = PAIRS[case]
    assert_equal(rows_of(tmp_path, [line], "preference"), rows_of(tmp_path, [plain], "preference"))


def test_csv_has_messages_as_json(tmp_path):
    lines = [{"messages": CHATS["ShareGPT"][1]}, {"messages": [ASKED, ANSWER]}]
    assert_equal(rows_of(tmp_path, lines, suffix=".csv"), rows_of(tmp_path, lines))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"conversations": [turn("alien", "x")]}, r"line 2: the turn .*'alien'.* one of system, h"),
        (
            {"conversations": [{"from": "human"}]},
            r"line 2: the turn .* must have a text in 'value'",
        ),
        ({"instruction": "a", "output": 4}, r"line 2: 'output' is 4, but must be a text"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, r"line 2: 'history' has c"),
        ({"instruction": "a"}, r"line 2 has no message of the role 'assistant'"),
        ({"question": "a"}, r"line 2 has the fields \['question'\], but no messages"),
    ],
)
def test_bad_lines_are_named(line, message, tmp_path):
    with pytest.raises(ValueError, match=rf"rows\.jsonl {message}"):
        rows_of(tmp_path, [{"messages": [ASKED, ANSWER]}, line])
