"""Gives the linear layers and experts of a model adapters (models/layers/lora.py), by their names.

Experts have an adapter for each of their products, and one for the router:

    layer     weight           parameters of its adapter
    mlp.up    mlp.up.kernel    mlp.up.lora.a, mlp.up.lora.b    a linear layer
    mlp.up    mlp.up           mlp.up_lora.a, mlp.up_lora.b    all experts of a layer
"""

import dataclasses
import difflib
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
from flax import nnx

from models.layers.basic import Linear
from models.layers.experts import Experts
from models.layers.lora import Lora, LoraConfig
from models.stack import Stack, layer_numbers

_SEED_TAG = 0x10FA

#: Name of the adapter in its linear layer, and so in the names of its parameters.
NAME = "lora"
#: Weights of `Experts` that can have an adapter; the name of that one ends in `_lora`.
_OF_EXPERTS = ("router", "gate", "up", "down")
#: Name in PEFT's `target_modules` -> name in `lora.targets`, for an error.
_OF_PEFT = {
    "all-linear": "*",
    "q_proj": "attention.q",
    "k_proj": "attention.k",
    "v_proj": "attention.v",
    "o_proj": "attention.out",
    "out_proj": "attention.out",
    "query": "attention.q",
    "key": "attention.k",
    "value": "attention.v",
    "c_attn": "attention.qkv",
    "c_fc": "mlp.up",
    "gate_proj": "mlp.gate",
    "up_proj": "mlp.up",
    "down_proj": "mlp.down",
    "fc1": "mlp.up",
    "fc2": "mlp.down",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A weight that can have an adapter.

    Attributes:
        module: module that it belongs to.
        weight: name of the weight in the module.
        adapter: name of its adapter in the module.
        num_inputs: number of dims of the weight that are inputs.
        num_batch: number of dims before the inputs, without layers: 1 for the weights of experts.
    """

    module: nnx.Module
    weight: str
    adapter: str
    num_inputs: int
    num_batch: int = 0


def add_adapters(model: nnx.Module, config: LoraConfig, *, seed: int) -> None:
    """Give the layers that the config targets an adapter; all parameters keep their values.

    The values of an adapter depend on the seed, the name of its layer, and the number of the layer
    in its stack.

    Args:
        model: model; it is changed, unless the config has no rank.
        config: rank, targets and variant.
        seed: seed of the random numbers.

    Raises:
        ValueError: a pattern matches no layer, or a layer cannot have such an adapter.
    """
    if config.rank is None:
        return
    base = jax.random.fold_in(jax.random.key(seed), _SEED_TAG)
    for name, target in matching_targets(model, config.targets).items():
        _check_variant(name, target, config)
        key = jax.random.fold_in(base, zlib.crc32(name.encode()))
        stack = getattr(model, name.partition(".")[0])
        if isinstance(stack, Stack):
            numbers = layer_numbers(stack.num_layers)
            key = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        elif config.dropout:
            raise ValueError(
                f"lora.dropout={config.dropout}: {name} is not in a stack, where adapters have no "
                "dropout; set lora.dropout=0, or name other layers in lora.targets"
            )
        weight = getattr(target.module, target.weight)
        if target.num_batch:
            # Experts are in stacks, so there is a key per layer; each expert gets one of its own.
            key = jax.vmap(partial(jax.random.split, num=weight.shape[1]))(key)
        adapter = Lora(
            weight[...],
            weight.get_metadata()["out_sharding"],
            target.num_inputs,
            keys=key,
            config=config,
        )
        setattr(target.module, target.adapter, adapter)


def _check_variant(name: str, target: Target, config: LoraConfig) -> None:
    """Check that the adapter of a weight can be of the kind that the config describes."""
    if isinstance(target.module, Experts) and (config.use_dora or config.dropout):
        raise ValueError(
            f"lora.use_dora={config.use_dora} and lora.dropout={config.dropout}: {name} belongs to "
            "experts, whose adapters are plain LoRA without dropout; set lora.use_dora=False and "
            "lora.dropout=0, or name other layers in lora.targets, such as 'attention.*'"
        )


def matching_targets(model: nnx.Module, patterns: Sequence[str]) -> dict[str, Target]:
    """Return the layers whose names match one of the patterns: name -> target.

    Args:
        patterns: names, or ends of names after a dot, such as "attention.*" for
            "decoder.layers.attention.qkv". `*` matches dots too.

    Raises:
        ValueError: a pattern matches no layer.
    """
    targets = all_targets(model)
    endings = {".".join(name.split(".")[-2:]) for name in targets}
    chosen: dict[str, Target] = {}
    for pattern in patterns:
        matches = {name: t for name, t in targets.items() if _matches(name, pattern)}
        if not matches:
            near = difflib.get_close_matches(pattern, targets, n=3, cutoff=0.3) or [*targets]
            remedy = f"the nearest are {', '.join(near)}"
            ours = _OF_PEFT.get(pattern)
            if ours in {"*", *endings}:
                remedy = f"that is a name of PEFT; here it is {ours!r}"
            raise ValueError(f"lora.targets: {pattern!r} matches no linear layer; {remedy}")
        chosen |= matches
    return dict(sorted(chosen.items()))


def all_targets(model: nnx.Module) -> dict[str, Target]:
    """Return all layers that can have an adapter, by their names."""
    targets: dict[str, Target] = {}
    for path, module in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        if isinstance(module, Linear):
            targets[name] = Target(module, "kernel", NAME, module.num_inputs)
        if isinstance(module, Experts):
            targets |= {
                f"{name}.{weight}": Target(
                    module, weight, f"{weight}_{NAME}", 1, num_batch=int(weight != "router")
                )
                for weight in _OF_EXPERTS
                if getattr(module, weight) is not None
            }
    return targets


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def is_adapter(path: Sequence[Any]) -> bool:
    """Return whether a parameter belongs to an adapter.

    Args:
        path: keys of the parameter in the tree of all parameters, as strings.
    """
    return len(path) > 1 and (path[-2] == NAME or str(path[-2]).endswith(f"_{NAME}"))


def layer_of(weight: str) -> str | None:
    """Return the name in `lora.targets` for a weight; None if it cannot have an adapter.

    Args:
        weight: dotted name of the weight, such as "decoder.layers.mlp.up.kernel".
    """
    layer, _, word = weight.rpartition(".")
    if word == "kernel":
        return layer
    return weight if word in _OF_EXPERTS else None


def adapter_of(weight: str) -> str:
    """Return the name of the adapter of a weight that can have one, whether it has one or not.

    Args:
        weight: as for `layer_of`.
    """
    layer, _, word = weight.rpartition(".")
    return f"{layer}.{NAME}" if word == "kernel" else f"{weight}_{NAME}"
