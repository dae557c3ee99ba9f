"""DataConfig rejects invalid values, and its messages suggest valid ones."""

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
        ({"sequence_length": 0}, r"data\.sequence_length=0 stands for the length of the"),
        ({"sequence_length": 8.0}, r"data\.sequence_length=8\.0 must be of type int"),
        ({"global_batch_size": -1}, r"data\.global_batch_size=-1 must be at least 1"),
        ({"global_batch_size": True}, r"data\.global_batch_size=True must be of type int"),
        ({"num_threads": 0}, r"data\.num_threads=0 must be from 1 to 1024"),
        ({"vocab_size": 256}, r"vocab_size=256 must be from 257 to 16777216; .* 256 bytes and"),
        ({"validation_fraction": 1.0}, r"data\.validation_fraction=1\.0 must be .* less than 1"),
        ({"validation_fraction": -0.1}, r"data\.validation_fraction=-0\.1 must be at least 0"),
        ({"cache_dir": None}, r"data\.cache_dir=None must be of type str"),
        ({"objective": "mlm"}, r"data\.objective='mlm' is unknown; choose causal_lm, masked_lm"),
        ({"mask_fraction": 0.0}, r"data\.mask_fraction=0\.0 must be more than 0 and less than 1"),
        ({"mask_fraction": 1.0}, r"data\.mask_fraction=1\.0 must be more than 0 and less than 1"),
        ({"mean_span_length": 0.5}, r"data\.mean_span_length=0\.5 must be at least 1"),
        ({"whole_words": True}, r"whole_words=True is read only with .*'masked_lm_pairs', but it"),
        ({"target_length": 9}, r"target_length=9 is read only with .*'seq2seq'.*=None"),
        (
            {"pair_field": "b"},
            r"pair_field='b' is read only with .*'classification', but it is 'c",
        ),
        (
            {"objective": "span_corruption", "isolate_documents": True},
            r"isolate_documents=True is read only with data\.objective='causal_lm' or 'masked_lm'",
        ),
        (
            {"objective": "span_corruption", "target_length": 1},
            r"data\.target_length=1 must be at least 2, or None",
        ),
        ({"objective": "seq2seq"}, r"reads examples from \.jsonl files, but data\.name='python_st"),
        ({"objective": "masked_lm", "sequence_length": 2}, r"sequence_length=2 must be at least 3"),
        (
            {"objective": "masked_lm_pairs", "sequence_length": 5},
            r"sequence_length=5 must be at least 6 with data\.objective='masked_lm_pairs'",
        ),
        (
            {"objective": "masked_lm", "vocab_size": 360},
            r"vocab_size=360 must be at least 361 w",
        ),
        ({"target_field": ""}, r"data\.target_field='' must be a non-empty string.*'target'"),
        ({"label_field": ""}, r"data\.label_field='' must be a non-empty string.*'label'"),
        ({"mixture": ("1 ag_news_subset",)}, r"must be set if and only if data\.name='mixture'"),
        ({"name": "mixture"}, r"data\.mixture=\(\) must be set if .*name='mixture'.*set both"),
        ({"name": "mixture", "mixture": "1 a"}, r"data\.mixture='1 a' must be a tuple"),
        ({"name": "megatron"}, r"data\.name='megatron' needs the path .*'my_tokens'"),
        (
            {"name": "megatron", "paths": ("t",)},
            r"data\.tokenizer='bpe' is trained from text, but data\.name='megatron'",
        ),
    ],
)
def test_invalid_data_configs_are_rejected(changes, message):
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
