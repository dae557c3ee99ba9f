"""Which slices of a loop count as read where their array is stored."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from predict.memory.jaxpr import open_jaxpr
from predict.memory.operations import Program, Value
from predict.memory.passes.counted_slices import counted_slices
from sharding.mesh import MeshConfig, make_mesh

LAYERS, SLOTS = 3, 2


def at(array, *starts):
    """Return an element of the leading dims of an array."""
    for start in starts:
        array = jax.lax.dynamic_index_in_dim(array, start, keepdims=False)
    return array


def slot_and_layer(array, slot, layer):
    sizes = (1, 1, *array.shape[2:])
    return jax.lax.dynamic_slice(array, (slot, layer, 0, 0), sizes)[0, 0]


def num_found(function, *shapes, **axes) -> int:
    """Return the number of slices found that are matrices, in a function of float32 arrays."""
    mesh = make_mesh(MeshConfig(**axes), jax.devices())
    structs = []
    for shape in shapes:
        sharding = NamedSharding(mesh, PartitionSpec())
        structs.append(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))
    with jax.set_mesh(mesh):
        traced = jax.jit(function).trace(*structs)
    program = open_jaxpr(traced.jaxpr, structs)
    found = counted_slices(program, mesh.shape)
    assert found <= all_slices(program)
    return sum(len(value.shape) > 1 for value in found)


def all_slices(program: Program) -> set[Value]:
    found = set()
    for op in program.operations:
        found.update(op.outputs if op.name == "dynamic_slice" else ())
        found.update(*(all_slices(body) for body in op.bodies))
    return found


def layers(body):
    """Return a loop that counts in its carry, as the layers' loop does."""

    def run(x, *arrays):
        def step(carry, _):
            i, x = carry
            return (i + 1, body(x, i, *arrays)), None

        return jax.lax.scan(step, (jnp.int32(0), x), None, length=LAYERS)[0][1]

    return run


X, W = (8, 8), (LAYERS, 8, 8)


def test_slices_by_the_counter_are_found():
    assert num_found(layers(lambda x, i, w: x @ at(w, i)), X, W) == 1
    # In the order of a backward pass, and with a constant first chunk.
    assert num_found(layers(lambda x, i, w: x @ at(w, LAYERS - 1 - i + 0 * LAYERS)), X, W) == 1


def test_slices_by_other_values_are_not_found():
    table = jnp.arange(LAYERS)[::-1]
    assert num_found(layers(lambda x, i, w: x @ at(w, table[i])), X, W) == 0
    chunk = layers(lambda x, i, w, c: x @ at(w, c.astype(jnp.int32) + i))
    assert num_found(chunk, X, W, ()) == 0
    assert num_found(lambda x, w: x @ at(w, jnp.int32(1)), X, W) == 0


def test_branches_copy_what_they_slice():
    def body(x, i, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ at(w, i), lambda: x)

    assert num_found(layers(body), X, W) == 0


@pytest.mark.parametrize(("num_slots", "expected"), [(1, 1), (SLOTS, 0)])
def test_start_in_a_dim_of_one_element_does_not_matter(num_slots, expected):
    def body(x, i, w, slot):
        return x @ slot_and_layer(w, slot.astype(jnp.int32), i)

    assert num_found(layers(body), X, (num_slots, *W), ()) == expected


@pytest.mark.parametrize(("num_stages", "expected"), [(1, 1), (2, 0)])
def test_stage_is_a_constant_if_there_is_only_one(num_stages, expected):
    def run(x, w):
        stage = jax.lax.axis_index("pipeline")
        return layers(lambda x, i, w: x @ at(w, stage * LAYERS + i))(x, w)

    def sharded(x, w):
        mesh = jax.sharding.get_abstract_mesh()
        whole = PartitionSpec()
        return jax.shard_map(
            run, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False
        )(x, w)

    assert num_found(sharded, X, (2 * LAYERS, 8, 8), pipeline=num_stages) == expected


@pytest.mark.parametrize(("dim", "expected"), [(0, 1), (2, 0)])
def test_arrays_gathered_along_another_dim_are_not_read_in_place(dim, expected):
    def run(x, w):
        w = jax.lax.all_gather(w, "fsdp", axis=dim, tiled=True).astype(jnp.bfloat16)
        return layers(lambda x, i, w: x @ at(w, i).astype(x.dtype))(x, w)

    def sharded(x, w):
        specs: list[str | None] = [None, None, None]
        specs[dim] = "fsdp"
        mesh = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(*specs)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(x, w)

    assert num_found(sharded, X, (2 * LAYERS, 8, 8), fsdp=2) == expected
