"""Tests of the list of collectives, on programs compiled for 8 simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from predict.program.collective_table import format_table, summary
from predict.program.communication import collectives
from sharding.mesh import MeshConfig, make_mesh
from sharding.ops.update_if import Condition, update_if
from tests.predict.mapped import ARRAY_BYTES, COLUMNS, ROWS, X, compile_mapped


def facts(compiled, mesh):
    """Return (kind, axes, loop depth, trip count, bytes) of each collective, sorted."""
    found = collectives(compiled, mesh)
    return sorted((c.kind, c.axes, c.loop_depth, c.trip_count, c.bytes) for c in found)


@pytest.mark.parametrize(
    "axes",
    [
        ("data",),
        ("model",),
        ("pipeline",),
        ("data", "model"),
        ("pipeline", "model"),
        ("pipeline", "data", "model"),
    ],
)
def test_collectives_psum_names_its_axes_in_mesh_order(mesh, axes):
    compiled = compile_mapped(lambda x: jax.lax.psum(x, axes[::-1]), mesh)
    assert facts(compiled, mesh) == [("all-reduce", axes, 0, 1, ARRAY_BYTES)]


def test_collectives_do_not_depend_on_the_order_of_devices():
    devices = np.array(jax.devices())[[3, 1, 2, 0, 7, 6, 5, 4]].reshape(4, 2)
    shuffled = jax.sharding.Mesh(devices, ("data", "model"))
    compiled = compile_mapped(lambda x: jax.lax.psum(x, "data"), shuffled)
    assert facts(compiled, shuffled) == [("all-reduce", ("data",), 0, 1, ARRAY_BYTES)]


def test_collectives_counts_the_loops_around_each(mesh):
    def function(x):
        def inner(x, _):
            return jax.lax.psum(x * 1.5, "model"), None

        def outer(x, _):
            x = jax.lax.scan(inner, x, length=3)[0]
            return jax.lax.psum(jnp.sin(x), "data"), None

        return jax.lax.psum(jax.lax.scan(outer, x, length=5)[0], "pipeline")

    assert facts(compile_mapped(function, mesh), mesh) == [
        ("all-reduce", ("data",), 1, 5, ARRAY_BYTES),
        ("all-reduce", ("model",), 2, 15, ARRAY_BYTES),
        ("all-reduce", ("pipeline",), 0, 1, ARRAY_BYTES),
    ]


def test_collectives_trip_count_is_none_in_an_open_ended_loop(mesh):
    def function(x):
        return jax.lax.while_loop(
            lambda x: jnp.all(x < 9), lambda x: jax.lax.psum(x + 1, "data"), x
        )

    compiled = compile_mapped(function, mesh)
    assert facts(compiled, mesh) == [("all-reduce", ("data",), 1, None, ARRAY_BYTES)]
    (row,) = summary(collectives(compiled, mesh))
    assert row.bytes == ARRAY_BYTES and row.bytes_per_step is None
    assert "unknown" in format_table([row])


def test_collectives_are_found_in_conditionals_inside_loops(mesh):
    def function(x):
        def tick(x, step):
            busy = jax.lax.axis_index("pipeline") == step % 2
            x = jax.lax.cond(busy, lambda x: jax.lax.psum(x * 2, "model"), jnp.sin, x)
            return jax.lax.ppermute(x, "pipeline", [(0, 1), (1, 0)]), None

        return jax.lax.scan(tick, x, jnp.arange(7))[0]

    compiled = compile_mapped(function, mesh)
    assert facts(compiled, mesh) == [
        ("all-reduce", ("model",), 1, 7, ARRAY_BYTES),
        ("collective-permute", ("pipeline",), 1, 7, ARRAY_BYTES),
    ]
    names = {c.kind: c.op_name for c in collectives(compiled, mesh)}
    assert names["collective-permute"].endswith("ppermute")


def test_a_loop_that_runs_at_most_once_counts_as_a_branch(mesh):
    def function(x):
        def tick(x, step):
            busy = jax.lax.axis_index("pipeline") == step % 2
            on_busy = Condition(lambda: busy)
            return update_if(on_busy, lambda x: jax.lax.psum(x * 2, "model"), x), None

        return jax.lax.scan(tick, x, jnp.arange(7))[0]

    compiled = compile_mapped(function, mesh)
    assert facts(compiled, mesh) == [("all-reduce", ("model",), 1, 7, ARRAY_BYTES)]


def test_collectives_gather_and_scatter_have_the_bytes_of_their_output(mesh):
    gather = compile_mapped(lambda x: jax.lax.all_gather(x, "data"), mesh)
    assert facts(gather, mesh) == [("all-gather", ("data",), 0, 1, 2 * ARRAY_BYTES)]
    scatter = compile_mapped(
        lambda x: jax.lax.psum_scatter(x, ("pipeline", "model"), tiled=True), mesh
    )
    assert facts(scatter, mesh) == [
        ("reduce-scatter", ("pipeline", "model"), 0, 1, ARRAY_BYTES // 4)
    ]


def test_collectives_sums_the_bytes_of_a_tuple(mesh):
    exchange = compile_mapped(lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True), mesh)
    assert facts(exchange, mesh) == [("all-to-all", ("data",), 0, 1, ARRAY_BYTES)]


def test_collectives_of_an_automatically_split_matmul(mesh):
    def split(*spec):
        return NamedSharding(mesh, P(*spec))

    compiled = (
        jax.jit(
            lambda x, w: x @ w,
            in_shardings=(split("data", "model"), split("model", None)),
            out_shardings=split("data", None),
        )
        .lower(X, jax.ShapeDtypeStruct((COLUMNS, 8), jnp.float32))
        .compile()
    )
    assert facts(compiled, mesh) == [("all-reduce", ("model",), 0, 1, ROWS // 2 * 8 * 4)]


def test_collectives_none_without_communication(mesh):
    compiled = compile_mapped(jnp.sin, mesh)
    assert collectives(compiled, mesh) == []
    assert format_table(summary([])) == "no collectives"


def test_collectives_rejects_another_mesh(mesh):
    compiled = compile_mapped(lambda x: jax.lax.psum(x, "data"), mesh)
    with pytest.raises(ValueError, match="spans 8 devices but the mesh .* has 2"):
        collectives(compiled, make_mesh(MeshConfig(data=2), jax.devices()))
