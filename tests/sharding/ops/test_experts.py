"""Experts over a mesh equal a loop over all experts and all tokens, values and gradients."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding.jaxprs import walk
from sharding.labels import expected_trips_of
from sharding.logical import axis_rules
from sharding.mesh import MeshConfig, make_mesh
from sharding.ops import experts
from sharding.ops.experts import apply_experts
from sharding.ops.update_if import Condition, update_if
from sharding.rules import make_rules

EXPERTS = 8
DIM = 5
#: Sums of float64 products in another order.
TOLERANCE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}
AXES = {
    "up": ("experts", "embed", "mlp"),
    "down": ("experts", "mlp", "embed"),
    "bias": ("experts", "embed"),
    "scale": (),
}


@dataclasses.dataclass(frozen=True)
class Expert:
    def __call__(self, weights, x, factors):
        h = jnp.tanh(x @ weights["up"] * weights["scale"]) * factors[..., None]
        return h @ weights["down"] + factors[..., None] * weights["bias"][..., None, :]


def inputs_of(choose, *, batch=8, length=9, per_token=2, mlp=6):
    """Return (weights, tokens, factors, choices), in float64."""
    keys = jax.random.split(jax.random.key(0), 5)
    weights = {
        "up": jax.random.normal(keys[0], (EXPERTS, DIM, mlp), jnp.float64),
        "down": jax.random.normal(keys[1], (EXPERTS, mlp, DIM), jnp.float64),
        "bias": jax.random.normal(keys[2], (EXPERTS, DIM), jnp.float64),
        "scale": jnp.float64(0.7),
    }
    x = jax.random.normal(keys[3], (batch, length, DIM), jnp.float64)
    factors = jax.random.uniform(keys[4], (batch, length, per_token), jnp.float64)
    return weights, x, factors, choose((batch, length, per_token))


def at_random(shape):
    scores = jax.random.uniform(jax.random.key(7), (*shape[:-1], EXPERTS))
    return jnp.argsort(scores, axis=-1)[..., : shape[-1]].astype(jnp.int32)


def all_to_two(shape):
    """All tokens choose experts 5 and 6; six experts are empty."""
    return jnp.broadcast_to(jnp.arange(5, 5 + shape[-1], dtype=jnp.int32), shape)


def some_to_none(shape):
    """Choices outside of the experts' numbers are dropped."""
    return jnp.where(at_random(shape) % 3 == 0, EXPERTS, at_random(shape))


CHOICES = {"at random": at_random, "all to two": all_to_two, "some to none": some_to_none}


def reference(weights, x, factors, choices):
    total = jnp.zeros_like(x)
    for number in range(EXPERTS):
        of_expert = {name: leaf[number] if AXES[name] else leaf for name, leaf in weights.items()}
        factor = jnp.sum(jnp.where(choices == number, factors, 0), axis=-1)
        flat = Expert()(of_expert, x.reshape(-1, DIM), factor.reshape(-1))
        total += flat.reshape(x.shape)
    return total


def value_and_grads(function, weights, x, factors, choices):
    def loss(weights, x, factors):
        y = function(weights, x, factors, choices)
        return jnp.sum(jnp.sin(y) * jnp.arange(y.size).reshape(y.shape)), y

    (_, y), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(weights, x, factors)
    return y, grads


def check(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), actual, expected)


apply = functools.partial(apply_experts, Expert(), axes=AXES, added=("bias",), num_experts=EXPERTS)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("sizes", [{}, {"batch": 1, "length": 1}, {"length": 131, "per_token": 1}])
def test_experts_equal_a_loop_over_all_of_them(choose, sizes):
    inputs = inputs_of(CHOICES[choose], **sizes)
    check(value_and_grads(apply, *inputs), value_and_grads(reference, *inputs))


