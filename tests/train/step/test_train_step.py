"""Properties of the compiled training step of GPT-2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from predict.program.communication import collectives
from predict.program.memory import memory
from tests.runs import TINY, make_run, placed_batch

pytestmark = pytest.mark.drawn(3, among="thorough")

CUBE = ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")


def microbatches(count: int) -> tuple[str, ...]:
    """Return the overrides for `count` microbatches of 4 sequences."""
    return (f"train.num_microbatches={count}", f"data.global_batch_size={4 * count}")


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [CUBE, ("mesh.data=4", "mesh.model=2")], ids=["2x2x2", "4x2"])
def test_nothing_crosses_data_inside_the_microbatch_loop(mesh, corpus_overrides):
    run, _ = make_run((*TINY, *corpus_overrides, *mesh, "train.num_microbatches=4"))
    found = collectives(run.compile_train_step(), run.mesh)
    assert [c for c in found if "data" in c.axes and c.loop_depth > 0] == []
    outside = [c for c in found if "data" in c.axes]
    assert outside and all(c.kind == "all-reduce" for c in outside)
    # Every gradient is reduced once: its bytes on a device, and a few scalars.
    gradient_bytes = sum(
        4 * np.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(run.state_layout.abstract.params)
    )
    assert gradient_bytes <= sum(c.bytes for c in outside) <= gradient_bytes + 64


def test_pipeline_loop_sends_once_each_way(corpus_overrides):
    run, _ = make_run((*TINY, *corpus_overrides, *CUBE, "train.num_microbatches=4"))
    permutes = [
        c for c in collectives(run.compile_train_step(), run.mesh) if c.axes == ("pipeline",)
    ]
    assert [(c.kind, c.loop_depth) for c in permutes if c.loop_depth] == [
        ("collective-permute", 1)
    ] * 2


@pytest.mark.thorough
def test_1f1b_memory_is_bounded_by_the_stages_and_gpipe_grows(corpus_overrides):
    def temporaries(schedule, count):
        overrides = (*TINY, *corpus_overrides, *CUBE, *microbatches(count), "train.remat=none")
        run, _ = make_run((*overrides, f"pipeline.schedule={schedule}", "model.embed_dim=64"))
        temp_bytes = memory(run.compile_train_step()).temp_bytes
        assert temp_bytes is not None
        return temp_bytes

    assert temporaries("1f1b", 32) <= 1.15 * temporaries("1f1b", 8)
    assert temporaries("gpipe", 32) > 2 * temporaries("gpipe", 8)


@pytest.mark.thorough
def test_loss_is_the_weighted_mean_for_any_number_of_microbatches(corpus_overrides):
    weights = np.zeros((16, 16), np.float32)
    weights[3, :5] = 1.0
    weights[12, 7] = 0.5
    values = []
    for count in (1, 8):
        overrides = (*TINY, *corpus_overrides, f"train.num_microbatches={count}")
        run, corpus = make_run(overrides)
        state, metrics = run.compile_train_step()(
            run.state_layout.initial(), placed_batch(run, corpus, weights=weights)
        )
        values.append(metrics["loss"])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)  # float32, other order of summation
    assert abs(values[0] - np.log(257)) < 0.5  # an untrained model: log of 257 tokens


@pytest.mark.thorough
def test_step_with_non_finite_loss_changes_only_the_counters(corpus_overrides):
    run, corpus = make_run((*TINY, *corpus_overrides))
    before = run.state_layout.initial()
    expected = jax.device_get((before.params, before.opt_state))
    weights = np.full((16, 16), np.nan, np.float32)
    state, metrics = run.compile_train_step()(before, placed_batch(run, corpus, weights=weights))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), expected)
    assert (int(state.step), int(state.num_skipped)) == (1, 1)
    state, metrics = run.compile_train_step()(state, placed_batch(run, corpus))
    assert (int(state.step), int(metrics["num_skipped"])) == (2, 1)
    assert np.isfinite(metrics["loss"])
    # A skipped step does not advance the learning-rate schedule.
    assert float(metrics["learning_rate"]) == pytest.approx(0.01 / 5)


@pytest.mark.thorough
def test_bfloat16_compute_keeps_float32_master_weights_and_close_losses(corpus_overrides):
    overrides = (*TINY, *corpus_overrides, *CUBE)
    values = {}
    for compute in ("float32", "bfloat16"):
        run, corpus = make_run((*overrides, f"precision.compute={compute}"))
        state, metrics = run.compile_train_step()(
            run.state_layout.initial(), placed_batch(run, corpus)
        )
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
        values[compute] = float(metrics["loss"])
    assert values["bfloat16"] != values["float32"]
    # bfloat16 keeps 8 bits: 2**-8 of a logit, averaged over 256 tokens.
    assert values["bfloat16"] == pytest.approx(values["float32"], rel=2**-8)


def test_parameters_and_optimizer_state_are_split_over_the_mesh(corpus_overrides):
    run, _ = make_run((*TINY, *corpus_overrides, "mesh.fsdp=2", "mesh.model=2", "mesh.pipeline=2"))
    state = run.state_layout.initial()
    kernel = state.params["decoder"]["layers"]["mlp"]["up"]["kernel"]
    assert kernel.shape == (4, 32, 128)
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 16, 64)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape]
    assert len(moments) == 2
    assert all(m.sharding.is_equivalent_to(kernel.sharding, 3) for m in moments)
