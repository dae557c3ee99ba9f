"""The executor against plain differentiation of the same three functions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding.audit import collectives, memory
from sharding.mesh import MeshConfig, make_mesh
from sharding.pipeline.executor import make_evaluate, make_loss_and_grad
from sharding.pipeline.schedule import SCHEDULES, forward_only

WIDTH, NUM_LAYERS, BATCH = 8, 4, 4


class Net:
    """A residual MLP whose first and last parts share the `table` parameter."""

    def embed(self, ends, microbatch):
        return jnp.tanh(microbatch["x"] @ ends["table"])

    def stack(self, layers, x, microbatch, first_layer):
        def body(x, layer):
            kernel, number = layer
            scale = microbatch["scale"][:, None] * (1.0 + 0.1 * number.astype(x.dtype))
            return x + jnp.tanh(x @ kernel) * scale, None

        numbers = first_layer + jnp.arange(layers["kernel"].shape[0])
        return jax.lax.scan(body, x, (layers["kernel"], numbers))[0]

    def head(self, ends, x, microbatch):
        error = jnp.square(x @ ends["table"].T - microbatch["y"]).sum(axis=1)
        weight = microbatch["weight"]
        return jnp.sum(error * weight), jnp.sum(weight), {"largest": jnp.sum(jnp.max(x, axis=1))}


SPECS = {
    "ends": {"table": PartitionSpec("fsdp", "model")},
    "layers": {"kernel": PartitionSpec("pipeline", "fsdp", "model")},
}


def inputs(num_microbatches: int, batch: int = BATCH, width: int = WIDTH, dtype: Any = np.float64):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    params = {
        "ends": {"table": draw(width, width)},
        "layers": {"kernel": 0.5 * draw(NUM_LAYERS, width, width)},
    }
    shape = (num_microbatches, batch)
    data = {"x": draw(*shape, width), "y": draw(*shape, width), "scale": draw(*shape)}
    data["weight"] = (rng.random(shape) < 0.7).astype(dtype)
    return params, data


def plain_sums(params, data):
    net, flat = Net(), jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), data)
    x = net.embed(params["ends"], flat)
    x = net.stack(params["layers"], x, flat, jnp.int32(0))
    loss, weight, metrics = net.head(params["ends"], x, flat)
    return loss, {"loss": loss, "weight": weight, **metrics}


def place(mesh, params, data):
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    batch = PartitionSpec(None, ("data", "fsdp"))
    return jax.tree.map(put, params, SPECS), jax.tree.map(lambda x: put(x, batch), data)


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"pipeline": 4},
        {"pipeline": 2, "data": 2, "model": 2},
        {"pipeline": 2, "fsdp": 2, "model": 2},
    ],
    ids=str,
)
def test_gradients_equal_plain_differentiation(sizes, schedule, num_microbatches):
    with jax.enable_x64(True):
        params, data = inputs(num_microbatches)
        (_, expected_sums), expected = jax.value_and_grad(plain_sums, has_aux=True)(params, data)
        mesh = make_mesh(MeshConfig(**sizes))
        table = SCHEDULES[schedule](mesh.shape["pipeline"], num_microbatches)
        run = make_loss_and_grad(Net(), table, mesh, SPECS)
        evaluate = make_evaluate(
            Net(), forward_only(mesh.shape["pipeline"], num_microbatches), mesh, SPECS
        )
        with jax.set_mesh(mesh):
            placed = place(mesh, params, data)
            sums, grads = jax.jit(run)(*placed)
            evaluated = jax.jit(evaluate)(*placed)
        # Only the order of sums differs, so float64 rounding (1e-16) is all that may show.
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)  # noqa: E731
        jax.tree.map(close, grads, expected)
        jax.tree.map(close, sums, expected_sums)
        jax.tree.map(close, evaluated, expected_sums)


def compiled(schedule: str, num_microbatches: int, sizes: dict[str, int], **shape):
    params, data = inputs(num_microbatches, dtype=np.float32, **shape)
    mesh = make_mesh(MeshConfig(**sizes))
    table = SCHEDULES[schedule](mesh.shape["pipeline"], num_microbatches)
    run = make_loss_and_grad(Net(), table, mesh, SPECS)
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*place(mesh, params, data)).compile(), mesh


def test_permutes_are_one_each_way_and_nothing_else_crosses_stages_in_the_loop():
    step, mesh = compiled("1f1b", 4, {"pipeline": 2, "data": 2, "model": 2})
    found = collectives(step, mesh)
    in_loop = [c for c in found if c.loop_depth > 0]
    permutes = [c for c in in_loop if c.axes == ("pipeline",)]
    assert [c.kind for c in permutes] == ["collective-permute"] * 2
    assert {axis for c in in_loop for axis in c.axes} <= {"pipeline", "model"}
    reduced = [c for c in found if c.loop_depth == 0 and "data" in c.axes]
    assert reduced and all(c.kind == "all-reduce" for c in reduced)


def test_1f1b_memory_does_not_grow_with_microbatches_and_gpipes_does():
    sizes, shape = {"pipeline": 4}, {"batch": 64, "width": 64}

    def temporaries(schedule, num_microbatches):
        temp_bytes = memory(compiled(schedule, num_microbatches, sizes, **shape)[0]).temp_bytes
        assert temp_bytes is not None
        return temp_bytes

    assert temporaries("1f1b", 32) <= 1.15 * temporaries("1f1b", 8)
    assert temporaries("gpipe", 32) > 1.5 * temporaries("gpipe", 8)


def test_buffers_of_a_hand_made_table_are_told_apart():
    """Backwards in the opposite order of forwards need buffers that no ring would give."""
    base = SCHEDULES["gpipe"](2, 3)
    when = base.when()
    ticks = [[[] for _ in range(2)] for _ in range(len(base.ticks))]
    for (kind, microbatch, stage), tick in when.items():
        swapped = microbatch if kind == "F" else 2 - microbatch
        ticks[tick][stage].append((kind, swapped))
    from sharding.pipeline.schedule import Op, verify

    table = dataclasses.replace(
        base, ticks=tuple(tuple(tuple(Op(*op) for op in cell) for cell in row) for row in ticks)
    )
    verify(table)
    with jax.enable_x64(True):
        params, data = inputs(3)
        expected = jax.grad(lambda p: plain_sums(p, data)[0])(params)
        mesh = make_mesh(MeshConfig(pipeline=2))
        with jax.set_mesh(mesh):
            _, grads = jax.jit(make_loss_and_grad(Net(), table, mesh, SPECS))(
                *place(mesh, params, data)
            )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), grads, expected)
