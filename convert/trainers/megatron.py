"""Read Megatron-LM's GPT checkpoints, in the format `torch`.

Every rank of tensor and pipeline parallelism has a file:

    latest_checkpointed_iteration.txt        10, or release
    iter_0000010/mp_rank_00_000/model_optim_rng.pt    tensor rank 0, stage 0
    iter_0000010/mp_rank_00_001/model_optim_rng.pt    tensor rank 0, stage 1
    iter_0000010/mp_rank_01_000/model_optim_rng.pt    tensor rank 1, stage 0

A file has the arguments of the run, the model of its rank (`model0`, `model1` … if a stage has
several chunks of layers), and the state of training, which is not used. Layers are numbered within
a chunk. The first chunks of all stages have the first layers, then come the second chunks.
"""

import argparse
import dataclasses
import itertools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.options import ReadOptions
from convert.tensor_files import Tensor, load_pickle, torch_tensor
from convert.trainers.gpt import Name, as_gpt2, as_llama, parse_name
from convert.trainers.megatron_args import config_of, is_gated, sizes_of
from convert.trainers.weights import Weights, joined, rows
from untrusted.files import read_text
from untrusted.messages import shortened

TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
#: Modules whose objects are left empty, because the model does not need them: the states of random
#: numbers, the scales of Transformer Engine, and arguments with values of other types.
_LEFT_EMPTY = ("megatron.", "transformer_engine.", "numpy.", "_io.", "signal.")
_TYPES = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
}
#: Axis along which tensor parallelism divides a tensor; others have a copy on every rank.
_AXES = {
    ("embedding", "weight"): 0,
    ("head", "weight"): 0,
    ("qkv", "weight"): 0,
    ("qkv", "bias"): 0,
    ("out", "weight"): 1,
    ("gate", "weight"): 0,
    ("gate", "bias"): 0,
    ("up", "weight"): 0,
    ("up", "bias"): 0,
    ("down", "weight"): 1,
}


