"""The logged learning rate is the one that updates used, or there is none."""

import jax
import numpy as np
import optax
import pytest

from data.batches import train_batches
from tests.runs import TINY, make_run

pytestmark = pytest.mark.drawn(2, among="thorough")

#: Gradient descent without momentum or clipping, so that the change of the parameters divided by
#: the gradient is the learning rate.
DESCENT = (
    *TINY,
    "model.num_layers=1",
    "model.dropout=0.0",
    "train.num_microbatches=1",
    "optimizer.clip_norm=0",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "precision.compute=float64",
    "precision.params=float64",
)


def mine(count):
    """A schedule unlike the config's."""
    return 0.003 / (1 + count)


def with_given_schedule_injected(config, schedule):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)


def with_rare_updates(config, schedule):
    """The schedule is called once in two steps."""
    return optax.MultiSteps(optax.sgd(schedule), 2).gradient_transformation()


def with_changed_schedule(config, schedule):
    return optax.sgd(lambda count: 0.1 * schedule(count))


def with_schedule_of_decay(config, schedule):
    decay = optax.inject_hyperparams(optax.add_decayed_weights)(weight_decay=schedule)
    return optax.chain(decay, optax.sgd(0.25))


def with_injected_schedule(config, schedule):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=mine)


def with_hidden_schedule(config, schedule):
    assert schedule(0) > 0  # while it is built, not in an update
    return optax.sgd(mine)


def with_two_rates(config, schedule):
    injected = optax.inject_hyperparams(optax.sgd)
    return optax.chain(injected(learning_rate=mine), injected(learning_rate=2.0))


@pytest.fixture
def float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def rates(name, corpus_overrides) -> list[tuple[float, float | None]]:
    """Return (used rate, logged rate) of three steps."""
    run, corpus = make_run((*DESCENT, *corpus_overrides, f"optimizer.name={name}"))
    state = run.state_layout.initial()
    batches = train_batches(corpus, run.config.data, run.rows, seed=0)
    found = []
    for _ in range(3):
        before = jax.device_get(state.params)
        state, metrics = run.compile_train_step()(state, run.place_batch(next(batches)))
        change = jax.tree.map(np.subtract, jax.device_get(state.params), before)
        used = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(change)))
        logged = metrics.get("learning_rate")
        found.append((used / metrics["grad_norm"], None if logged is None else float(logged)))
    return found


@pytest.mark.thorough
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["sgd", "with_given_schedule_injected", "with_injected_schedule"])
def test_logged_rate_is_the_one_that_the_update_used(name, corpus_overrides):
    own = f"{__name__}:{name}" if name != "sgd" else name
    for used, logged in rates(own, corpus_overrides):
        # Schedules compute in float32; the rest is float64.
        assert logged == pytest.approx(float(used), rel=1e-6)


@pytest.mark.usefixtures("float64")
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "with_hidden_schedule",
        "with_two_rates",
        "with_rare_updates",
        "with_changed_schedule",
        "with_schedule_of_decay",
    ],
)
def test_rate_that_is_unknown_is_not_logged(name, corpus_overrides):
    assert [logged for _, logged in rates(f"{__name__}:{name}", corpus_overrides)] == [None] * 3
