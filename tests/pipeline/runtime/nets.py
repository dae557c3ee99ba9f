"""Small models for the executor, and their reference differentiation on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pipeline.runtime.gather import ParamSharding
from sharding.gather_modes import all_once, stack_gather_modes
from sharding.memory import MemoryConfig
from sharding.spec import is_spec
from sharding.zero import split_over_replicas

WIDTH = 8
BATCH = 4
NO_ZERO = MemoryConfig()


class Net:
    """A residual MLP whose embedding and head share the `table` parameter.

    Its blocks read a side input, `scale`, draw a dropout mask per example, and depend on their
    layer number.
    """

    num_layers = {"body": 8}
    before: dict = {}
    teach: Any = None
    frozen: Any = None

    @property
    def blocks(self):
        return {"body": self.block}

    def activation_types(self, non_stack_params, microbatch):
        types = {}
        x = jax.eval_shape(self.embed, non_stack_params, microbatch)
        for name in self.num_layers:
            input_type = x
            if name in self.before:
                x = jax.eval_shape(self.before[name], non_stack_params, input_type, microbatch)
            types[name] = (input_type, x)
        return types

    def embed(self, non_stack_params, microbatch):
        return jnp.tanh(microbatch["x"] @ non_stack_params["table"])

    def block(self, params, x, microbatch, number):
        keys = jax.vmap(jax.random.fold_in, (0, None))(microbatch["keys"], number)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
        scale = microbatch["scale"][:, None] * (1.0 + 0.1 * (number + 1).astype(x.dtype))
        return x + jnp.where(keep, jnp.tanh(x @ params["kernel"]) * scale, 0.0)

    def head(self, non_stack_params, x, microbatch):
        error = jnp.square(x @ non_stack_params["table"].T - microbatch["y"]).sum(axis=1)
        weight = microbatch["weight"]
        return jnp.sum(error * weight), jnp.sum(weight), {"largest": jnp.sum(jnp.max(x, axis=1))}

    def specs(self):
        return {
            "non_stack": {"table": PartitionSpec("fsdp", "model")},
            "stacks": {"body": {"kernel": PartitionSpec("pipeline", "fsdp", "model")}},
        }

    def params(self, draw, width: int):
        layers = {"body": {"kernel": 0.5 * draw(self.num_layers["body"], width, width)}}
        return {"non_stack": {"table": draw(width, width)}, "stacks": layers}


class Teacher(Net):
    """A net whose `teach` returns a total per example; its head reports it as a metric."""

    def teach(self, non_stack_params, x, microbatch):
        return {"total": jnp.sum(x @ non_stack_params["table"].T, axis=1)}

    def head(self, non_stack_params, x, microbatch):
        loss, weight, _ = super().head(non_stack_params, x, microbatch)
        return loss, weight, {"totals": self.teach(non_stack_params, x, microbatch)["total"]}


class EncoderDecoder(Net):
    """Two stacks: the encoder's output travels with the microbatch to every decoder layer."""

    num_layers = {"encoder": 3, "decoder": 5}

    @property
    def blocks(self):
        return {"encoder": self.encode, "decoder": self.decode}

    @property
    def before(self):
        return {"decoder": self.between}

    def embed(self, non_stack_params, microbatch):
        embedded = jnp.tanh(microbatch["x"] @ non_stack_params["table"])
        return {"memory": embedded, "x": jnp.zeros_like(embedded)}

    def encode(self, params, x, microbatch, number):
        return x | {"memory": self.block(params, x["memory"], microbatch, number)}

    def between(self, non_stack_params, x, microbatch):
        memory = x["memory"] * non_stack_params["norm"]
        return {"memory": memory, "x": jnp.tanh(microbatch["y"] @ non_stack_params["table"])}

    def decode(self, params, x, microbatch, number):
        read = jnp.tanh(x["memory"] @ params["cross"])
        return x | {"x": self.block(params, x["x"] + read, microbatch, number)}

    def head(self, non_stack_params, x, microbatch):
        return super().head(non_stack_params, x["x"], microbatch)

    def specs(self):
        kernel = PartitionSpec("pipeline", "fsdp", "model")
        return {
            "non_stack": {"table": PartitionSpec("fsdp", "model"), "norm": PartitionSpec(None)},
            "stacks": {
                "encoder": {"kernel": kernel},
                "decoder": {"kernel": kernel, "cross": kernel},
            },
        }

    def params(self, draw, width: int):
        encoder, decoder = self.num_layers.values()
        return {
            "non_stack": {"table": draw(width, width), "norm": draw(width)},
            "stacks": {
                "encoder": {"kernel": 0.5 * draw(encoder, width, width)},
                "decoder": {
                    "kernel": 0.5 * draw(decoder, width, width),
                    "cross": 0.5 * draw(decoder, width, width),
                },
            },
        }


