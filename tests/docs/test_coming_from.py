"""The pages for users of other trainers: their keys exist, and their commands are valid."""

import dataclasses
import re
import shlex

import pytest

from models.text.gpt2 import GPT2Config
from models.text.llama import LlamaConfig
from tests.runs import ROOT
from tests.train.config.loading import load
from train.config.peer_keys import MICROBATCH_SIZE, key_of_peer
from train.config.schema import SECTIONS

PAGES = (*sorted((ROOT / "docs" / "coming_from").glob("*.md")), ROOT / "docs" / "deepspeed.md")
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
#: Names that mean something else in one trainer than in the others.
OTHER_MEANINGS = {"validator.steps", "training.dtype"}


def known_keys() -> set[str]:
    """Return the keys of the reference, and those of the models that most pages name."""
    reference = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    fields = (*dataclasses.fields(GPT2Config), *dataclasses.fields(LlamaConfig))
    of_model = {f"model.{field.name}" for field in fields}
    return {*re.findall(r"^\| `([\w.]+)` \|", reference, re.M), *of_model}


def rows_of(page: str) -> list[tuple[str, str]]:
    """Return the cells of the tables of a page that have two columns."""
    rows = re.findall(r"^\| (.+) \| (.+) \|$", TEXTS[page], re.M)
    return [row for row in rows if "---" not in row[0]]


def spans_of(text: str) -> list[str]:
    """Return the code in a text, without values: `a.b=1` is `a.b`."""
    return [span.partition("=")[0] for span in re.findall(r"`([^`]+)`", text)]


def commands_of(page: str) -> list[str]:
    """Return Taibai's commands in the blocks of a page."""
    blocks = re.findall(r"^```\n(.*?)^```", TEXTS[page], re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("python -m ")]


@pytest.mark.parametrize("page", TEXTS)
def test_every_key_exists(page):
    sections = {name for name in SECTIONS if name not in ("rules",)}
    of_cells = [span for _, ours in rows_of(page) for span in spans_of(ours)]
    named = {span for span in of_cells if span.partition(".")[0] in sections and "." in span}
    named |= set(re.findall(r"--config\.([\w.]+\w)", TEXTS[page]))
    assert named
    assert named - known_keys() - {"init_from"} == set()


@pytest.mark.parametrize("page", TEXTS)
def test_tables_agree_with_the_message_about_an_unknown_key(page):
    wrong = []
    for theirs, ours in rows_of(page):
        for name in spans_of(theirs):
            key = key_of_peer(name)
            if key in (None, MICROBATCH_SIZE) or name in OTHER_MEANINGS:
                continue
            shown = key.rpartition(".")[2] if page == "deepspeed" else key
            if shown not in ours:
                wrong.append((name, key, ours))
    assert wrong == []


@pytest.mark.parametrize("page", TEXTS)
def test_commands_are_valid(page):
    commands = commands_of(page)
    training = [command for command in commands if "train.main" in command]
    assert training
    for command in training:
        words = shlex.split(command, comments=True)[3:]
        values = dict(word.removeprefix("--").split("=", 1) for word in words)
        path = values.pop("config")
        overrides = [
            f"{name.removeprefix('config.')}={value}"
            for name, value in values.items()
            if name.startswith("config.")
        ]
        config = load(path, overrides)
        assert values.get("workdir", "").startswith("runs/")
        assert config.data.global_batch_size % config.train.num_microbatches == 0


@pytest.mark.parametrize("page", TEXTS)
def test_pages_are_short_and_begin_with_their_purpose(page):
    lines = TEXTS[page].splitlines()
    assert len(lines) < 120
    assert lines[0].startswith("# Coming from ")
    assert lines[2].startswith("With this page, you can ")
