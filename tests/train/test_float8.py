"""Runs in float8: near bfloat16, with the same scales on every mesh, and bit-equal after a stop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoint.lazy import stored_arrays
from models.layers import experts, float8
from tests.runs import ROOT, TINY, arguments, losses, make_run, placed_batch, write_corpus
from tests.train.refusals import refusal
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.drawn(3, among="thorough")

FLOAT8 = (*TINY, "precision.compute=float8")
LLAMA = str(ROOT / "configs/llama.py")
BFLOAT16 = (*TINY, "precision.compute=bfloat16")
MESHES = {
    "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
    "2x2x2, zero bubble, ZeRO 3": (
        "mesh.pipeline=2",
        "mesh.fsdp=2",
        "mesh.model=2",
        "pipeline.schedule=zero_bubble",
        "memory.zero_stage=3",
    ),
    "interleaved, uneven": (
        "mesh.pipeline=2",
        "pipeline.schedule=interleaved_1f1b",
        "pipeline.chunks=2",
        "pipeline.layers_per_stage=2,1,1,0",
    ),
    "data=4, host memory": ("mesh.data=4", "memory.zero_stage=1", "memory.placement=host"),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_device(corpus):
    """A run with delayed scaling on one device, and its corpus."""
    return make_run((*FLOAT8, *corpus))


def trained(run, corpus, num_steps):
    """Return (losses, exponents of all scales [layers, n, 2]) after some steps."""
    state = run.state_layout.initial()
    step = run.compile_train_step()
    found = []
    batch = placed_batch(run, corpus)
    for _ in range(num_steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    portable = run.state_layout.to_portable(state)
    assert portable.amax_history is not None
    history = jnp.asarray(jax.device_get(portable.amax_history["decoder"]))
    return found, np.asarray(float8.exponents(history))


@pytest.mark.thorough
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_losses_are_near_those_of_bfloat16(scaling, corpus, one_device):
    run, data = one_device
    if scaling != run.config.precision.float8_scaling:
        run, data = make_run((*FLOAT8, *corpus, f"precision.float8_scaling={scaling}"))
    found = losses(run, data, 20)
    expected = losses(*make_run((*BFLOAT16, *corpus)), 20)
    np.testing.assert_allclose(found, expected, rtol=0.01)
    assert found != expected


@pytest.mark.slow(only=["interleaved, uneven", "data=4, host memory"])
@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_scales_are_the_same_on_every_mesh(mesh, corpus, one_device):
    run, data = one_device
    expected, exponents = trained(run, data, 4)
    run, data = make_run((*FLOAT8, *corpus, *MESHES[mesh]))
    found, found_exponents = trained(run, data, 4)
    # Sums are rounded to bfloat16 in another order, and float8 magnifies that.
    np.testing.assert_allclose(found, expected, rtol=3e-3)
    # A largest value just below a power of two may be rounded to the other side of it.
    assert np.abs(found_exponents - exponents).max() <= 1
    assert np.mean(found_exponents == exponents) > 0.9


EXPERTS = (
    *(o for o in FLOAT8 if not o.startswith(("model.num_layers", "model.dropout"))),
    "model.num_layers=2",
    "model.num_kv_heads=2",
    "model.mlp_dim=48",
    "model.num_experts=4",
    "model.init_stddev=0.2",
)


@functools.cache
def experts_on_one_device(corpus):
    return trained(*make_run((*EXPERTS, *corpus), LLAMA), 4)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", ["expert=2, pipeline=2", "expert=2, model=2", "data=2"])
def test_experts_have_the_same_losses_and_scales_on_every_mesh(mesh, corpus):
    expected, exponents = experts_on_one_device(corpus)
    axes = tuple(f"mesh.{axis}" for axis in mesh.split(", "))
    found, found_exponents = trained(*make_run((*EXPERTS, *corpus, *axes), LLAMA), 4)
    # A token near a tie can go to another expert in bfloat16.
    np.testing.assert_allclose(found, expected, rtol=1e-2)
    # Four linear layers of attention, and the three products of the experts.
    assert exponents.shape == (2, 7, 2)
    assert np.abs(found_exponents - exponents).max() <= 1
    first = [float8.FIRST_EXPONENTS[name] for name in float8.WITH_HISTORY]
    assert not (exponents == first).all(axis=(0, 1)).any()


@pytest.mark.thorough
def test_sending_tokens_in_float8_changes_nothing(corpus, monkeypatch):
    """Products round the tokens of other devices to the codes that these have sent."""
    sizes = (*EXPERTS, *corpus, "mesh.expert=2")
    found, exponents = trained(*make_run(sizes, LLAMA), 3)
    monkeypatch.setattr(experts, "_sends_of", lambda weights: None)
    expected, expected_exponents = trained(*make_run(sizes, LLAMA), 3)
    assert found == expected
    np.testing.assert_array_equal(exponents, expected_exponents)


@pytest.mark.thorough
def test_losses_of_experts_are_near_those_of_bfloat16(corpus):
    overrides = (*EXPERTS, *corpus, "precision.float8_scaling=current")
    found = losses(*make_run(overrides, LLAMA), 20)
    expected = losses(*make_run((*overrides, "precision.compute=bfloat16"), LLAMA), 20)
    np.testing.assert_allclose(found, expected, rtol=0.02)
    assert found != expected


@pytest.mark.thorough
def test_scales_adapt_from_their_first_values(one_device):
    run, data = one_device
    _, exponents = trained(run, data, 3)
    first = [float8.FIRST_EXPONENTS[name] for name in float8.WITH_HISTORY]
    assert exponents.shape == (4, 4, 2)  # four layers of four linear layers
    assert not (exponents == first).all(axis=(0, 1)).any()


def logged(workdir):
    times = ("step_time_s", "data_wait_s", "tokens_per_s")
    entries = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in entry.items() if k not in times} for entry in entries]


def train(workdir, overrides, num_steps):
    constant = ("optimizer.schedule=constant", "checkpoint.every_steps=3")
    assert main(arguments(workdir, (*overrides, *constant, f"train.num_steps={num_steps}"))) == 0


@pytest.mark.thorough
def test_resumed_run_is_bitwise_equal(corpus, tmp_path):
    overrides = (*FLOAT8, *corpus, "eval.every_steps=4")
    train(tmp_path / "whole", overrides, 8)
    train(tmp_path / "parts", overrides, 3)
    train(tmp_path / "parts", overrides, 8)
    found = [entry for entry in logged(tmp_path / "parts") if entry["step"] != 3]
    assert found == [entry for entry in logged(tmp_path / "whole") if entry["step"] != 3]
    assert {"float8_overflows", "float8_underflows"} <= found[0].keys()


@pytest.mark.thorough
@pytest.mark.parametrize("before, after", [(BFLOAT16, FLOAT8), (FLOAT8, BFLOAT16)])
def test_run_can_change_between_float8_and_bfloat16(before, after, corpus, tmp_path):
    train(tmp_path, (*before, *corpus), 3)
    assert ("amax_history.decoder" in stored_arrays(tmp_path / "checkpoints/3")) == (
        before is FLOAT8
    )
    train(tmp_path, (*after, *corpus), 6)
    found = [entry["loss"] for entry in logged(tmp_path) if "loss" in entry]
    assert len(found) == 6 and found[-1] < found[0]
    assert ("amax_history.decoder" in stored_arrays(tmp_path / "checkpoints/6")) == (
        after is FLOAT8
    )


@pytest.mark.thorough
def test_clipped_values_are_counted(one_device, corpus, monkeypatch):
    def overflows(run, data):
        _, metrics = run.compile_train_step()(run.state_layout.initial(), placed_batch(run, data))
        return int(metrics["float8_overflows"])

    assert overflows(*one_device) == 0
    monkeypatch.setitem(float8.FIRST_EXPONENTS, "input", -12)  # which the step has as a constant
    # The outputs of the norms; at first, other inputs are smaller.
    assert overflows(*make_run((*FLOAT8, *corpus))) == 8


@pytest.mark.thorough
def test_step_with_infinite_activations_is_skipped(one_device):
    """An infinite bias before a GELU gives the next layer an infinite input."""
    run, data = one_device
    state = run.state_layout.initial()
    up = state.params["decoder"]["layers"]["mlp"]["up"]
    up["bias"] = up["bias"].at[1, 0].set(jnp.inf)
    before = jax.device_get(state.params)
    state, metrics = run.compile_train_step()(state, placed_batch(run, data))
    assert int(metrics["num_skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


def test_model_without_suitable_sizes_is_refused(corpus, tmp_path, capsys):
    sizes = ("model.embed_dim=40", "model.num_heads=4")
    error = refusal(tmp_path, (*FLOAT8, *corpus, *sizes, "model.mlp_dim=40"), capsys)
    assert "no linear layer of model.name='gpt2' has multiples of 16 inputs and outputs" in error
