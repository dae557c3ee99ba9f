"""docs/config.md and --help name every key, and are generated from the declared fields."""

import dataclasses
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import common
from fields.field import declarations
from tests.runs import CONFIG, ROOT
from train import main
from train.config import reference
from train.config.config_files import load
from train.config.schema import SECTIONS, validate_config

KEYS = [key for _, _, keys in reference.groups() for key in keys]


def flat_keys() -> set[str]:
    """Return the keys of the default ConfigDict; `rules` is one key."""
    config: Any = common.get_config()
    names = set()
    for name in config:
        is_section = isinstance(config[name], ConfigDict) and name != "rules"
        names |= {f"{name}.{key}" for key in config[name]} if is_section else {name}
    return names


def test_page_is_current():
    message = "run `python -m train.config.reference --docs`"
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), message


def test_reference_has_every_key_once():
    names = [key.name for key in KEYS]
    assert len(names) == len(set(names))
    assert set(names) == flat_keys() | {"model.name", "model.attention"}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_field_of_a_section_is_declared_with_its_meaning(name):
    section: Any = SECTIONS[name]
    declared = declarations(section)
    assert [*declared] == [each.name for each in dataclasses.fields(section)]
    assert section.section == name
    for key, declaration in declared.items():
        assert declaration.doc.endswith("."), key
        assert declaration.doc[0] not in " .", key


def test_page_shows_values_default_and_meaning():
    text = reference.page()
    for row in (
        "| `mesh.data` | int, at least 1, or -1 | `1` | Data-parallel replicas; each computes a "
        "part of the batch. |",
        "| `data.paths` | tuple of non-empty strings | empty | Files or folders of the corpus. ",
        "| `precision.reduce` | `bfloat16`, `float16`, `float32` or None | `None` | dtype in ",
        "| `train.seed` | int, from 0 to 2**32 - 1 | `0` | ",
        "See [meshes.md](meshes.md).",
    ):
        assert row in text


def test_pages_that_the_reference_links_to_exist():
    linked = {line for line in reference.page().split("](")[1:]}
    targets = {text.partition(")")[0] for text in linked}
    assert targets and all((ROOT / "docs" / target).is_file() for target in targets)


def test_defaults_are_written_as_the_command_line_takes_them():
    overrides = [
        f"{key.name}={key.default}" for key in KEYS if key.name not in ("rules", "model.name")
    ]
    plain = load(f"{ROOT}/configs/gpt2.py")
    with plain.unlocked():
        for name, section in common.get_config().items():
            plain[name] = section
    again = load(CONFIG, overrides)
    assert validate_config(again) == validate_config(plain)


def test_help_shows_every_key_with_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        main.parse_arguments(["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for key in KEYS:
        expected = ".KEY=VALUE" if key.name == "rules" else f"={key.default}"
        at = lines.index(f"  --config.{key.name}{expected}")
        assert lines[at + 1].strip().startswith(key.declaration.summary[:40])
    assert max(map(len, lines)) <= 110