@pytest.mark.thorough
def test_frozen_weights_get_no_gradients():
    weights, x, factors, choices = inputs_of(at_random, batch=9, length=16)

    def grads(function, names):
        def loss(trained, x):
            return jnp.sum(jnp.sin(function({**weights, **trained}, x, factors, choices)))

        return jax.grad(loss, (0, 1))({name: weights[name] for name in names}, x)

    def shapes_of_results(names):
        jaxpr = jax.make_jaxpr(functools.partial(grads, apply, names))().jaxpr
        return {var.aval.shape for eqn, _ in walk(jaxpr.eqns) for var in eqn.outvars}

    check(grads(apply, ["bias"]), grads(reference, ["bias"]))
    large = {weights["up"].shape, weights["down"].shape}
    assert large <= shapes_of_results(["up", "down"])
    assert not large & shapes_of_results(["bias"])


MESHES = {
    "expert=2": ({"expert": 2}, None),
    "expert=8": ({"expert": 8}, None),
    "expert=2, data=2, model=2": ({"expert": 2, "data": 2, "model": 2}, None),
    "expert=4, model=2": ({"expert": 4, "model": 2}, None),
    "data, expert": ({"data": 2, "expert": 4}, ["data", "expert"]),
    # Devices along `model` have the same tokens, and along `context` if all axes are automatic.
    "expert, model": ({"expert": 2, "model": 2}, ["expert", "model"]),
    "context, expert": ({"context": 2, "expert": 2}, ["context", "expert"]),
}


@pytest.mark.thorough(
    but=["expert=2, data=2, model=2-all to two-in a step", "data, expert-at random-automatic"]
)
@pytest.mark.drawn(3)
@pytest.mark.parametrize("is_manual", [True, False], ids=["in a step", "automatic"])
@pytest.mark.parametrize("choose", ["at random", "all to two"])
@pytest.mark.parametrize("name", MESHES)
def test_experts_on_a_mesh_equal_one_device(name, choose, is_manual):
    check_on_mesh(name, choose, is_manual)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("choose", ["at random", "all to two"])
def test_tokens_that_are_sent_in_parts_equal_one_device(monkeypatch, choose):
    monkeypatch.setattr(experts, "_MIN_PART_ROWS", 3)  # three parts
    check_on_mesh("expert=2, data=2, model=2", choose, is_manual=True)


def check_on_mesh(name, choose, is_manual):
    sizes, over = MESHES[name]
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    divided = {"experts": over} | ({"mlp": None} if "model" in over else {}) if over else None
    rules = make_rules(divided)
    weights, x, factors, choices = inputs = inputs_of(CHOICES[choose])
    expected = value_and_grads(reference, *inputs)
    manual = ("pipeline", "data", "fsdp", "context", "expert")

    def on_mesh(weights, x, factors, choices):
        if not is_manual:
            return apply(weights, x, factors, choices)
        tokens = PartitionSpec(("data", "fsdp", "expert"))
        of_experts = PartitionSpec(tuple(axis for axis in rules["experts"] if axis in manual))
        of_weights = {n: of_experts if axes else PartitionSpec() for n, axes in AXES.items()}
        return jax.shard_map(
            apply,
            in_specs=(of_weights, tokens, tokens, tokens),
            out_specs=tokens,
            axis_names={*manual},
            check_vma=False,
        )(weights, x, factors, choices)

    with jax.set_mesh(mesh), axis_rules(rules):
        actual = jax.jit(functools.partial(value_and_grads, on_mesh))(*inputs)
    check(jax.device_get(actual), jax.device_get(expected))


