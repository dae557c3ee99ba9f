"""Tests that the documentation's examples run, and that the docs print the code that runs."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from convert.from_hf import load
from docs.examples import shard_a_tensor
from docs.examples.attention_block import ParallelBlock, ParallelConfig
from tests.hugging_face import OPT, save_model
from tests.runs import ROOT, TINY, arguments, losses, make_run
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.drawn(4, among="thorough")

EXAMPLE = str(ROOT / "docs" / "examples" / "gated_mean_config.py")
SHORT = (
    "data.tokenizer=bytes",
    "data.sequence_length=16",
    "model.embed_dim=32",
    "data.name=docs.examples.own_parts:poems",
)
#: Sizes of a tiny Hugging Face model.
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}


@pytest.mark.thorough
def test_own_model_and_corpus_have_equal_losses_on_2x2x2_and_one_device(tmp_path):
    short = (*SHORT, f"data.cache_dir={tmp_path}", "optimizer.learning_rate=0.01")
    run, corpus = make_run(short, EXAMPLE)
    assert run.mesh.size == 8
    one = (*short, "mesh.pipeline=1", "mesh.data=1", "mesh.model=1")
    expected = losses(*make_run(one, EXAMPLE), 10)
    np.testing.assert_allclose(losses(run, corpus, 10), expected, rtol=1e-4)  # float32
    assert expected[-1] < expected[0] - 0.3


@pytest.mark.thorough
def test_own_block_with_attention_has_equal_losses_on_any_mesh(tmp_path):
    short = (
        *SHORT,
        f"data.cache_dir={tmp_path}",
        "optimizer.learning_rate=0.01",
        "model.name=docs.examples.attention_block:ParallelModel",
        "model.num_heads=4",
    )
    one = (*short, "mesh.pipeline=1", "mesh.data=1", "mesh.model=1")
    expected = losses(*make_run(one, EXAMPLE), 10)
    split = (*short, "mesh.pipeline=1", "mesh.context=2")
    for changes in (short, split):
        run, corpus = make_run(changes, EXAMPLE)
        assert run.mesh.size == 8
        np.testing.assert_allclose(losses(run, corpus, 10), expected, rtol=1e-4)  # float32
    assert expected[-1] < expected[0] - 0.3


@pytest.mark.thorough
def test_own_block_sees_only_earlier_tokens_and_their_distance():
    config = ParallelConfig(vocab_size=8, num_layers=2, embed_dim=16, dropout=0.0, num_heads=2)
    x = jax.random.normal(jax.random.key(0), (1, 6, 16))
    block = ParallelBlock(config, rngs=nnx.Rngs(1))

    def outputs(x, first: int) -> np.ndarray:
        positions = first + jax.numpy.arange(6, dtype=jax.numpy.int32)[None]
        batch = {"tokens": positions, "positions": positions}
        return np.asarray(block(x, batch, None))

    np.testing.assert_allclose(outputs(x, 0), outputs(x, 5), rtol=1e-4, atol=1e-5)  # float32
    changed = outputs(x.at[:, 3, 0].add(1.0), 0) != outputs(x, 0)
    assert changed.any(axis=2)[0].tolist() == [False] * 3 + [True] * 3


@pytest.mark.thorough
def test_own_loss_and_optimizer_change_the_training(tmp_path):
    base = (
        *SHORT,
        f"data.cache_dir={tmp_path}",
        "optimizer.learning_rate=0.1",
        "model.num_heads=2",
    )
    base = (*base, "model.num_layers=2")
    plain = losses(*make_run(base), 4)
    path = "docs.examples.own_parts"
    own_loss = losses(*make_run((*base, f"model.loss={path}:z_loss")), 4)
    own_optimizer = losses(*make_run((*base, f"optimizer.name={path}:sgd")), 4)
    # The first losses differ only by the z-loss term, which is about 1e-4 · log(257)².
    np.testing.assert_allclose(own_loss[0] - plain[0], 1e-4 * np.log(257) ** 2, rtol=0.1)
    assert own_optimizer[0] == plain[0] and own_optimizer[3] != plain[3]


def test_shard_a_tensor_splits_both_dims():
    y = shard_a_tensor.main()
    np.testing.assert_array_equal(y, np.arange(128.0).reshape(16, 8) + 1)
    assert {shard.data.shape for shard in y.addressable_shards} == {(8, 4)}


@pytest.mark.parametrize(
    "example, page",
    [
        ("gated_mean", "own_parts"),
        ("attention_block", "own_parts"),
        ("train_on_two_meshes", "python"),
    ],
)
def test_printed_code_equals_the_executed_example(example, page):
    code = (ROOT / "docs" / "examples" / f"{example}.py").read_text().replace("  # noqa: E402", "")
    printed = (ROOT / "docs" / f"{page}.md").read_text()
    assert code[code.index("\nimport ") :].strip() in printed


@pytest.mark.thorough
def test_metric_of_the_docs_is_the_share_of_right_tokens_on_any_mesh(tmp_path):
    code = (ROOT / "docs" / "examples" / "accuracy.py").read_text()
    assert code[code.index("\nfrom ") :].strip() in (ROOT / "docs" / "own_parts.md").read_text()
    overrides = (
        *SHORT,
        "model.name=docs.examples.accuracy:GPT2WithAccuracy",
        "model.num_layers=2",
        "model.num_heads=2",
        "train.num_steps=15",
        "optimizer.learning_rate=0.02",
        "eval.num_batches=1",
        f"data.cache_dir={tmp_path}",
    )
    accuracies = {}
    for name in ("gpt2", "gpt2_3d"):
        workdir = tmp_path / name
        flags = arguments(workdir, overrides)
        assert main([*flags, f"--config={ROOT}/configs/{name}.py"]) == 0
        entries = read_metrics(workdir / "metrics.jsonl")
        accuracies[name] = [entry["accuracy"] for entry in entries if "accuracy" in entry]
        assert any("eval_accuracy" in entry for entry in entries)
    assert accuracies["gpt2"] == pytest.approx(
        accuracies["gpt2_3d"], abs=0.02
    )  # of 256 tokens a step
    assert 0 <= accuracies["gpt2"][0] < accuracies["gpt2"][-1] < 1


@pytest.mark.thorough
def test_example_of_python_md_prints_equal_losses(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "examples" / "train_on_two_meshes.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"loss (\S+) on 1 device, (\S+) on 8", done.stdout)
    assert len(lines) == 5
    for one, eight in lines:
        assert float(eight) == pytest.approx(float(one), rel=1e-4)  # float32


def test_printed_callback_and_tracker_equal_the_executed_examples():
    code = (ROOT / "docs" / "examples" / "watch.py").read_text()
    printed = (ROOT / "docs" / "watch.md").read_text()
    callback, tracker = code[code.index("def stop_when_good") :].split("\n\n\n")
    assert callback in printed and tracker.rstrip() in printed


@pytest.mark.thorough
def test_callback_and_tracker_of_the_docs_run(corpus_overrides, tmp_path, capsys):
    overrides = (
        *TINY,
        *corpus_overrides,
        "train.num_steps=6",
        "eval.every_steps=3",
        "train.evaluation_callbacks=docs.examples.watch:stop_when_good",
        "log.trackers=docs.examples.watch:CsvTracker",
    )
    assert main(arguments(tmp_path, overrides)) == 0
    lines = [line.split(",") for line in (tmp_path / "values.csv").read_text().splitlines()]
    recorded = {(int(step), name): float(value) for step, name, value in lines}
    logged = {
        (entry["step"], name): value
        for entry in read_metrics(tmp_path / "metrics.jsonl")
        for name, value in entry.items()
        if name != "step" and value is not None
    }
    assert recorded == logged
    assert (6, "bits") in recorded


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, config",
    [("OPTForCausalLM", OPT), ("T5ForConditionalGeneration", T5)],
    ids=["opt", "t5"],
)
def test_example_of_models_md_trains(name, config, tmp_path, capsys):
    """Run the Python in docs/models.md; for T5, with the call that its comment shows."""
    save_model(tmp_path, name, **config)
    text = (ROOT / "docs" / "models.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    sources, tokens = jax.numpy.asarray(np.random.default_rng(0).integers(105, 361, (2, 3, 12)))
    inputs = (tokens,)
    if name.startswith("T5"):
        code, count = re.subn("logits = .*  # for T5: (.*)", r"logits = \1", code)
        assert count == 1
        inputs = (sources, tokens)
    names = {"PATH": str(tmp_path), "sources": sources, "tokens": tokens}
    exec(compile(code, "docs/models.md", "exec"), names)
    before = load(tmp_path)(*inputs)
    after = names["model"](*inputs)
    assert float(np.abs(before - after).max()) > 1e-4
    first, *_, last = map(float, capsys.readouterr().out.split())
    assert last < first
