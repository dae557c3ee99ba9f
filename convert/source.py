"""What parameters are read from: a Hugging Face model, or a run of ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from checkpoint.lazy import LazyArray
from convert.huggingface import open_huggingface
from convert.model_on_disk import Source
from convert.runs import newest_checkpoint, open_run

Tree = Any


def read_source(
    path: str | Path,
    *,
    harmless: Sequence[str] = (),
    allow_pickle_weights: bool = False,
    averaged: bool = True,
) -> Source:
    """Returns what is at `path`: a Hugging Face model, or a run's directory or checkpoint.

    Of a Hugging Face model only the headers are read, and weights that are there twice; a run's
    checkpoint is read once, to see that it is intact.

    Args:
      harmless: keys of config.json that may be there though they are not known.
      allow_pickle_weights: whether to open `.bin` files.
      averaged: whether a run's parameters are their averages, where it kept such.

    Raises:
      ValueError: there is neither, the architecture or a key of config.json is not supported, or
        tensors are missing, unknown or of a wrong shape.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        return open_huggingface(path, harmless=harmless, allow_pickle_weights=allow_pickle_weights)
    return open_run(path, newest_checkpoint(path), averaged=averaged)


def load_params(source: Source, abstract: Tree) -> Tree:
    """Returns the parameters, each shard read from the files onto its devices.

    Args:
      abstract: jax.ShapeDtypeStruct with a sharding for each parameter, or for some of them.

    Raises:
      ValueError: the model on disk has other parameters or shapes.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    wanted = {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}
    arrays = source.open({name: leaf.shape for name, leaf in wanted.items()})
    values = [_place_shards(arrays[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(structure, values)


def _place_shards(array: LazyArray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = leaf.sharding or SingleDeviceSharding(jax.devices()[0])
    devices: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = zip(index or (), leaf.shape, strict=True)
        key = tuple(slice(*part.indices(size)[:2]) for part, size in bounds)
        devices.setdefault(tuple((part.start, part.stop) for part in key), []).append(device)
    shards = []
    for key, same in devices.items():
        # A copy: on a CPU an array may otherwise stay the file's own pages.
        part = array.read(tuple(slice(*bounds) for bounds in key)).astype(leaf.dtype)
        targets = [SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in same]
        # One shard at a time is in the host's memory.
        shards += jax.block_until_ready([jax.device_put(part, target) for target in targets])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
