"""docs/data.md documents all objectives and fields, and its commands work."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from data import megatron
from data.config import OBJECTIVES, DataConfig
from data.image_config import ImageConfig

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
COMMANDS = re.sub(r"\\\n\s*", "", "".join(re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)))


def commands(module):
    lines = [line for line in COMMANDS.splitlines() if line.startswith(f"python -m {module} ")]
    assert lines
    return [shlex.split(line)[3:] for line in lines]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_is_documented(objective):
    assert f"| `{objective}`" in TEXT


def test_training_commands_set_existing_fields():
    known = {field.name for field in fields(DataConfig)}
    found = {
        match[1]
        for command in commands("train.main")
        for argument in command
        if (match := re.match(r"--config\.data\.(\w+)=", argument))
    }
    assert {"mixture", "paths", "pair_field"} <= found <= known


def test_every_field_of_the_section_images_is_documented():
    for field in fields(ImageConfig):
        assert f"images.{field.name}" in TEXT or f"`{field.name}`" in TEXT, field.name
    used = re.findall(r"--config\.images\.(\w+)=", COMMANDS)
    assert used and set(used) <= {field.name for field in fields(ImageConfig)}


def test_token_file_commands_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for command in commands("data.megatron"):
        assert megatron.main(command) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert printed.count("my_tokens: Megatron, uint16") == 2 and "--- document 10," in printed
