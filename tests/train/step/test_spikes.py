"""Spikes of the gradient norm: their steps are skipped, in the same way on all meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from predict.program.communication import collectives
from tests.runs import TINY, digest, make_run, placed_batch
from tests.train.lifecycle.test_divergence import logged, names, train
from train.lifecycle.exit_codes import FINISHED
from train.state.train_state import Spikes
from train.step.spikes import MAX_SPIKES, MIN_NORMS, SPIKE_MEAN_DECAY, detect_spike

pytestmark = pytest.mark.usefixtures("shared_steps")

CUBE = ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")


def test_state_has_no_spike_statistics_by_default(corpus_overrides):
    run, _ = make_run((*TINY, *corpus_overrides))
    assert run.state_layout.abstract.spikes is run.state_layout.portable.spikes is None


#: Replaces arrays of a batch so that its gradient norm is an outlier: the loss comes from a single
#: token, which does not occur in the text.
OUTLIER = {
    "weights": np.eye(16, dtype=np.float32) * (np.arange(16) == 0),
    "targets": np.full((16, 16), 250, np.int32),
}


def outlier_steps(corpus_overrides, *mesh: str) -> list[tuple[float, int, float]]:
    """Return (grad_norm, num_skipped, mean norm) for a normal step, an outlier, a normal step."""
    run, corpus = make_run((*TINY, *corpus_overrides, *mesh, "train.skip_spikes=2.0"))
    usual = placed_batch(run, corpus)
    state = run.state_layout.initial()
    outlier = placed_batch(run, corpus, **OUTLIER)
    steps = []
    digests = []
    for batch in (usual, outlier, usual):
        state, metrics = run.compile_train_step()(state, batch)
        spikes = state.spikes
        assert spikes is not None
        steps.append((float(metrics["grad_norm"]), int(state.num_skipped), mean_of(spikes)))
        digests.append(digest((state.params, state.opt_state)))
        # As if there had been 20 steps with the norm of the first one.
        count = jax.device_put(np.int32(MIN_NORMS), spikes.num_norms.sharding)
        mean = (1 - SPIKE_MEAN_DECAY**MIN_NORMS) * steps[0][0]
        mean = jax.device_put(np.float32(mean), spikes.norm_mean.sharding)
        state = dataclasses.replace(
            state, spikes=dataclasses.replace(spikes, num_norms=count, norm_mean=mean)
        )
    assert digests[0] == digests[1] != digests[2]
    return steps


@pytest.mark.thorough
def test_outlier_batch_is_skipped_on_all_meshes(corpus_overrides):
    steps = outlier_steps(corpus_overrides)
    assert [num_skipped for _, num_skipped, _ in steps] == [0, 1, 1]
    assert steps[1][0] > 2 * steps[0][0]
    # float32 with another order of summation.
    on_mesh = np.array(outlier_steps(corpus_overrides, *CUBE))
    np.testing.assert_allclose(on_mesh, np.array(steps), rtol=1e-4)


@pytest.mark.thorough
def test_save_after_a_spike_waits_for_the_next_good_step(corpus_overrides, tmp_path, monkeypatch):
    """Earlier steps may have damaged the parameters, whose gradients are then large."""
    monkeypatch.setattr("train.step.spikes.MIN_NORMS", 2)
    changes = ("checkpoint.every_steps=3", "train.num_steps=8", "train.skip_spikes=2.0")
    overrides = (*TINY, *corpus_overrides, *changes)
    assert train(tmp_path, overrides, {6}, OUTLIER) == FINISHED
    num_skipped = logged(tmp_path, "num_skipped")
    assert (num_skipped[5], num_skipped[6], num_skipped[8]) == (0, 1, 1)
    assert names(tmp_path) == ["3", "7", "8"]


@pytest.mark.thorough
def test_spike_detection_adds_no_communication(corpus_overrides):
    run, _ = make_run((*TINY, *corpus_overrides, *CUBE))
    looking, _ = make_run((*TINY, *corpus_overrides, *CUBE, "train.skip_spikes=2"))

    def found(run):
        return sorted(
            (c.kind, c.axes, c.bytes) for c in collectives(run.compile_train_step(), run.mesh)
        )

    assert found(looking) == found(run) != []


def judged(norms, spikes: Spikes | None = None, factor: float = 3.0) -> tuple[str, Spikes]:
    """Return a letter per norm, for an accepted or a skipped step, and the final statistics."""
    spikes = spikes or Spikes(jnp.float32(0), jnp.int32(0), jnp.int32(0))
    letters = ""
    for norm in np.asarray(norms, np.float32):
        accepted, spikes = detect_spike(spikes, norm, jnp.isfinite(norm), factor)
        letters += "a" if accepted else "s"
    return letters, spikes


def mean_of(spikes: Spikes) -> float:
    return float(spikes.norm_mean) / (1 - SPIKE_MEAN_DECAY ** int(spikes.num_norms))


@pytest.mark.thorough
def test_no_step_is_a_spike_before_the_mean_is_known():
    letters, _ = judged([*[1.0] * (MIN_NORMS - 1), 99.0])
    assert letters == "a" * MIN_NORMS
    letters, _ = judged([*[1.0] * MIN_NORMS, 3.1, 2.9])
    assert letters == "a" * MIN_NORMS + "sa"


def test_spike_is_excluded_from_the_mean_of_accepted_norms():
    norms = np.random.default_rng(0).uniform(0.5, 1.5, 40)
    _, without = judged(norms)
    weights = SPIKE_MEAN_DECAY ** np.arange(40)[::-1]
    # float32, rounded 40 times.
    assert mean_of(without) == pytest.approx(np.average(norms, weights=weights), rel=1e-5)
    letters, spikes = judged([*norms[:30], 50.0, np.nan, np.inf, *norms[30:]])
    assert letters == "a" * 30 + "sss" + "a" * 10
    jax.tree.map(np.testing.assert_array_equal, spikes, without)


def test_many_consecutive_spikes_become_the_new_level():
    letters, spikes = judged([*[1.0] * 50, *[100.0] * (MAX_SPIKES + 5)])
    assert letters == "a" * 50 + "s" * MAX_SPIKES + "a" * 5
    assert mean_of(spikes) == pytest.approx(100, rel=1e-5)  # float32
    assert int(spikes.num_norms) == 5
    # A normal norm after MAX_SPIKES spikes is not a new level.
    letters, spikes = judged([*[1.0] * 50, *[100.0] * MAX_SPIKES, 1.0, 100.0])
    assert letters == "a" * 50 + "s" * MAX_SPIKES + "as"
    assert int(spikes.num_norms) == 51


def test_nonfinite_step_between_spikes_is_neither_accepted_nor_a_spike():
    letters, spikes = judged([*[1.0] * 50, 100.0, np.nan, 100.0])
    assert letters == "a" * 50 + "sss" and int(spikes.num_in_a_row) == 2