class Pyramid(Net):
    """Three stacks, each with activations of another shape or structure.

    The first takes `[B, W]`. The second takes the two halves of it and a float32 copy of one half,
    tiled 3 times. The third takes a weighted sum of the halves. So the largest activations are in
    the middle.
    """

    num_layers = {"wide": 2, "pair": 4, "narrow": 2}

    @property
    def blocks(self):
        return {"wide": self.block, "pair": self.pair, "narrow": self.block}

    @property
    def before(self):
        return {"pair": self.halve, "narrow": self.join}

    def halve(self, non_stack_params, x, microbatch):
        left, right = jnp.split(x * non_stack_params["norm"], 2, axis=1)
        return {"left": left, "right": right, "copy": jnp.tile(right, (1, 3)).astype(jnp.float32)}

    def pair(self, params, x, microbatch, number):
        copy = jnp.tanh(x["copy"]) * (1 + microbatch["scale"].astype(jnp.float32)[:, None])
        left = self.block(params, x["left"] + copy[:, : x["left"].shape[1]], microbatch, number)
        return {"left": left, "right": x["right"] + left, "copy": copy}

    def join(self, non_stack_params, x, microbatch):
        return x["left"] + x["right"] * non_stack_params["norm"][: x["right"].shape[1]]

    def head(self, non_stack_params, x, microbatch):
        return super().head(non_stack_params, jnp.concatenate([x, jnp.tanh(x)], axis=1), microbatch)

    def specs(self):
        # Nothing is split over `model`: cutting such arrays would need communication inside
        # branches that not all stages execute.
        kernel = PartitionSpec("pipeline", "fsdp")
        return {
            "non_stack": {"table": PartitionSpec("fsdp"), "norm": PartitionSpec(None)},
            "stacks": {name: {"kernel": kernel} for name in self.num_layers},
        }

    def params(self, draw, width: int):
        widths = {"wide": width, "pair": width // 2, "narrow": width // 2}
        return {
            "non_stack": {"table": draw(width, width), "norm": draw(width)},
            "stacks": {
                name: {"kernel": 0.5 * draw(count, widths[name], widths[name])}
                for name, count in self.num_layers.items()
            },
        }


def inputs(
    net: Net, num_microbatches: int, batch: int = BATCH, width: int = WIDTH, dtype: Any = np.float64
):
    """Return parameters, with layers not yet in slots, and a batch `[M, B, ...]`."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(dtype)

    shape = (num_microbatches, batch)
    data: dict[str, Any] = {"x": draw(*shape, width), "y": draw(*shape, width)}
    data["scale"] = draw(*shape)
    data["weight"] = (rng.random(shape) < 0.7).astype(dtype)
    data["keys"] = jax.random.split(jax.random.key(1), shape)
    return net.params(draw, width), data


def plain_sums(net: Net, params, data):
    """Return (loss, sums) of the whole batch, computed layer by layer."""
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), data)
    x = net.embed(params["non_stack"], flat)
    for name, num_layers in net.num_layers.items():
        if name in net.before:
            x = net.before[name](params["non_stack"], x, flat)
        for i in range(num_layers):
            layer = jax.tree.map(lambda p, i=i: p[i], params["stacks"][name])
            x = net.blocks[name](layer, x, flat, jnp.int32(i))
    loss, weight, metrics = net.head(params["non_stack"], x, flat)
    return loss, {"loss": loss, "weight": weight, **metrics}


def specs_of(net: Net, params, mesh, zero: MemoryConfig):
    """Return the specs of the parameters, `[slots, ...]`, split over `data` if ZeRO does so."""
    if not zero.zero_stage:
        return net.specs()
    is_layers = {
        "non_stack": jax.tree.map(lambda _: False, params["non_stack"]),
        "stacks": jax.tree.map(lambda _: True, params["stacks"]),
    }
    return split_over_replicas(net.specs(), params, is_layers, mesh)


def param_sharding_of(net: Net, params, mesh, zero: MemoryConfig = NO_ZERO) -> ParamSharding:
    """Return how the parameters are sharded, and when they are gathered."""
    specs = specs_of(net, params, mesh, zero)
    stacks = {
        name: stack_gather_modes(params["stacks"][name], specs["stacks"][name], mesh, zero)
        for name in params["stacks"]
    }
    return ParamSharding(
        mesh=mesh,
        specs=specs,
        gather_modes={"non_stack": all_once(specs["non_stack"]), "stacks": stacks},
        kept_axes=jax.tree.map(lambda _: frozenset(), specs, is_leaf=is_spec),
        zero_stage=zero.zero_stage,
    )


def place(net: Net, layouts, mesh, params, data, zero: MemoryConfig = NO_ZERO):
    """Return the parameters in slots and the batch, sharded over the mesh."""

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    slots = {
        name: jax.tree.map(layouts[name].to_slots, layers)
        for name, layers in params["stacks"].items()
    }
    batch = PartitionSpec(None, ("data", "fsdp"))
    specs = specs_of(net, params, mesh, zero)
    placed = jax.tree.map(put, {**params, "stacks": slots}, specs)
    return placed, jax.tree.map(lambda x: put(x, batch), data)


def to_layers(layouts, grads):
    """Return the gradients as NumPy arrays, with layers in their own order."""
    grads = jax.tree.map(np.asarray, grads)
    layers = {
        name: jax.tree.map(layouts[name].to_layers, slots)
        for name, slots in grads["stacks"].items()
    }
    return {**grads, "stacks": layers}
