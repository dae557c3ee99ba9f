"""Tests of the audit on programs with known collectives, compiled for 8 simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.analysis import audit
from sharding.mesh import MeshConfig, make_mesh

ROWS = 4
COLUMNS = 16
ARRAY_BYTES = ROWS * COLUMNS * 4  # float32
X = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(pipeline=2, data=2, model=2), jax.devices())


def compile_mapped(function, mesh):
    """Return the compiled program of `function`, which every device runs on all of X."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(X).compile()


def facts(compiled, mesh):
    """Return (kind, axes, loop depth, trip count, bytes) of each collective, sorted."""
    found = audit.collectives(compiled, mesh)
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


def test_collectives_trip_count_is_none_where_the_loop_is_open_ended(mesh):
    def function(x):
        return jax.lax.while_loop(
            lambda x: jnp.all(x < 9), lambda x: jax.lax.psum(x + 1, "data"), x
        )

    compiled = compile_mapped(function, mesh)
    assert facts(compiled, mesh) == [("all-reduce", ("data",), 1, None, ARRAY_BYTES)]
    (row,) = audit.summary(audit.collectives(compiled, mesh))
    assert row.bytes == ARRAY_BYTES and row.bytes_per_step is None
    assert "unknown" in audit.format_table([row])


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
    names = {c.kind: c.op_name for c in audit.collectives(compiled, mesh)}
    assert names["collective-permute"].endswith("ppermute")


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
    assert audit.collectives(compiled, mesh) == []
    assert audit.format_table(audit.summary([])) == "no collectives"


def test_collectives_rejects_another_mesh(mesh):
    compiled = compile_mapped(lambda x: jax.lax.psum(x, "data"), mesh)
    with pytest.raises(ValueError, match="spans 8 devices but the mesh .* has 2"):
        audit.collectives(compiled, make_mesh(MeshConfig(data=2), jax.devices()))


def test_summary_groups_and_multiplies_by_trip_counts(mesh):
    def function(x):
        def body(x, _):
            x = jax.lax.psum(x, "model")
            return jax.lax.psum(jnp.sin(x), "model"), None

        x = jax.lax.scan(body, x, length=6)[0]
        return jax.lax.psum(x, "data")

    rows = audit.summary(audit.collectives(compile_mapped(function, mesh), mesh))
    assert [(row.axes, row.loop_depth, row.count) for row in rows] == [
        (("model",), 1, 2),
        (("data",), 0, 1),
    ]
    assert rows[0].bytes == 2 * ARRAY_BYTES
    assert rows[0].bytes_per_step == 12 * ARRAY_BYTES
    table = audit.format_table(rows).splitlines()
    assert table[0].split() == ["collective", "axes", "loops", "count", "bytes", "bytes/step"]
    assert table[1].split() == ["all-reduce", "model", "1", "2", "512", "3,072"]
    assert len({len(line) for line in table}) == 1


