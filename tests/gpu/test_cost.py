"""Tests of `predict.time`: predicted times of steps compiled for GPUs, without a GPU."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipeline.runtime.tick_table import TICKS, scope_of
from predict.machines.datasheets import machine_of
from predict.machines.targets import parse_target
from predict.time.picture import draw
from predict.time.prediction import Prediction, predict
from predict.time.ticks import Operations, Ticks
from predict.time.trace import trace
from sharding.compiler_options import options_for
from sharding.hardware import hardware_of
from sharding.ops.update_if import Condition, update_if

pytestmark = pytest.mark.gpu_compiler

TARGET = parse_target("h100:1x8")
MACHINE = machine_of(TARGET)
LAYERS = 6
BATCH = 8
TOKENS = 1024
HEADS = 16
EMBED = 2048


def compiled_text(function: Callable, mesh: Mesh, *arguments: Any) -> str:
    hardware = hardware_of(mesh.devices.flat[0])
    options = options_for(hardware, is_described=True, saves_memory=True)
    with jax.set_mesh(mesh):
        traced = jax.jit(function).trace(*arguments)
        compiled = TARGET.compile(traced, mesh, options)
    text = compiled.as_text()
    assert text is not None
    return text


def mesh_of(**axes: int) -> Mesh:
    devices = np.array(TARGET.devices()).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@functools.cache
def transformer_step() -> tuple[Prediction, float]:
    """Return the prediction of a small transformer's step on 8 GPUs, and its FLOPs.

    The step is the forward and backward pass of attention and matrix products. The FLOPs are of the
    matrix products, on all GPUs together.
    """
    mesh = mesh_of(fsdp=8)

    def loss(weights, x):
        def layer(x, w):
            q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)

            def split(y):
                return y.reshape(*y.shape[:2], HEADS, -1)

            y = jax.nn.dot_product_attention(
                split(q), split(k), split(v), is_causal=True, implementation="cudnn"
            )
            return x + jnp.tanh(y.reshape(x.shape) @ w["out"]), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    def argument(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    weights = {
        "qkv": argument((LAYERS, EMBED, 3 * EMBED), None, "fsdp"),
        "out": argument((LAYERS, EMBED, EMBED), None, "fsdp"),
    }
    x = argument((BATCH, TOKENS, EMBED), "fsdp")
    text = compiled_text(jax.grad(loss), mesh, weights, x)
    # 6 FLOPs per parameter and token, without attention.
    flops = 6.0 * LAYERS * 4 * EMBED**2 * BATCH * TOKENS
    return predict(text, mesh.shape, MACHINE), flops


def check_parts(found: Prediction) -> None:
    """Check that the parts of a prediction are consistent with each other."""
    parts = found.to_json()
    assert all(seconds >= 0 for name, seconds in parts.items() if name.endswith("_s"))
    kernels = found.matmul_s + found.attention_s + found.other_s
    exposed = found.exposed_communication_s + found.exposed_host_s
    assert found.step_s == pytest.approx(kernels + exposed + found.bubble_s)
    assert found.step_s >= max(kernels, found.communication_s, found.host_s) * (1 - 1e-9)
    assert found.exposed_communication_s <= found.communication_s + 1e-9
    assert found.exposed_host_s <= found.host_s + 1e-9
    assert "predicted" in draw(found)
    assert len(trace(found)["traceEvents"]) > 10


def test_predict_a_step_of_a_transformer():
    found, flops = transformer_step()
    check_parts(found)
    assert found.matmul_s > 0 and found.attention_s > 0 and found.communication_s > 0
    assert found.bubble_s == found.host_s == 0
    mfu = flops / 8 / found.step_s / MACHINE.peak_flops_per_s("bf16")
    assert 0.02 < mfu < 1
    # The matrix products cannot exceed the peak FLOP/s.
    assert found.matmul_s >= flops / 8 / MACHINE.peak_flops_per_s("bf16")
    assert {row.axes for row in found.collectives if row.bytes > 1 << 20} == {("fsdp",)}


def test_predict_the_bubble_of_ticks():
    mesh = mesh_of(pipeline=8)
    num_microbatches = 8
    size = 4096
    runs = np.array([[0 <= t - s < num_microbatches for s in range(8)] for t in range(15)])

    def local(w, x):
        stage = jax.lax.axis_index("pipeline")

        def tick(x, row):
            condition = Condition(lambda: row[stage], scope=scope_of("F"))
            x = update_if(condition, lambda x: jnp.tanh(x @ w[0]), x)
            return jax.lax.ppermute(x, "pipeline", [(i, i + 1) for i in range(7)]), None

        with jax.named_scope(TICKS):
            return jax.lax.scan(tick, x, jnp.asarray(runs))[0][None]

    def argument(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P("pipeline"), P()), out_specs=P("pipeline"), check_vma=False
    )
    weights = argument((8, size, size), "pipeline")
    text = compiled_text(step, mesh, weights, argument((size, size)))

    def cell(does_run: bool) -> Operations:
        return frozenset("F" if does_run else "")

    ticks = Ticks(stages=tuple(tuple(map(cell, row)) for row in runs))
    found = predict(text, mesh.shape, MACHINE, ticks)
    check_parts(found)
    everywhere = predict(text, mesh.shape, MACHINE)
    # Each stage computes in 8 of 15 ticks, and waits for the others in 7:
    #
    #     tick      0 1 2 ...  7 8 ... 14
    #     stage 0   F F F ...  F .      .
    #     stage 7   . . .      F F ...  F
    assert found.step_s == pytest.approx(everywhere.step_s)
    assert found.matmul_s == pytest.approx(everywhere.matmul_s * 8 / 15)
    assert found.bubble_s >= found.matmul_s * 7 / 8 * (1 - 1e-9)
    assert math.isclose(found.communication_s, everywhere.communication_s)
