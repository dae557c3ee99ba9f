"""The table of families in docs/families.md and `convert.from_hf --list`."""

import pytest

from convert import from_hf, reference
from convert.registry import architectures
from tests.convert.published import CONFIGS, ENCODERS
from tests.convert.test_clip import PUBLISHED


def test_page_is_current():
    message = "run `python -m convert.reference --docs`"
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), message


def test_list_has_every_architecture_with_its_rules(capsys):
    assert from_hf.main(["--list"]) == 0
    printed = capsys.readouterr().out
    words = printed.replace(",", " ").split()
    assert architectures().keys() <= {*words} and CONFIGS.keys() <= {*words}
    assert "hidden_act: silu or swish" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100


def test_models_count_as_tried_if_a_test_reads_their_config():
    known = CONFIGS | ENCODERS | PUBLISHED
    tried = {name: a.name for a in architectures().values() if not a.is_base for name in a.tried}
    assert tried == {name: config["architectures"][0] for name, config in known.items()}


def test_models_to_convert_are_required(capsys):
    with pytest.raises(SystemExit):
        from_hf.main(["only_one"])
    assert "src, dst" in capsys.readouterr().err
