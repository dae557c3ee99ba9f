"""Gives the linear layers of a model adapters (models/layers/lora.py), chosen by their names."""

import difflib
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
from flax import nnx

from models.layers.basic import Linear
from models.layers.lora import Lora, LoraConfig
from models.stack import Stack, layer_numbers

_SEED_TAG = 0x10FA

#: Name of the adapter in its linear layer, and so in the names of its parameters.
NAME = "lora"


def add_adapters(model: nnx.Module, config: LoraConfig, *, seed: int) -> None:
    """Give the linear layers that the config targets an adapter; all parameters keep their values.

    The values of an adapter depend on the seed, the name of its layer, and the number of the layer
    in its stack.

    Args:
        model: model; it is changed, unless the config has no rank.
        config: rank, targets and variant.
        seed: seed of the random numbers.

    Raises:
        ValueError: a pattern matches no linear layer, or a layer outside of the stacks should have
            dropout.
    """
    if config.rank is None:
        return
    base = jax.random.fold_in(jax.random.key(seed), _SEED_TAG)
    for name, linear in matching_linears(model, config.targets).items():
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
        kernel = linear.kernel
        linear.lora = Lora(
            kernel[...],
            kernel.get_metadata()["out_sharding"],
            linear.num_inputs,
            keys=key,
            config=config,
        )


def matching_linears(model: nnx.Module, patterns: Sequence[str]) -> dict[str, Linear]:
    """Return the linear layers whose names match one of the patterns: name -> layer.

    Args:
        patterns: names, or ends of names after a dot, such as "attention.*" for
            "decoder.layers.attention.qkv". `*` matches dots too.

    Raises:
        ValueError: a pattern matches no linear layer.
    """
    modules = nnx.iter_modules(model)
    linears = {".".join(map(str, path)): m for path, m in modules if isinstance(m, Linear)}
    chosen: dict[str, Linear] = {}
    for pattern in patterns:
        matches = {name: m for name, m in linears.items() if _matches(name, pattern)}
        if not matches:
            near = difflib.get_close_matches(pattern, linears, n=3, cutoff=0.3) or [*linears]
            raise ValueError(
                f"lora.targets: {pattern!r} matches no linear layer; the nearest are "
                f"{', '.join(near)}"
            )
        chosen |= matches
    return dict(sorted(chosen.items()))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def is_adapter(path: Sequence[Any]) -> bool:
    """Return whether a parameter belongs to an adapter.

    Args:
        path: keys of the parameter in the tree of all parameters, as strings.
    """
    return len(path) > 1 and path[-2] == NAME
