"""Tests of `checkpoint.config`: fields out of range are refused."""

from typing import Any

import pytest

from checkpoint.config import CheckpointConfig


@pytest.mark.parametrize(
    "key, value",
    [
        ("every_steps", -1),
        ("every_minutes", 0.0),
        ("every_minutes", float("nan")),
        ("max_to_keep", 0),
        ("keep_best", -1),
    ],
)
def test_config_error_names_the_key(key, value):
    with pytest.raises(ValueError, match=rf"checkpoint\.{key}={value} .*(choose|must be finite)"):
        fields: dict[str, Any] = {"every_steps": 10, "max_to_keep": 2, key: value}
        CheckpointConfig(**fields)
