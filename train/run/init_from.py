"""Initial parameters from a checkpoint (`init_from`).

Each parameter of the run is loaded unchanged, loaded and adapted (position embeddings of another
resolution, classifiers with labels in another order), or newly initialized (heads that the
checkpoint lacks or has for another task). Experts can start as copies of dense MLPs.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from convert.adapters.merged import without_adapters
from convert.source import Source, load_params
from convert.upcycling import NEW as NEW_WITH_EXPERTS
from convert.upcycling import upcycles, with_experts
from distributed.messages import LONGEST_START_S, Exchange
from models.adapters import is_adapter
from models.layers.lora import norms
from models.vision.vit import positions_on
from sharding.memory import in_device_memory, to_device
from train.run.run import Run

#: The layer whose outputs are the labels of a task.
_TASK_HEAD = "classifier"
#: A second head for the task, which a DeiT has.
_TASK_HEADS = (_TASK_HEAD, "distillation_classifier")
#: Origin of a parameter: loaded unchanged, resized to another number of patches, with labels in
#: another order, the norms of a loaded kernel, or initialized as in a run without a checkpoint.
_LOADED = "loaded"
_RESIZED = "resized"
_REORDERED = "reordered"
_NORMS = "norms of the kernel"
_NEW = "new"

Tree = Any
Path = tuple[str, ...]

_log = logging.getLogger(__name__)


def start_params(run: Run, source: Source, labels: Sequence[object] = ()) -> Tree:
    """Return the initial parameters, with the layout of `run.state_layout.portable.params`.

    Parameters of a head that the checkpoint lacks, or has for another task, are newly initialized.

    Args:
        labels: labels of the data, in order. A loaded classifier is reordered to match.

    Raises:
        ValueError: the checkpoint has other parameters, shapes, patches, windows or labels.
        OSError: a file of it cannot be read.
    """
    are_copied = upcycles(getattr(run.model_config, "num_experts", None), source.config)
    if run.config.lora.rank is None or are_copied:
        source = without_adapters(source)
    if are_copied:
        _log.info("init_from: each expert starts as a copy of the MLP of its layer")
        source = with_experts(source, run.model_config)
    _check_windows(run, source)
    wanted = _flat(run.state_layout.portable.params)
    stored = _flat(nnx.to_pure_dict(nnx.split(source.abstract())[1]))
    _check_adapters(run, source, wanted, stored)
    keeps_head = _keeps_head(run, source, wanted)
    order = _label_order(wanted, stored, labels, run, source) if keeps_head else None
    origins = {
        path: _NEW
        if are_copied and path[-1] in NEW_WITH_EXPERTS
        else _origin(path, wanted, stored, keeps_head=keeps_head, order=order)
        for path in wanted
    }
    _check_patches(run, source, [p for p in _paths_with(_LOADED, origins) if p in stored], stored)
    _report({**origins, **{path: "left out" for path in stored.keys() - wanted.keys()}})

    requested = {path: leaf for path, leaf in wanted.items() if origins[path] not in (_NEW, _NORMS)}
    # Load tables to resize unsharded: shards of the new table need rows from anywhere in the old.
    whole = NamedSharding(run.mesh, PartitionSpec())
    for path in _paths_with(_RESIZED, origins):
        wide = jnp.promote_types(wanted[path].dtype, jnp.float32)
        requested[path] = jax.ShapeDtypeStruct(stored[path].shape, wide, sharding=whole)
    # If a process cannot read its part, all of them must know before they compute together.
    loaded = Exchange(LONGEST_START_S).on_all(
        lambda: load_params(source, nnx.traversals.unflatten_mapping(requested))
    )
    params = _flat(loaded)
    for path in _paths_with(_RESIZED, origins):
        num_first = getattr(source.config, "num_first_tokens", 1)
        params[path] = _resize(params[path], wanted[path], num_first=num_first)
    for path in _paths_with(_REORDERED, origins):
        params[path] = _reorder(params[path], wanted[path], order)
    if new := _paths_with(_NEW, origins):
        params |= _newly_initialized(run, new)
    for path in _paths_with(_NORMS, origins):
        kernel = params[(*path[:-2], "kernel")]
        is_stacked = path[0] in run.functions.num_layers
        params[path] = _norms(kernel, wanted[path], is_stacked=is_stacked)
    return nnx.traversals.unflatten_mapping(params)


def _origin(
    path: Path,
    wanted: Mapping[Path, Any],
    stored: Mapping[Path, Any],
    *,
    keeps_head: bool,
    order: np.ndarray | None,
) -> str:
    """Return the origin of a parameter: _LOADED, _RESIZED, _REORDERED, _NORMS or _NEW."""
    if is_adapter(path) and path not in stored:
        return _NORMS if path[-1] == "magnitude" else _NEW
    is_of_labels = path[0] in _TASK_HEADS
    if not keeps_head and (is_of_labels or path not in stored):
        return _NEW
    if is_of_labels and order is not None:
        return _REORDERED
    # Position embeddings of image patches are [1, F + T, D]; those for text are [T, D].
    is_of_patches = path[-1].endswith("position_embedding") and wanted[path].ndim == 3
    if is_of_patches and path in stored and stored[path].shape[1] != wanted[path].shape[1]:
        return _RESIZED
    return _LOADED


def _check_adapters(
    run: Run, source: Source, wanted: Mapping[Path, Any], stored: Mapping[Path, Any]
) -> None:
    """Reject adapters of the checkpoint that the run does not have, or has in another form."""
    others = [
        ".".join(path[:-2])
        for path in sorted(stored)
        if is_adapter(path) and getattr(wanted.get(path), "shape", None) != stored[path].shape
    ]
    ours, theirs = run.config.lora, source.lora
    if others or (theirs.rank is not None and ours.scale != theirs.scale):
        raise ValueError(
            f"init_from={source.path} has adapters with lora.rank={theirs.rank}, "
            f"lora.alpha={theirs.alpha}, lora.use_rslora={theirs.use_rslora} and "
            f"lora.use_dora={theirs.use_dora} in the layers {','.join(theirs.targets)}, but the "
            "run has others; set the same, or merge the adapters of the checkpoint first "
            "(python -m convert.to_hf --merge)"
        )


def _paths_with(origin: str, origins: Mapping[Path, str]) -> list[Path]:
    return sorted(path for path, path_origin in origins.items() if path_origin == origin)


def _report(origins: Mapping[Path, str]) -> None:
    """Log the parameters that are not loaded unchanged, and unused ones of the checkpoint."""
    for origin in sorted({*origins.values()} - {_LOADED}):
        names = ", ".join(".".join(path) for path in _paths_with(origin, origins))
        _log.info("init_from: %s: %s", origin, names)


def _keeps_head(run: Run, source: Source, wanted: Mapping[Path, Any]) -> bool:
    """Return whether the run uses the checkpoint's head; check `train.init_labels`."""
    mode = run.config.train.init_labels
    ours, theirs = (getattr(config, "head", None) for config in (run.model_config, source.config))
    if mode != "by_name" and not any(path[0] == _TASK_HEAD for path in wanted):
        raise ValueError(
            f"train.init_labels={mode!r} is for a classifier, but model.name="
            f"{run.config.model.name!r} with model.head={ours!r} has none; do not set it"
        )
    if mode == "by_position" and ours != theirs:
        raise ValueError(
            f"train.init_labels='by_position', but init_from={source.path} has no classifier for "
            f"model.head={ours!r}; do not set it, and a new classifier is initialized"
        )
    return ours == theirs and mode != "new"


