"""DataConfig refuses what cannot work, and says what would."""

import dataclasses

import pytest

from data.config import DataConfig

GOOD = DataConfig(sequence_length=8, global_batch_size=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, r"data\.name='' must be a non-empty string.*'python_stdlib'"),
        ({"text_field": ""}, r"data\.text_field='' must be a non-empty string.*'text'"),
        ({"tokenizer": ""}, r"data\.tokenizer='' must be a non-empty string.*'bpe'"),
        ({"name": "text"}, r"data\.name='text' needs.*data\.paths=\(\); set data\.paths="),
        ({"name": "text", "paths": "a.txt"}, r"data\.paths='a\.txt' must be a tuple"),
        ({"paths": ("a.txt",)}, r"data\.paths=\('a\.txt',\) is read only with data\.name='text'"),
        ({"sequence_length": 0}, r"data\.sequence_length=0 must be an integer of at least 1"),
        ({"sequence_length": 8.0}, r"data\.sequence_length=8\.0 must be an integer"),
        ({"global_batch_size": -1}, r"data\.global_batch_size=-1 must be .* at least 1"),
        ({"global_batch_size": True}, r"data\.global_batch_size=True must be an integer"),
        ({"num_threads": 0}, r"data\.num_threads=0 must be an integer of at least 1"),
        ({"vocab_size": 256}, r"data\.vocab_size=256 must be an integer from 257"),
        ({"validation_fraction": 1.0}, r"data\.validation_fraction=1\.0 must be .* less than 1"),
        ({"validation_fraction": -0.1}, r"data\.validation_fraction=-0\.1 must be at least 0"),
        ({"seed": -1}, r"data\.seed=-1 must be an integer from 0 to 2\*\*32 - 1"),
        ({"cache_dir": None}, r"data\.cache_dir=None must be a string"),
    ],
)
def test_data_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GOOD, **changes)


def test_cache_path_follows_the_user_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    chosen = dataclasses.replace(GOOD, cache_dir="~/mine")
    assert chosen.cache_path == tmp_path / "home" / "mine"
    assert GOOD.cache_path == tmp_path / "xdg" / "taibai"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert GOOD.cache_path == tmp_path / "home" / ".cache" / "taibai"
