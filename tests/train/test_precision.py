"""float16 and bfloat16: allowed differences from float32, loss scaling, stochastic rounding."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.text.gpt2 import GPT2
from pipeline.stack_layout import StackLayout
from tests.runs import TINY, arguments, losses, make_run, reference_losses
from train.main import main
from train.precision import LossScale, PrecisionConfig, rounded_at_random, to_bfloat16
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.drawn(4, among="thorough")

FLOAT16 = ("precision.compute=float16",)
MESHES = {
    "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
    "data=4, ZeRO 3": ("mesh.data=4", "memory.zero_stage=3"),
}


class Overflows(GPT2):
    """A model whose activations overflow float16 in steps 7 and 12 (of 16 examples each)."""

    def head(self, x_BTD, batch):
        step = batch["index"] // 16 + 1 if "index" in batch else jnp.zeros(len(x_BTD), jnp.uint32)
        factor = jnp.where(jnp.any((step == 7) | (step == 12)), 60000, 1).astype(x_BTD.dtype)
        return super().head(x_BTD * factor * factor, batch)


@pytest.mark.thorough
def test_stochastic_rounding_is_unbiased_between_neighbours():
    step = 2.0**-7  # spacing of bfloat16 between 1 and 2
    x = jnp.full(100_000, 1 + step / 4, jnp.float32)
    for sign in (1, -1):
        rounded = np.asarray(to_bfloat16(sign * x, jax.random.key(0)), np.float64)
        assert set(rounded) == {sign * 1.0, sign * (1 + step)}
        # Five standard deviations of the mean of len(x) draws.
        tolerance = 5 * step * np.sqrt(0.25 * 0.75 / len(x))
        assert abs(rounded.mean() - sign * (1 + step / 4)) < tolerance
    exact = jnp.array([0, -0.0, 1, -1.5, 3e38, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16)
    found = to_bfloat16(exact.astype(jnp.float32), jax.random.key(1))
    bits = [np.asarray(x).view(np.uint16) for x in (found, exact)]
    np.testing.assert_array_equal(bits[0], bits[1])


@pytest.mark.thorough
def test_rounding_depends_on_the_layer_not_on_its_slot():
    layers = jax.random.normal(jax.random.key(0), (5, 7, 3))
    plain = StackLayout(num_layers=5, chunks=(((0, 5),),))
    uneven = StackLayout(num_layers=5, chunks=(((0, 2), (4, 1)), ((2, 2), (5, 0))))

    def rounded(layout, step):
        tree = {"decoder": layout.to_slots(layers), "table": layers}
        like = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
        row_ids = {"decoder": layout.layer_of_slot, "table": np.arange(5)}
        found = rounded_at_random(tree, like, row_ids, 0, jnp.int32(step))
        return layout.to_layers(found["decoder"]), found["table"]

    for a, b in zip(rounded(plain, 3), rounded(uneven, 3), strict=True):
        np.testing.assert_array_equal(a, b)
    stack, table = rounded(plain, 3)
    assert (stack != table).any() and (stack != rounded(plain, 4)[0]).any()


@pytest.mark.thorough
def test_bfloat16_master_weights_learn_from_updates_too_small_for_them(
    corpus_overrides, monkeypatch
):
    base = (*TINY, *corpus_overrides, "optimizer.learning_rate=3e-4", "model.dropout=0.0")
    narrow = (*base, "precision.params=bfloat16")

    def fall(overrides):
        found = losses(*make_run(overrides), 60)
        return found[0] - np.mean(found[-5:])

    wide = fall(base)
    at_random = fall(narrow)
    state = make_run(narrow)[0].state_layout.abstract
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    moments = {leaf.dtype for leaf in jax.tree.leaves(state.opt_state)}
    assert moments == {jnp.dtype("float32"), jnp.dtype("int32")}
    monkeypatch.setattr("train.precision.to_bfloat16", lambda x, key: x.astype(jnp.bfloat16))
    to_nearest = fall(narrow)
    assert at_random == pytest.approx(wide, rel=0.05)
    assert to_nearest < 0.9 * wide


@pytest.mark.thorough
@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_low_precision_losses_follow_float32(compute, corpus_overrides):
    base = (*TINY, *corpus_overrides)
    found = losses(*make_run((*base, f"precision.compute={compute}")), 8)
    # Products are rounded to 11 and to 8 bits, and Adam's first steps amplify the errors.
    tolerance = {"float16": 2e-4, "bfloat16": 2e-3}[compute]
    np.testing.assert_allclose(found, reference_losses(base, 8), rtol=tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_float16_losses_are_equal_on_every_mesh(mesh, corpus_overrides):
    base = (*TINY, *corpus_overrides, *FLOAT16)
    found = losses(*make_run((*base, *MESHES[mesh])), 10)
    np.testing.assert_allclose(found, reference_losses(base, 10), rtol=2e-3)


def values(workdir, *names: str) -> list[tuple]:
    lines = read_metrics(workdir / "metrics.jsonl")
    return [tuple(line[name] for name in names) for line in lines if "loss" in line]


@pytest.mark.thorough
def test_float16_recovers_from_overflows_and_resumes_exactly(corpus_overrides, tmp_path):
    overrides = (
        *TINY,
        *corpus_overrides,
        *FLOAT16,
        "model.name=tests.train.test_precision:Overflows",
        "precision.loss_scale=1e7",
        "precision.loss_scale_window=4",
        "eval.every_steps=0",
        "train.max_nonfinite_steps=3",
        "checkpoint.every_steps=9",
    )
    assert main(arguments(tmp_path / "whole", overrides)) == 0
    found = values(tmp_path / "whole", "step", "loss_scale", "num_skipped", "grad_norm")
    scale = {step: value for step, value, *_ in found}
    skipped = {step: value for step, _, value, _ in found}
    # At these two steps the loss exceeds the range of float16 with any scale.
    assert scale[8] == scale[7] / 2 and scale[13] == scale[12] / 2
    assert skipped[7] == skipped[6] + 1 and skipped[12] == skipped[11] + 1
    assert skipped[20] == sum(not np.isfinite(norm) for *_, norm in found)
    assert scale[20] > scale[13]  # it grows again
    # Stop after step 9, between the two overflows, and resume.
    first = (*overrides, "train.num_steps=20")
    assert main([*arguments(tmp_path / "parts", first)]) == 0
    for step in ("18", "20"):
        shutil.rmtree(tmp_path / "parts" / "checkpoints" / step)
    assert main([*arguments(tmp_path / "parts", first)]) == 0
    names = ("step", "loss", "loss_scale", "num_skipped", "grad_norm")
    np.testing.assert_array_equal(
        values(tmp_path / "parts", *names), values(tmp_path / "whole", *names)
    )


def test_loss_scale_decreases_waits_and_increases():
    config = PrecisionConfig(
        compute="float16",
        params="float32",
        loss_scale=8.0,
        loss_scale_window=3,
        loss_scale_hysteresis=2,
        loss_scale_min=2.0,
    )
    scale = LossScale.initial()
    found = []
    for finite in "nnnnnyyynynyyyyyy":
        scale = scale.after(jnp.bool_(finite == "y"), config)
        found.append(float(scale.value(config)))
    # Two nonfinite steps halve it, then every further one does; after it grows, it takes two again.
    expected = [8, 4, 2, 2, 2, 2, 2, 4, 4, 4, 2, 2, 2, 4, 4, 4, 8]
    assert found == expected
    assert not LossScale.initial().can_fall(
        PrecisionConfig(compute="float16", params="float32", loss_scale_window=0)
    )


@pytest.mark.thorough
def test_too_many_nonfinite_steps_at_the_smallest_scale_end_the_run(
    corpus_overrides, tmp_path, capsys
):
    overrides = (
        *TINY,
        *corpus_overrides,
        *FLOAT16,
        "train.max_nonfinite_steps=2",
        "precision.loss_scale=1e30",
        "precision.loss_scale_window=0",
    )
    assert main(arguments(tmp_path, overrides)) == 70
    assert "of 2 steps in a row" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_are_reduced_in_the_configured_dtype(stage, corpus_overrides):
    base = (*TINY, *corpus_overrides, "mesh.data=4", f"memory.zero_stage={stage}")
    run, corpus = make_run((*base, "precision.reduce=bfloat16"))
    found = losses(run, corpus, 10)
    wide = reference_losses((*TINY, *corpus_overrides), 10)
    assert found != wide
    np.testing.assert_allclose(found, wide, rtol=1e-2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute": "int8"}, "precision.compute='int8' is unknown; choose bfloat16, float16"),
        ({"params": "float16"}, "precision.params='float16' is unknown"),
        ({"reduce": "float16"}, "sums over tokens exceed the range of float16 unless"),
        ({"reduce": "int8"}, "choose bfloat16, float16, float32 or None"),
        ({"compute": "float64"}, "set both to float64, or neither"),
        ({"compute": "float16", "params": "bfloat16"}, "fewer digits than the computation"),
        ({"loss_scale": 0.5}, "loss_scale_min=1.0 must not be more than precision.loss_scale=0.5"),
        ({"loss_scale_hysteresis": 0}, "loss_scale_hysteresis=0 must be at least 1"),
    ],
)
def test_bad_values_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PrecisionConfig(**{"compute": "float32", "params": "float32", **fields})