def _label_order(
    wanted: Mapping[Path, Any],
    stored: Mapping[Path, Any],
    labels: Sequence[object],
    run: Run,
    source: Source,
) -> np.ndarray | None:
    """Return the index in the checkpoint of each label of the data; None: the same order."""
    is_by_name = run.config.train.init_labels == "by_name"
    remedy = "train.init_labels=new for a"
    if is_by_name and labels and source.labels:
        known = list(source.labels)
        ours = [str(label) for label in labels]
        if sorted(known) != sorted(ours):
            raise ValueError(
                f"init_from={source.path} has a classifier for the labels {_some(known)}, but the "
                f"data has {_some(ours)}; rename the data's labels, or set "
                f"train.init_labels=by_position if they mean the same in this order, or {remedy} "
                "new classifier"
            )
        return None if known == ours else np.array([known.index(label) for label in ours])
    kernel = (_TASK_HEAD, "kernel")
    if kernel in wanted and kernel in stored:
        ours, theirs = (params[kernel].shape[-1] for params in (wanted, stored))
        if ours != theirs:
            raise ValueError(
                f"init_from={source.path} has a classifier for {theirs} labels, but the run has "
                f"{ours}; use data with {theirs} labels, or set {remedy} new classifier"
            )
    return None


def _some(names: Sequence[str], max_names: int = 10) -> str:
    return ", ".join([*names[:max_names], *(["…"] if len(names) > max_names else [])])


