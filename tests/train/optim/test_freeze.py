"""Frozen parameters: they do not change, cost nothing, and bad patterns are rejected."""

import functools
import re

import jax
import numpy as np
import pytest

from checkpoint.layout import DATA_STATE, MANIFEST, STRUCTURE
from data.batches import train_batches
from models.layers.lora import LoraConfig
from predict.program.communication import collectives
from predict.program.flops import matmul_flops
from tests.runs import TINY, make_run
from train.lifecycle.workdir import check, write_run_files
from train.optim.freeze import frozen_params
from train.run.summary import describe

pytestmark = pytest.mark.drawn(1, among="thorough")

MLP = "optimizer.frozen=*.mlp.*"
PARAMS = {"table": np.zeros(2), "decoder": {"norm": {"scale": np.ones(2), "bias": np.zeros(2)}}}


def test_pattern_marks_matching_parameters():
    found = frozen_params(PARAMS, ("decoder.*.sc*", "table"), LoraConfig())
    assert found == {"table": True, "decoder": {"norm": {"scale": True, "bias": False}}}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("table", "decoder.norm.skale"), "'decoder.norm.skale' matches no parameter; the nearest"),
        (("encoder.*",), "the nearest are decoder.norm."),
        (("Q*",), "the nearest are decoder, table"),
        (("*",), "optimizer.frozen=* matches all 3 parameters, so there is nothing to train"),
        (("table", "decoder.*"), "optimizer.frozen=table,decoder.* matches all 3 parameters"),
    ],
)
def test_pattern_that_matches_nothing_or_everything_is_rejected(patterns, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        frozen_params(PARAMS, patterns, LoraConfig())


@functools.cache
def run_of(*overrides: str):
    return make_run((*TINY, *overrides))


def a_step(run, corpus):
    """Return (parameters before, state after, metrics) of one step."""
    state = run.state_layout.initial()
    before = jax.device_get(state.params)
    rows = next(train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed))
    batch = run.place_batch(rows)
    return before, *run.compile_train_step()(state, batch)


@pytest.mark.thorough
def test_frozen_parameters_do_not_change_and_have_no_moments(corpus_overrides):
    run, corpus = run_of(*corpus_overrides, MLP)
    before, state, _ = a_step(run, corpus)
    of_mlp = [leaf.size for leaf in jax.tree.leaves(before["decoder"]["layers"]["mlp"])]
    assert f" parameters ({sum(of_mlp):,} frozen), 4 layers" in describe(run, corpus)
    for path, moved in jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda a, b: bool((a != b).any()), before, state.params)
    ):
        assert moved == ("['mlp']" not in jax.tree_util.keystr(path)), path
    moments = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(state.opt_state)]
    assert any(".mu" in name for name in moments) and not any("['mlp']" in name for name in moments)


@pytest.mark.thorough
def test_gradient_norm_covers_trained_parameters_only(corpus_overrides):
    """Two halves of the parameters are frozen in turn; their squared norms sum to the total."""
    rest = "token_embedding,position_embedding,*norm*,*.attention.*"
    norms = [
        float(a_step(*run_of(*corpus_overrides, *frozen))[2]["grad_norm"])
        for frozen in ((), (MLP,), (f"optimizer.frozen={rest}",))
    ]
    # float32: about 1e-7 per sum of some thousand squares.
    assert norms[0] ** 2 == pytest.approx(norms[1] ** 2 + norms[2] ** 2, rel=1e-5)
    assert min(norms) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["zero_bubble", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_gradients_of_frozen_parameters_are_not_computed(schedule, corpus_overrides):
    mesh = ("mesh.pipeline=2", "mesh.data=2", f"pipeline.schedule={schedule}")
    plain, _ = run_of(*corpus_overrides, *mesh)
    frozen, _ = run_of(*corpus_overrides, *mesh, MLP)

    def found(run) -> tuple[float, int]:
        over_data = (
            c.bytes for c in collectives(run.compile_train_step(), run.mesh) if "data" in c.axes
        )
        return matmul_flops(run.compile_train_step()) or 0.0, sum(over_data)

    (plain_flops, plain_bytes) = found(plain)
    (frozen_flops, frozen_bytes) = found(frozen)
    sizes = jax.tree_util.tree_leaves_with_path(frozen.state_layout.abstract.params)
    of_mlp = sum(x.size * 4 for path, x in sizes if "['mlp']" in jax.tree_util.keystr(path))
    assert frozen_bytes == plain_bytes - of_mlp // 2  # each stage has half of the layers
    assert frozen_flops < 0.9 * plain_flops
    assert (
        frozen.estimate_memory().device["gradients"]
        == plain.estimate_memory().device["gradients"] - of_mlp // 2
    )


def test_resuming_with_other_frozen_parameters_or_average_is_rejected(corpus_overrides, tmp_path):
    run, corpus = run_of(*corpus_overrides, MLP)
    write_run_files(tmp_path, run, corpus)
    checkpoint = tmp_path / "checkpoints" / "3"
    checkpoint.mkdir(parents=True)
    # Older versions listed no config.yaml in the checksums, so the one of the workdir counts.
    names = (STRUCTURE, MANIFEST, DATA_STATE)
    lines = (f"{'0' * 64}  {name}\n" for name in names)
    (checkpoint / "checksums.sha256").write_text(f"# {len(names)} files\n{''.join(lines)}")
    check(tmp_path, run)
    for change, line in {
        "optimizer.frozen=": "optimizer.frozen: ['*.mlp.*'] -> []",
        "optimizer.name=sgd": "optimizer.name: 'adamw' -> 'sgd'",
        "train.ema_decay=0.9": "train.ema_decay: None -> 0.9",
    }.items():
        with pytest.raises(ValueError, match=re.escape(line)):
            check(tmp_path, run_of(*corpus_overrides, MLP, change)[0])
