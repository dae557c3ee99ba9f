"""The predicted rates of text generation, and their table in docs/generate.md."""

import json

import pytest

from benchmarks import decode
from benchmarks.harness import docs_page, generation_peer

FIGURES = json.loads(decode._RESULTS.read_text(encoding="utf-8"))


def test_docs_have_the_table_of_the_stored_figures():
    text = decode._DOCS.read_text(encoding="utf-8")
    assert docs_page.with_tables(decode._DOCS, decode.tables()) == text


def test_peer_continues_the_same_prompts():
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 64}
    found = generation_peer.compare(sizes, [2], num_tokens=4, num_rounds=2)
    (each,) = found["batches"]
    assert each["batch_size"] == 2 and len(each["speed_ratio"]["rounds"]) == 2
    assert all(rate > 0 for rate in each["tokens_per_s"].values())


@pytest.mark.parametrize("each", FIGURES["passes"], ids=lambda each: str(each["batch_size"]))
def test_decoding_reaches_most_of_the_memory_bandwidth(each):
    assert 0.7 <= each["limit_s"] / each["predicted_s"] <= 1
    assert each["tokens_per_s"] == pytest.approx(each["batch_size"] / each["predicted_s"])


def test_mode_must_divide_the_gpus(capsys):
    assert decode.main(["--target=h100:1x2", "--tensor_mode=2d"]) == 2
    assert "mesh.model=2 must be a square" in capsys.readouterr().err