def test_tokens_may_be_sent_in_fewer_bytes():
    """Tokens and gradients that float32 represents are the same after they were sent in it."""
    weights, x, factors, choices = inputs_of(at_random)
    x = x.astype(jnp.float32).astype(jnp.float64)
    dy = jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).astype(jnp.float64).reshape(x.shape)
    names = []

    def narrow(weights, x, name):
        assert weights.keys() == AXES.keys()
        names.append(name)
        return x.astype(jnp.float32)

    def widen(_, sent, name, dtype):
        names.append(name)
        return sent.astype(dtype)

    def gradients(sends):
        def outputs(weights, x, factors):
            return apply(weights, x, factors, choices, sends=sends)

        y, vjp = jax.vjp(outputs, weights, x, factors)
        return y, vjp(dy)

    def gathered(sends):
        jaxpr = jax.make_jaxpr(lambda: gradients(sends))().jaxpr
        eqns = (eqn for eqn, _ in walk(jaxpr.eqns) if eqn.primitive.name == "all_gather")
        shapes = [eqn.invars[0].aval for eqn in eqns]
        return {str(aval.dtype) for aval in shapes if aval.shape[-1:] == (DIM,)}

    sends = experts.Sends(narrow=narrow, widen=widen)
    with jax.set_mesh(make_mesh(MeshConfig(expert=2), jax.devices())), axis_rules(make_rules()):
        check(jax.jit(lambda: gradients(sends))(), jax.jit(lambda: gradients(None))())
        assert {*names} == {"input", "gradient"}
        assert (gathered(None), gathered(sends)) == ({"float64"}, {"float32"})
    names.clear()
    gradients(sends)
    assert not names  # one device sends nothing


@pytest.mark.thorough
def test_some_stages_may_compute_experts_while_others_do_not():
    mesh = make_mesh(MeshConfig(pipeline=2, expert=2, model=2), jax.devices())
    rules = make_rules()
    inputs = inputs_of(at_random)
    tokens = PartitionSpec(("expert",))

    def on_second_stage(weights, x, factors, choices):
        is_second = jax.lax.axis_index("pipeline") == 1
        condition = Condition(lambda: is_second)

        def update(state):
            y, grads = value_and_grads(apply, weights, x, factors, choices)
            return y, grads[1]

        y, dx = update_if(condition, update, (jnp.zeros_like(x), jnp.zeros_like(x)))
        return jax.lax.psum((y, dx), "pipeline")

    step = jax.shard_map(
        on_second_stage,
        mesh=mesh,
        in_specs=(
            {n: tokens if axes else PartitionSpec() for n, axes in AXES.items()},
            tokens,
            tokens,
            tokens,
        ),
        out_specs=tokens,
        axis_names={"pipeline", "data", "fsdp", "context", "expert"},
        check_vma=False,
    )
    with jax.set_mesh(mesh), axis_rules(rules):
        y, dx = jax.jit(step)(*inputs)

    def local_loss(x):
        # Each device's loss counts its own tokens from 0.
        y = reference(inputs[0], x, *inputs[2:])
        numbers = jnp.tile(jnp.arange(y.size // 2), 2).reshape(y.shape)
        return jnp.sum(jnp.sin(y) * numbers)

    check(jax.device_get(y), jax.device_get(reference(*inputs)))
    check(jax.device_get(dx), jax.device_get(jax.grad(local_loss)(inputs[1])))


def test_predictions_count_the_blocks_that_run():
    """All rows of one device choose two of eight experts: a load of 4."""
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Counted(Expert):
        def __call__(self, weights, x, factors):
            jax.debug.callback(lambda: calls.append(1))
            return super().__call__(weights, x, factors)

    def evenly(shape):
        return (jnp.arange(math.prod(shape), dtype=jnp.int32) % EXPERTS).reshape(shape)

    inputs = inputs_of(evenly, length=40)
    apply = functools.partial(apply_experts, Counted(), axes=AXES, num_experts=EXPERTS)
    compiled = jax.jit(apply).lower(*inputs).compile()

    def num_calls(choose) -> int:
        calls.clear()
        jax.block_until_ready(compiled(*inputs[:3], choose(inputs[3].shape)))
        jax.effects_barrier()
        return len(calls)

    jaxpr = jax.make_jaxpr(apply)(*inputs)
    scopes = [
        str(eqn.source_info.name_stack).rpartition("/")[2]
        for eqn, _ in walk(jaxpr.eqns)
        if eqn.primitive.name == "while"
    ]
    (label,) = (scope for scope in scopes if scope.startswith("blocks_"))
    assert expected_trips_of(label) == 0
    expected = expected_trips_of(label, load=4.0) or 0
    assert expected == num_calls(all_to_two) - num_calls(evenly) > 0
