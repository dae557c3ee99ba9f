"""Frozen parameters have no gradients in a pipeline, and stacks without training no backward."""

import jax
import numpy as np
import pytest

from pipeline.runtime.executor import make_loss_and_grad
from pipeline.runtime.pipeline_functions import stacks_with_backward
from pipeline.schedule import make_schedule
from pipeline.stack_layout import cut
from sharding.jaxprs import walk
from sharding.mesh import MeshConfig, make_mesh
from tests.pipeline.runtime.nets import (
    EncoderDecoder,
    inputs,
    param_sharding_of,
    place,
    plain_sums,
    to_layers,
)

ENCODER = ("encoder.kernel",)
BELOW_DECODER = (*ENCODER, "table", "norm")


class Frozen(EncoderDecoder):
    """An encoder and decoder of which some parameters are frozen."""

    def __init__(self, *names: str):
        self.frozen = {
            "non_stack": {name: name in names for name in ("table", "norm")},
            "stacks": {
                "encoder": {"kernel": "encoder.kernel" in names},
                "decoder": {name: f"decoder.{name}" in names for name in ("kernel", "cross")},
            },
        }

    def stopped(self, params, *path):
        """Return parameters of which frozen ones have no gradients."""
        marks = self.frozen
        for key in path:
            marks = marks[key]
        return jax.tree.map(
            lambda stops, x: jax.lax.stop_gradient(x) if stops else x, marks, params
        )

    def embed(self, non_stack_params, microbatch):
        return super().embed(self.stopped(non_stack_params, "non_stack"), microbatch)

    def between(self, non_stack_params, x, microbatch):
        return super().between(self.stopped(non_stack_params, "non_stack"), x, microbatch)

    def head(self, non_stack_params, x, microbatch):
        return super().head(self.stopped(non_stack_params, "non_stack"), x, microbatch)

    def encode(self, params, x, microbatch, number):
        return super().encode(self.stopped(params, "stacks", "encoder"), x, microbatch, number)

    def decode(self, params, x, microbatch, number):
        return super().decode(self.stopped(params, "stacks", "decoder"), x, microbatch, number)


def built(net: EncoderDecoder, schedule: str, num_stages: int, remat: str):
    """Return (loss_and_grad, its arguments, layouts, mesh, params, batch)."""
    mesh = make_mesh(MeshConfig(pipeline=num_stages, data=8 // num_stages // 2), jax.devices())
    num_chunks = 2 if schedule in ("interleaved_1f1b", "zbv") else 1
    table = make_schedule(schedule, num_stages, 4, num_chunks)
    layouts = cut(net.num_layers, table.placement, ())
    params, data = inputs(net, 4)
    param_sharding = param_sharding_of(net, params, mesh)
    recomputes = remat == "stage"
    run = make_loss_and_grad(net, table, layouts, param_sharding, recomputes=recomputes)
    return run, place(net, layouts, mesh, params, data), layouts, mesh, params, data


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("names", [ENCODER, BELOW_DECODER, ("decoder.cross", "norm")])
@pytest.mark.parametrize(
    ("schedule", "num_stages", "remat"),
    [("1f1b", 1, "stage"), ("1f1b", 2, "none"), ("zero_bubble", 4, "none"), ("zbv", 2, "stage")],
)
def test_gradients_of_trained_parameters_are_unchanged_and_others_are_none(
    names, schedule, num_stages, remat
):
    net = Frozen(*names)
    with jax.enable_x64(True):
        run, placed, layouts, mesh, params, data = built(net, schedule, num_stages, remat)
        with jax.set_mesh(mesh):
            sums, grads = jax.jit(run)(*placed)
        plain = jax.value_and_grad(lambda p: plain_sums(net, p, data), has_aux=True)
        (loss, _), expected = plain(params)
        grads = to_layers(layouts, grads)

    def check(is_frozen, actual, wanted):
        if is_frozen:
            assert actual is None
        else:
            # Only the order of sums differs.
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-13 * np.abs(wanted).max())

    np.testing.assert_allclose(sums["loss"], loss, rtol=1e-13)
    jax.tree.map(check, net.frozen, grads, expected)


@pytest.mark.parametrize(
    ("names", "stacks"),
    [
        (ENCODER, {"encoder", "decoder"}),  # the embedding below it is trained
        (BELOW_DECODER, {"decoder"}),
        ((*ENCODER, "table"), {"decoder"}),  # `norm` is read ahead of the decoder
        (("decoder.kernel", "decoder.cross"), {"encoder", "decoder"}),
    ],
)
def test_backwards_run_down_to_the_first_trained_parameter(names, stacks):
    net = Frozen(*names)
    params, data = inputs(net, 1)
    microbatch = jax.tree.map(lambda x: x[0], data)
    assert stacks_with_backward(net, params["non_stack"], microbatch) == stacks


def test_a_stack_without_backward_computes_and_saves_nothing_for_one():
    """The encoder multiplies once per layer; with a backward, it does so three times."""

    def num_products(net):
        run, placed, _, mesh, _, _ = built(net, "1f1b", 1, "none")
        with jax.set_mesh(mesh):
            equations = jax.make_jaxpr(run)(*placed).eqns
        return sum(n for eqn, n in walk(equations) if eqn.primitive.name == "dot_general")

    encoder = EncoderDecoder.num_layers["encoder"]
    num_microbatches = 4
    saved = num_products(EncoderDecoder()) - num_products(Frozen(*BELOW_DECODER))
    assert saved >= 2 * encoder * num_microbatches
