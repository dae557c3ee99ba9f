"""Parsing `train.remat`."""

import pytest

from tests.train.config.loading import run_of
from train.config.remat import Remat


@pytest.mark.parametrize(
    ("text", "recomputes_stages", "layers"),
    [
        ("stage", True, "none"),
        ("stage,full", True, "full"),
        ("stage,qkv,mlp", True, "qkv,mlp"),
        ("none", False, "none"),
        ("dots", False, "dots"),
        ("mlp,qkv", False, "mlp,qkv"),
    ],
)
def test_value_says_what_stages_and_layers_keep(text, recomputes_stages, layers):
    parsed = Remat(recomputes_stages=recomputes_stages, layers=layers)
    assert Remat.parse(text) == parsed and str(parsed) == text


def test_config_has_one_spelling_of_the_default():
    assert run_of("train.remat=stage,none").train == run_of().train


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "contains an empty name"),
        ("stage,", "contains an empty name"),
        ("dots,stage", "must contain 'stage' only as its first word"),
        ("stage,stage", "must contain 'stage' only as its first word"),
        ("stage,qkv,mlp,qkv", "contains a word twice"),
    ],
)
def test_wrong_value_is_refused(text, problem):
    message = rf"train\.remat='{text}' {problem}; choose auto, none, full, dots, or names"
    with pytest.raises(ValueError, match=message):
        run_of(f"train.remat={text}")