class _Empty:
    """Takes the place of an object in a file without keeping anything of it."""

    def __new__(cls, *args: Any, **options: Any):
        return object.__new__(cls)

    def __init__(self, *args: Any, **options: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def find_iteration(path: Path) -> Path | None:
    """Return the folder of the newest iteration; None if there is no Megatron-LM checkpoint.

    Args:
        path: directory of a run's checkpoints, or of one of its iterations.

    Raises:
        ValueError: The file with the newest iteration is damaged, or names one that is missing.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        is_iteration = re.fullmatch(r"iter_\d{7,}|release", path.name)
        return path if is_iteration and path.is_dir() else None
    text = read_text(tracker, within=path, max_bytes=100).strip()
    if text != "release" and not text.isdecimal():
        raise ValueError(f"{tracker} has {shortened(text)!r}, which must be a number or 'release'")
    folder = path / ("release" if text == "release" else f"iter_{int(text):07}")
    if not folder.is_dir():
        raise ValueError(f"{tracker} names {folder.name}, but there is no {folder}")
    return folder


def read_ranks(folder: Path, options: ReadOptions) -> Weights:
    """Read the checkpoint of an iteration.

    Args:
        folder: folder with `mp_rank_…`.

    Raises:
        ValueError: Pickles are not allowed, a rank's file is missing or damaged, the shards do not
            fit together, or the model is not supported.
    """
    files = _files_of(folder)
    first = files[min(files)]
    if not options.allow_pickle_weights:
        raise ValueError(
            f"{first} is a pickle, which can run code when it is opened; if you trust it, add "
            "--allow_pickle_weights"
        )
    states = {rank: _load(file) for rank, file in files.items()}
    args = states[min(files)]["args"]
    tensor_size, num_stages = _sizes_of_mesh(args, first)
    ranks = [*itertools.product(range(tensor_size), range(num_stages))]
    missing = [rank for rank in ranks if rank not in files]
    if missing or len(files) != len(ranks):
        tensor_rank, stage = missing[0] if missing else max(files)
        raise ValueError(
            f"{folder} was saved with tensor_model_parallel_size={tensor_size} and "
            f"pipeline_model_parallel_size={num_stages}, but the file of tensor rank {tensor_rank} "
            f"and stage {stage} is {'missing' if missing else 'there, too'}"
        )
    shards = [
        _tensors_of([states[tensor_rank, stage] for stage in range(num_stages)], is_gated(args))
        for tensor_rank in range(tensor_size)
    ]
    return weights_of(args, _merge(shards), first)


def weights_of(args: Mapping[str, Any], tensors: Mapping[Name, Tensor], file: Path) -> Weights:
    """Return the model with the Hugging Face format's names.

    Args:
        tensors: whole tensors.
        file: file of the arguments.

    Raises:
        ValueError: The model is not supported, or a tensor does not match the arguments.
    """
    embedding = tensors.get(Name(layer=None, module="embedding", word="weight"))
    if embedding is None:
        raise ValueError(f"{file}: the model has no embedding of tokens; only GPTs can be read")
    sizes = sizes_of(args, embedding.shape[0], file)
    config = config_of(args, sizes, file)
    rename = as_gpt2 if config["model_type"] == "gpt2" else as_llama
    return Weights(config=config, tensors=rename(tensors, sizes))


def _files_of(folder: Path) -> dict[tuple[int, int], Path]:
    """Return (tensor rank, stage) -> file."""
    files = {}
    for directory in sorted(folder.iterdir()):
        match = _RANK.fullmatch(directory.name)
        file = next((directory / name for name in _FILES if (directory / name).is_file()), None)
        if match and file is not None:
            files[int(match[1]), int(match[2] or 0)] = file
    if not files:
        raise ValueError(
            f"{folder} has no mp_rank_00/{_FILES[0]}, which a checkpoint of Megatron-LM in the "
            "format `torch` has"
        )
    return files


def _load(file: Path) -> dict[str, Any]:
    """Load the file of a rank; `args` becomes a dict."""
    import torch

    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:
        raise ValueError(f"{file} cannot be read as a file of PyTorch: {shortened(error)}") from None
    unknown = [name for name in names if not name.startswith((*_TYPES, *_LEFT_EMPTY))]
    if unknown:
        raise ValueError(
            f"{file} has an object of the type {shortened(unknown[0])}, which is refused, because "
            "a checkpoint of Megatron-LM has only tensors, arguments and states of random numbers"
        )
    # A class of its own for each name, because PyTorch finds the name by the class, too.
    known = [(_TYPES.get(name) or type("Empty", (_Empty,), {}), name) for name in names]
    state = load_pickle(file, known)
    args = state.get("args") if isinstance(state, dict) else None
    if not isinstance(args, argparse.Namespace | types.SimpleNamespace):
        raise ValueError(
            f"{file} has no 'args', the arguments of the run; only checkpoints of Megatron-LM's "
            "training can be read"
        )
    version = state.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 2:
        raise ValueError(
            f"{file} has checkpoint_version={shortened(str(version))}, but at least 2.0 is needed, "
            "because earlier versions order query, key and value differently; save it again with "
            "a newer Megatron-LM"
        )
    return {**state, "args": vars(args), "file": file}


def _sizes_of_mesh(args: Mapping[str, Any], file: Path) -> tuple[int, int]:
    """Return the sizes of tensor and of pipeline parallelism."""
    sizes = []
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = args.get(name, 1)
        if type(size) is not int or not 1 <= size <= 10_000:
            raise ValueError(f"{file}: args has {name}={shortened(str(size))}")
        sizes.append(size)
    return sizes[0], sizes[1]


def _tensors_of(stages: Sequence[Mapping[str, Any]], gated: bool) -> dict[Name, Tensor]:
    """Return the tensors of one tensor rank, with the layers of all stages numbered in order.

    Args:
        gated: whether `up` has the rows of `gate`, too.
    """
    tensors: dict[Name, Tensor] = {}
    num_layers = 0
    chunks = 0
    while any(_model_key(stage, chunks) in stage for stage in stages):
        for stage in stages:
            found = _in_chunk(stage, chunks)
            for name, tensor in found.items():
                layer = None if name.layer is None else num_layers + name.layer
                tensors.setdefault(dataclasses.replace(name, layer=layer), tensor)
            num_layers += len({name.layer for name in found} - {None})
        chunks += 1
    if gated:
        tensors = dict(itertools.chain.from_iterable(map(_split_gate, tensors.items())))
    return tensors


def _model_key(stage: Mapping[str, Any], chunk: int) -> str:
    return "model" if "model" in stage and chunk == 0 else f"model{chunk}"


def _in_chunk(stage: Mapping[str, Any], chunk: int) -> dict[Name, Tensor]:
    """Return the tensors of a chunk of layers."""
    key = _model_key(stage, chunk)
    file = stage["file"]
    if not isinstance(stage.get(key), dict):
        raise ValueError(f"{file} has no {key!r}; the files of all stages must have the same chunks")
    return {
        parse_name(name, file): torch_tensor(name, values, file)
        for name, values in _flat(stage[key], file)
    }


def _flat(module: Mapping[Any, Any], file: Path, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and tensors of a module; earlier versions have a dict for each submodule."""
    import torch

    for key, value in module.items():
        name = f"{prefix}{key}"
        if str(key).endswith("_extra_state"):  # of Transformer Engine: scales for float8
            continue
        if isinstance(value, dict):
            if prefix.count(".") < 10:
                yield from _flat(value, file, f"{name}.")
        elif type(value) in (torch.Tensor, torch.nn.Parameter):
            yield name, value
        else:
            raise ValueError(
                f"{file}: {shortened(name)} is not a tensor that PyTorch saves by itself, such as "
                "one in float8; save the model in bfloat16"
            )


def _split_gate(item: tuple[Name, Tensor]) -> list[tuple[Name, Tensor]]:
    """Split the rows of a gated MLP's first layer, of which every rank has both parts."""
    name, tensor = item
    if name.module != "up":
        return [item]
    half = tensor.shape[0] // 2
    return [
        (dataclasses.replace(name, module="gate"), rows(tensor.name, tensor, slice(half))),
        (name, rows(tensor.name, tensor, slice(half, 2 * half))),
    ]


def _merge(shards: Sequence[Mapping[Name, Tensor]]) -> dict[Name, Tensor]:
    """Merge the shards of all tensor ranks."""
    merged = {}
    for name, tensor in shards[0].items():
        axis = _AXES.get((name.module, name.word))
        lacking = next((shard for shard in shards if name not in shard), None)
        if lacking is not None:
            file = next(iter(lacking.values())).file if lacking else tensor.file
            raise ValueError(f"{tensor.file} has the tensor {tensor.name}, but {file} does not")
        merged[name] = tensor if axis is None else joined([shard[name] for shard in shards], axis)
    return merged
