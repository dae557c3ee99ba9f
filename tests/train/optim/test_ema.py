"""The moving average of parameters: its formula, its placement, and its uses."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from checkpoint.lazy import stored_arrays
from convert.source import load_params, read_source
from data.corpus import load_corpus
from tests.runs import FLOAT64, TINY, digest, make_run, placed_batch
from train.config.train_config import TrainConfig
from train.evaluation import evaluate
from train.lifecycle.phases import Phases
from train.lifecycle.restore import RestoredRun, restore_or_initialize
from train.lifecycle.workdir import write_run_files
from train.optim.ema import average_params
from train.state.train_state import average_of, shardings_of

pytestmark = pytest.mark.drawn(3, among="thorough")

EMA = ("train.ema_decay=0.6", "train.ema_schedule=cosine")
FROZEN = "optimizer.frozen=token_embedding,*.mlp.*"
UNEVEN = ("mesh.pipeline=2", "mesh.data=2", "pipeline.layers_per_stage=3,1")
HOSTED = ("memory.placement=host", "memory.offload_parameters_fraction=1.0", "memory.zero_stage=3")


def decay_of(schedule: str, step: int) -> float:
    """Return 0.6, or for "cosine" MoCo v3's increase from 0.6 to 1 in 20 steps."""
    if schedule == "constant":
        return 0.6
    return 1 - (1 - 0.6) * (math.cos(math.pi * step / 20) + 1) / 2


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_average_equals_its_formula(schedule):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        optimizer = optax.chain(optax.sgd(0.5), average_params(0.6, schedule, 20))
        params: Any = {"a": jnp.asarray(rng.normal(size=3)), "b": None}
        state = optimizer.init(params)
        expected = np.array(params["a"])
        for step in range(20):
            grads = {"a": jnp.asarray(rng.normal(size=3)), "b": None}
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            decay = decay_of(schedule, step)
            expected = decay * expected + (1 - decay) * np.array(params["a"])
    last: Any = state
    found = last[-1].average["a"]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.abs(found - params["a"]).max() > 1e-3  # the control: the average lags behind


@functools.cache
def run_of(*overrides: str):
    return make_run((*TINY, *overrides))


@pytest.mark.thorough
def test_average_of_a_run_equals_the_average_of_its_parameters(corpus_overrides):
    """Include the initial average, a skipped step, and frozen parameters."""
    with jax.enable_x64(True):
        run, corpus = run_of(*corpus_overrides, *FLOAT64, *EMA, FROZEN)
        state = run.state_layout.initial()
        expected = jax.device_get(state.params)
        assert digest(average_of(state)) == digest(state.params)
        for step in range(3):
            state, _ = run.compile_train_step()(state, placed_batch(run, corpus))
            d = decay_of("cosine", step)
            expected = jax.tree.map(lambda a, p, d=d: d * a + (1 - d) * p, expected, state.params)
        found = jax.device_get(average_of(state))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)
        nan = np.full((16, 16), np.nan, np.float32)
        state, _ = run.compile_train_step()(state, placed_batch(run, corpus, weights=nan))
        assert int(state.num_skipped) == 1
        jax.tree.map(np.testing.assert_array_equal, average_of(state), found)
    averages = jax.tree_util.tree_leaves_with_path(found)
    params = jax.device_get(state.params)
    for (path, average), param in zip(averages, jax.tree.leaves(params), strict=True):
        name = jax.tree_util.keystr(path)
        is_frozen = "token_embedding" in name or "['mlp']" in name
        assert (average != param).any() != is_frozen, name


@pytest.mark.thorough
@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
def test_average_is_initialized_to_the_parameters_in_host_memory_too(given, corpus_overrides):
    where = (*UNEVEN, *HOSTED, "precision.params=bfloat16", "precision.compute=bfloat16")
    run, _ = run_of(*corpus_overrides, *EMA, FROZEN, *where)
    params = None
    if given:
        other = run_of(*corpus_overrides, *UNEVEN, *where, "train.seed=1")[0].state_layout
        params = other.to_portable(other.initial()).params
        params = jax.device_put(params, shardings_of(run.state_layout.portable.params))
    state = run.state_layout.initial(params)
    assert shardings_of(run.state_layout.abstract) == jax.tree.map(lambda x: x.sharding, state)
    average = average_of(state)
    frozen = average_of(run.state_layout.abstract)["token_embedding"]
    wide = jax.tree.map(lambda x: np.asarray(x, np.float32), state.params)
    assert digest(jax.tree.map(lambda x: np.asarray(x, np.float32), average)) == digest(wide)
    assert average["decoder"]["layers"]["attention"]["qkv"]["kernel"].dtype == jnp.float32
    assert frozen.dtype == jnp.bfloat16  # a frozen parameter's average is the parameter itself
    seeds = run_of(*corpus_overrides, *where)[0].state_layout.initial().params
    assert (digest(state.params) == digest(seeds)) != given


