"""Open a model on disk, and load its parameters.

The model is a Hugging Face model, a run, or the checkpoint of another trainer.

A model of the Hugging Face hub, `org/name@revision`, is downloaded into the cache first.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from checkpoint.lazy import LazyArray
from checkpoint.run_copies import is_run_url, local_run
from convert.adapters.peft_format import CONFIG_FILE
from convert.adapters.read_peft import open_adapter
from convert.hub_models import download_model
from convert.huggingface import open_huggingface, open_weights
from convert.model_on_disk import Source
from convert.options import DEFAULTS, ReadOptions
from convert.runs import newest_checkpoint, open_run
from convert.trainers.formats import read_checkpoint
from fields.paths import check_local
from untrusted.hub import model_of, pin

Tree = Any


def read_source(
    path: str | Path, options: ReadOptions = DEFAULTS, *, averaged: bool = True
) -> Source:
    """Open a model on disk.

    For a Hugging Face model, this reads only the headers of the files, and compares weights that
    occur twice. For a run, it reads the checkpoint once, to check that it is intact.

    Args:
        path: Hugging Face model, an adapter of PEFT, the checkpoint of another trainer, the
            directory of a run, or one of its checkpoints, also as the URL of a store; or
            `org/name@revision`, a model or adapter of the Hugging Face hub.
        averaged: whether to use the averages of the parameters, if the run kept such averages.

    Returns:
        The model. The path of one of the hub is `org/name@commit`.

    Raises:
        ValueError: There is neither a model nor a run at `path`, the architecture or a key of
            config.json is not supported, or tensors are missing, unknown or of the wrong shape; or
            the hub has no such model.
        ConnectionError: The hub or the store cannot be reached, and the cache lacks a file.
    """
    if is_run_url(str(path)):
        return read_source(local_run(str(path)), options, averaged=averaged)
    check_local("path", path)
    repository = model_of(str(path))
    if repository is not None:
        commit = options.hub_commits.get(str(repository), repository.revision)
        repository = pin(dataclasses.replace(repository, revision=commit))
        directory = download_model(repository, options)
        source = read_source(directory, options, averaged=averaged)
        return dataclasses.replace(source, path=Path(str(repository)))
    path = Path(path)
    weights = read_checkpoint(path, options)
    if weights is not None:
        return open_weights(path, weights.config, lambda: weights.tensors, options)
    if (path / "config.json").is_file():
        return open_huggingface(path, options)
    if (path / CONFIG_FILE).is_file():
        return open_adapter(path, partial(read_source, options=options, averaged=averaged))
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; correct the path of the model, or name a model of the Hugging "
            "Face hub as OWNER/NAME"
        )
    step = newest_checkpoint(path)
    return open_run(path, step, averaged=averaged, allow_import=options.allow_import)


def load_params(source: Source, abstract: Tree) -> Tree:
    """Load parameters; each device's shard is read from the files separately.

    Args:
        abstract: tree with a jax.ShapeDtypeStruct, including a sharding, for each parameter to
            load; these may be some of the model's parameters.

    Raises:
        ValueError: The model on disk lacks a parameter or has another shape for it.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    wanted = {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}
    arrays = source.open({name: leaf.shape for name, leaf in wanted.items()})
    values = [_place_shards(arrays[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(structure, values)


def _place_shards(array: LazyArray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = leaf.sharding or SingleDeviceSharding(jax.devices()[0])
    # Part of the array, as (start, stop) of each axis -> the devices that store it. Replicas of a
    # shard are read only once.
    devices: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = zip(index or (), leaf.shape, strict=True)
        key = tuple(slice(*part.indices(size)[:2]) for part, size in bounds)
        devices.setdefault(tuple((part.start, part.stop) for part in key), []).append(device)
    shards = []
    for key, same in devices.items():
        # astype makes a copy. Without it, an array on a CPU could alias the pages of the file.
        part = array.read(tuple(slice(*bounds) for bounds in key)).astype(leaf.dtype)
        targets = [SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in same]
        # Wait for the transfer, so that only one shard at a time is in host memory.
        shards += jax.block_until_ready([jax.device_put(part, target) for target in targets])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
