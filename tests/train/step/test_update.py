"""The optimizer update on arrays on the device: division by the weight, and clipping."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sharding.mesh import MeshConfig, make_mesh
from tests.fuzz.test_fuzz import limited_memory
from train.step.update import StepOutcome, Update

WEIGHT = 3.0


def updated(
    optimizer: optax.GradientTransformation,
    clip_norm: float,
    params: dict[str, jax.Array],
    steps: list[dict[str, np.ndarray]],
) -> dict[str, jax.Array]:
    """Return the parameters after updates with the gradients of each step, divided by WEIGHT."""
    # The part of a `StateLayout` that `Update` reads.
    state: Any = SimpleNamespace(
        abstract=SimpleNamespace(params=jax.eval_shape(lambda: params)),
        is_offloaded=jax.tree.map(lambda _: False, params),
    )
    mesh = make_mesh(MeshConfig(), jax.devices())
    update = Update(
        optimizer=optimizer,
        clip_norm=clip_norm,
        state_layout=state,
        layouts={},
        mesh=mesh,
        seed=0,
    )

    @jax.jit
    def apply(params, opt_state, grads, step):
        weight = jnp.asarray(WEIGHT, jnp.result_type(*grads.values()))
        norm = update.norm(grads, weight)
        outcome = StepOutcome(step=step, weight=weight, norm=norm, accepted=jnp.bool(True))
        return update(params, opt_state, grads, outcome)

    opt_state = optimizer.init(params)
    for step, grads in enumerate(steps):
        params, opt_state = apply(params, opt_state, grads, jnp.int32(step))
    return params


def test_update_of_a_huge_table_needs_no_memory_before_it_runs():
    """The memory estimate comes later, and must still be able to refuse the table."""
    rows = 2**31 - 1
    table = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    state: Any = SimpleNamespace(
        abstract=SimpleNamespace(params={"table": table}), is_offloaded={"table": False}
    )
    mesh = make_mesh(MeshConfig(), jax.devices())
    with limited_memory():
        update = Update(
            optimizer=optax.sgd(0.1),
            clip_norm=0.0,
            state_layout=state,
            layouts={},
            mesh=mesh,
            seed=0,
        )
        assert update.groups == []


@pytest.mark.thorough
def test_update_clips_by_the_global_norm_like_optax():
    """Ten steps of AdamW on random gradients; the larger half is clipped."""
    rng = np.random.default_rng(0)
    adamw = optax.adamw(0.02, b1=0.9, b2=0.95, weight_decay=0.1)
    with jax.enable_x64(True):
        start = {"kernel": rng.normal(size=(5, 3)), "bias": rng.normal(size=(2, 3))}
        sums = [
            {k: WEIGHT * rng.normal(size=v.shape) * 0.1 * (i + 1) / 3 for k, v in start.items()}
            for i in range(10)
        ]
        params: Any = jax.tree.map(jnp.asarray, start)
        found = updated(adamw, 1.0, params, sums)
        reference = optax.chain(optax.clip_by_global_norm(1.0), adamw)
        state = reference.init(params)
        num_clipped = 0
        for grads in jax.tree.map(lambda g: jnp.asarray(g / WEIGHT), sums):
            num_clipped += int(optax.tree.norm(grads) > 1.0)
            updates, state = reference.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        assert 0 < num_clipped < 10
        for name in start:
            # float64, and the norm is summed in another order.
            np.testing.assert_allclose(found[name], params[name], rtol=1e-12)


@pytest.mark.parametrize(
    "clip_norm, change",
    [
        (0.0, -100.0),  # not clipped
        (3.0, -1.5),  # four equal elements: each is half of the norm
        (1000.0, -100.0),  # the norm is 200
    ],
)
def test_update_clips_only_gradients_above_clip_norm(clip_norm, change):
    params = {"kernel": jnp.zeros((2, 2))}
    grads = {"kernel": np.full((2, 2), WEIGHT * 100, np.float32)}
    found = updated(optax.sgd(1.0), clip_norm, params, [grads])
    np.testing.assert_allclose(found["kernel"], change)