def test_has_array_tells_whole_logits_from_chunks():
    tokens = 64
    embed = 8
    vocab = 32
    chunks = 8

    def whole(x, w):
        return jax.nn.logsumexp(x @ w, axis=-1)

    def chunked(x, w):
        return jax.lax.map(lambda x: whole(x, w), x.reshape(chunks, -1, embed))

    arguments = (jnp.ones((tokens, embed)), jnp.ones((embed, vocab)))
    compiled = {f: jax.jit(f).lower(*arguments).compile() for f in (whole, chunked)}
    assert audit.has_array(compiled[whole], (tokens, vocab), jnp.float32)
    assert not audit.has_array(compiled[chunked], (tokens, vocab), jnp.float32)
    # The step holds a chunk of the logits, and its argument x, which is larger.
    assert audit.has_array(compiled[chunked], (tokens // chunks, vocab), jnp.float32)
    assert not audit.has_array(compiled[whole], (tokens, vocab), jnp.bfloat16)
    array, _ = audit.widest_arrays(compiled[chunked], jnp.float32)[0]
    assert array.num_elements == tokens * embed


def test_has_array_ignores_what_only_a_fusion_computes():
    compiled = jax.jit(lambda x: jnp.sum(jnp.sin(x)[:, None] * x)).lower(jnp.ones(64)).compile()
    assert not audit.has_array(compiled, (64, 64), jnp.float32)
    assert audit.has_array(compiled, (64,), jnp.float32)


def test_memory_and_flops_per_device():
    compiled = (
        jax.jit(lambda x, w: (x @ w).T @ x, donate_argnums=1)
        .lower(jnp.ones((8, 4)), jnp.ones((4, 4)))
        .compile()
    )
    memory = audit.memory(compiled)
    assert memory.argument_bytes == (8 * 4 + 4 * 4) * 4
    assert memory.output_bytes == 4 * 4 * 4
    assert memory.alias_bytes == 4 * 4 * 4
    assert memory.temp_bytes is not None and memory.temp_bytes >= 8 * 4 * 4
    assert audit.flops(compiled) == pytest.approx(2 * 2 * 8 * 4 * 4)


def test_memory_and_flops_none_where_the_backend_is_silent():
    class Silent:
        def memory_analysis(self):
            return None

        def cost_analysis(self):
            return None

    silent: jax.stages.Compiled = Silent()  # type: ignore
    assert audit.memory(silent).temp_bytes is None
    assert audit.flops(silent) is None


def matmul_flops(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return audit.matmul_flops(jax.jit(function).lower(*arguments).compile())


@pytest.mark.parametrize(
    "spec, shapes, flops",
    [
        ("mk,kn->mn", ((8, 5), (5, 3)), 2 * 8 * 5 * 3),
        ("bmk,bkn->bmn", ((4, 8, 5), (4, 5, 3)), 2 * 4 * 8 * 5 * 3),
        ("bkm,nkb->bnm", ((4, 5, 8), (3, 5, 4)), 2 * 4 * 8 * 5 * 3),
        ("mkl,lkn->mn", ((8, 5, 7), (7, 5, 3)), 2 * 8 * 5 * 7 * 3),
    ],
)
def test_matmul_flops_are_two_per_multiplication(spec, shapes, flops):
    assert matmul_flops(lambda a, b: jnp.einsum(spec, a, b), *shapes) == flops


def test_matmul_flops_count_loops_as_often_as_they_run():
    def function(x, w):
        def inner(x, _):
            return jnp.tanh(x @ w), None

        def outer(x, _):
            x = jax.lax.scan(inner, x, length=3)[0]
            return jnp.sin(x.T @ x @ w) + x[:1], None

        return jax.lax.scan(outer, x, length=5)[0] @ w

    step = 2 * 16 * 16 * 16
    assert matmul_flops(function, (16, 16), (16, 16)) == (5 * 3 + 5 * 2 + 1) * step


def test_matmul_flops_take_every_branch():
    def function(runs, x, w):
        return jax.lax.cond(runs.sum() > 0, lambda: x @ w, lambda: jnp.sin(x))

    assert matmul_flops(function, (1,), (8, 8), (8, 8)) == 2 * 8 * 8 * 8


def test_matmul_flops_are_unknown_where_an_open_ended_loop_multiplies():
    def function(x):
        return jax.lax.while_loop(lambda x: jnp.all(x < 9), lambda x: x @ x, x)

    assert matmul_flops(function, (8, 8)) is None
    assert matmul_flops(lambda x: jax.lax.while_loop(jnp.all, jnp.sin, x) @ x, (8, 8)) == 2 * 8**3


def test_matmul_flops_are_those_of_one_device(mesh):
    def split(*spec):
        return NamedSharding(mesh, P(*spec))

    step = jax.jit(
        lambda x, w: x @ w,
        in_shardings=(split("data", "model"), split("model", None)),
        out_shardings=split("data", None),
    )
    compiled = step.lower(X, jax.ShapeDtypeStruct((COLUMNS, 8), jnp.float32)).compile()
    assert audit.matmul_flops(compiled) == 2 * (ROWS // 2) * (COLUMNS // 2) * 8


def convolve(x, w, **options):
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


@pytest.mark.parametrize(
    "image, kernel, options, flops",
    [
        # Patches: every pixel is multiplied with every filter once.
        ((2, 8, 8, 3), (4, 4, 3, 5), dict(window_strides=(4, 4), padding="VALID"), 2 * 384 * 5),
        # With a padding of 1, the 4 outputs of a row read 2 + 3 + 3 + 2 pixels. A group reads only
        # its own channels.
        (
            (1, 4, 1, 4),
            (3, 1, 2, 6),
            dict(window_strides=(1, 1), padding=((1, 1), (0, 0)), feature_group_count=2),
            2 * (2 + 3 + 3 + 2) * 2 * 6,
        ),
    ],
)
def test_matmul_flops_of_convolutions_leave_padding_out(image, kernel, options, flops):
    def forward(x, w):
        return convolve(x, w, **options)

    assert matmul_flops(forward, image, kernel) == flops
    # Each of the two gradients multiplies the same pairs again.
    for argument in (0, 1):
        gradient = jax.grad(lambda x, w: jnp.sum(forward(x, w) ** 2), argument)
        assert matmul_flops(gradient, image, kernel) == 2 * flops


def test_tasks_of_loop_say_what_each_needs(mesh):
    def function(x):
        def tick(carry, _):
            x, arrived = carry
            y = jnp.tanh(x @ x.T @ x)
            sent = jax.lax.ppermute(y, "pipeline", [(0, 1)])
            beside = jnp.sin(arrived @ arrived.T @ arrived)
            behind = jax.lax.ppermute(sent @ sent.T @ x, "pipeline", [(1, 0)])
            return (behind, beside + sent), None

        return jax.lax.scan(tick, (x, x), length=4)[0][1]

    tasks = {t.name: t for t in audit.tasks_of_loop(compile_mapped(function, mesh), mesh)}
    sends = [task for task in tasks.values() if task.pairs]
    forward, back = sorted(sends, key=lambda task: len(task.needs))
    assert forward.pairs == tuple((i, i + 4) for i in range(4))
    assert back.pairs == tuple((i + 4, i) for i in range(4))
    assert not any(tasks[name].pairs for name in forward.needs)
    assert forward.needs < back.needs and forward.name in back.needs
    beside = tasks.keys() - {forward.name, back.name} - back.needs
    assert beside and not any(tasks[name].needs & {forward.name, back.name} for name in beside)


def test_tasks_of_loop_rejects_a_program_without_such_a_loop(mesh):
    compiled = compile_mapped(lambda x: jax.lax.ppermute(x, "pipeline", [(0, 1)]), mesh)
    with pytest.raises(ValueError, match="0 loops .* 'pipeline', but it must be one"):
        audit.tasks_of_loop(compiled, mesh)