@pytest.mark.thorough
def test_evaluation_uses_the_average(corpus_overrides):
    with jax.enable_x64(True):
        run, corpus = run_of(*corpus_overrides, *FLOAT64, *EMA, FROZEN)
        plain, _ = run_of(*corpus_overrides, *FLOAT64)
        state, _ = run.compile_train_step()(run.state_layout.initial(), placed_batch(run, corpus))
        scores = evaluate(run, corpus, state, Phases())

        def of(params) -> dict | None:
            there = dataclasses.replace(state, params=params, opt_state=())
            return evaluate(plain, corpus, there, Phases())

        assert scores == of(average_of(state)) != of(state.params)


def steps(run, start: RestoredRun, count: int, *, save_after: int = 0) -> tuple[list, Any]:
    """Run `count` steps; return their losses and the final state in the portable form."""
    state = start.state
    losses = []
    for step in range(1, count + 1):
        batch = run.place_batch(next(start.batches))
        state, metrics = run.compile_train_step()(state, batch)
        losses.append(float(metrics["loss"]))
        if step == save_after:
            fingerprint = load_corpus(run.config.data).fingerprint
            data_state = {"batches": start.batches.get_state(), "corpus": fingerprint}
            start.checkpoints.save(step, run.state_layout.to_portable(state), data_state)
            start.checkpoints.wait()
    return losses, run.state_layout.to_portable(state)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "features, place",
    [
        ((*EMA, "optimizer.name=lamb", "optimizer.layer_decay=0.7"), 2),
        ((*EMA, "optimizer.name=muon"), 2),
        (("optimizer.name=schedule_free",), 1),
    ],
    ids=["lamb", "muon", "schedule_free"],
)
def test_average_resumes_to_the_bit_and_on_another_mesh(
    features, place, corpus_overrides, tmp_path
):
    features = (*features, FROZEN)
    base = (*TINY, *corpus_overrides, *FLOAT64, *features)
    with jax.enable_x64(True):
        run, corpus = make_run((*base, *UNEVEN))
        write_run_files(tmp_path, run, corpus)
        losses, whole = steps(run, restore_or_initialize(run, corpus, tmp_path), 4, save_after=2)
        again, state = steps(run, restore_or_initialize(run, corpus, tmp_path), 2)
        assert again == losses[2:] and digest(state) == digest(whole)
        other, _ = make_run((*base, "mesh.fsdp=2", "memory.zero_stage=2"))
        start = restore_or_initialize(other, corpus, tmp_path)
        restored = average_of(other.state_layout.to_portable(start.state))
        # Starting from the run, or converting it, uses the average.
        for is_averaged in (True, False):
            source = read_source(tmp_path, averaged=is_averaged)
            read = load_params(source, other.state_layout.portable.params)
            assert (digest(read) == digest(restored)) == is_averaged
        again, state = steps(other, start, 2)
        np.testing.assert_allclose(again, losses[2:], rtol=1e-9, atol=0)
        pairs = (jax.tree.leaves(average_of(each)) for each in (state, whole))
        for found, wanted in zip(*pairs, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    names = stored_arrays(tmp_path / "checkpoints" / "2").keys()
    assert f"opt_state.{place}.average.decoder.layers.attention.qkv.kernel" in names
    assert not any(".mlp." in name for name in names if name.startswith("opt_state"))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        (
            "ema_decay",
            1.0,
            "must be more than 0 and less than 1, or None; choose for example 0.9999",
        ),
        ("ema_schedule", "linear", "is unknown; choose constant or cosine"),
    ],
)
def test_field_out_of_range_is_refused(field, value, rule):
    base = {"num_steps": 1, "num_microbatches": 1, "seed": 0, "remat": "none"}
    with pytest.raises(ValueError) as caught:
        TrainConfig(**base, **{field: value})
    assert f"train.{field}={value!r} {rule}" in str(caught.value)