def _check_patches(
    run: Run, source: Source, paths: Sequence[Path], stored: Mapping[Path, Any]
) -> None:
    """Reject another image size if a parameter depends on the number of patches."""
    wanted = _flat(run.state_layout.portable.params)
    ours, theirs = (getattr(c, "image_size", None) for c in (run.model_config, source.config))
    others = [path for path in paths if wanted[path].shape != stored[path].shape]
    if ours != theirs and others:
        raise ValueError(
            f"init_from={source.path} was trained on images of {theirs} pixels, and its parameter "
            f"{'.'.join(others[0])} cannot be resized for images.size={ours}; set "
            f"images.size={theirs}"
        )


def _check_windows(run: Run, source: Source) -> None:
    """Reject window sizes for which the checkpoint has no position biases."""
    ours, theirs = (
        getattr(config, "windows", None) for config in (run.model_config, source.config)
    )
    # If the config names the windows of the pretraining, the model's relative positions are scaled
    # by them, and fit windows of any size.
    if ours == theirs or getattr(source.config, "pretrained_windows", ()):
        return
    raise ValueError(
        f"init_from={source.path} has windows of {theirs} patches per side; images.size="
        f"{run.config.images.size} makes them {ours}, for which it has no positions; set "
        f"images.size={source.config.image_size}, or another size with the same windows"
    )


def _resize(table: jax.Array, wanted: jax.ShapeDtypeStruct, *, num_first: int) -> jax.Array:
    """Resize a table of position embeddings `[1, F + T, D]`, of F first tokens, to another T."""
    side = round((wanted.shape[1] - num_first) ** 0.5)
    sharding: Any = wanted.sharding

    def make(table: jax.Array) -> jax.Array:
        return positions_on(table, (side, side), num_first=num_first).astype(wanted.dtype)

    resized = jax.jit(make, out_shardings=in_device_memory(sharding))(table)
    return jax.device_put(resized, sharding)


def _reorder(leaf: jax.Array, wanted: jax.ShapeDtypeStruct, order: np.ndarray | None) -> jax.Array:
    """Reorder the labels, the last dimension, of a classifier's parameter."""
    sharding: Any = wanted.sharding
    leaf = jax.device_put(leaf, in_device_memory(sharding))
    return jax.device_put(leaf[..., order], sharding)


def _newly_initialized(run: Run, paths: Sequence[Path]) -> dict[Path, jax.Array]:
    """Initialize parameters as in a run without a checkpoint."""
    wanted = _flat(run.state_layout.portable.params)

    def make():
        params = _flat(nnx.to_pure_dict(nnx.split(run.build())[1]))
        return {path: params[path].astype(wanted[path].dtype) for path in paths}

    return jax.jit(make, out_shardings={path: wanted[path].sharding for path in paths})()


def _norms(kernel: jax.Array, wanted: jax.ShapeDtypeStruct, *, is_stacked: bool) -> jax.Array:
    """Return the norms of a loaded kernel, in the layout of the magnitudes of its adapter.

    Args:
        kernel: `[*layers, *inputs, *outputs]`.
        wanted: magnitudes, `[*layers, *outputs]`.
    """
    num_inputs = kernel.ndim - wanted.ndim
    sharding: Any = wanted.sharding

    def make(kernel: jax.Array) -> jax.Array:
        return norms(to_device(kernel), num_inputs, num_layers=int(is_stacked)).astype(wanted.dtype)

    kernel_norms = jax.jit(make, out_shardings=in_device_memory(sharding))(kernel)
    return jax.device_put(kernel_norms, sharding)


def _flat(params: Tree) -> dict[Path, Any]:
    return dict(nnx.traversals.flatten_mapping(params))
