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

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.tensor_files import Tensor, torch_tensor
from convert.trainers.gpt import Name, parse_name, split_gates
from convert.trainers.megatron_args import is_gated, weights_of
from convert.trainers.megatron_state import load_state
from convert.trainers.weights import Weights, joined
from untrusted.files import read_text
from untrusted.messages import shortened

METADATA = ".metadata"
TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
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


def find_iteration(path: Path) -> Path | None:
    """Return the folder of the newest iteration; None if there is no Megatron-LM checkpoint.

    Args:
        path: directory of a run's checkpoints, or of one of its iterations.

    Raises:
        ValueError: The file with the newest iteration is damaged, or names one that is missing.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        is_iteration = re.fullmatch(r"iter_\d{7,}|release", path.name) and path.is_dir()
        names = {file.name for file in path.iterdir()} if is_iteration else set()
        return path if METADATA in names or any(map(_RANK.fullmatch, names)) else None
    text = read_text(tracker, within=path, max_bytes=100).strip()
    if text != "release" and not text.isdecimal():
        raise ValueError(f"{tracker} has {shortened(text)!r}, which must be a number or 'release'")
    folder = path / ("release" if text == "release" else f"iter_{int(text):07}")
    if not folder.is_dir():
        raise ValueError(f"{tracker} names {folder.name}, but there is no {folder}")
    return folder


def read_ranks(folder: Path) -> Weights:
    """Read the files of all ranks.

    Args:
        folder: folder with `mp_rank_…`.

    Raises:
        ValueError: A rank's file is missing or damaged, the shards do not fit together, or the
            model is not supported.
    """
    files = _files_of(folder)
    first = files[min(files)]
    states = {rank: load_state(file) for rank, file in files.items()}
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
        _tensors_of([states[tensor_rank, stage] for stage in range(num_stages)])
        for tensor_rank in range(tensor_size)
    ]
    if is_gated(args):
        shards = [split_gates(shard) for shard in shards]
    return weights_of(args, _merge(shards), first)


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


def _sizes_of_mesh(args: Mapping[str, Any], file: Path) -> tuple[int, int]:
    """Return the sizes of tensor and of pipeline parallelism."""
    sizes = []
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = args.get(name, 1)
        if type(size) is not int or not 1 <= size <= 10_000:
            raise ValueError(f"{file}: args has {name}={shortened(str(size))}")
        sizes.append(size)
    return sizes[0], sizes[1]


def _tensors_of(stages: Sequence[Mapping[str, Any]]) -> dict[Name, Tensor]:
    """Return the tensors of one tensor rank, with the layers of all stages numbered in order."""
    tensors: dict[Name, Tensor] = {}
    num_layers = 0
    chunks = 0
    while any(_model_key(stage, chunks) in stage for stage in stages):
        for stage in stages:
            layers = _in_chunk(stage, chunks)
            for name, tensor in layers.items():
                layer = None if name.layer is None else num_layers + name.layer
                tensors.setdefault(dataclasses.replace(name, layer=layer), tensor)
            num_layers += len({name.layer for name in layers} - {None})
        chunks += 1
    return tensors


def _model_key(stage: Mapping[str, Any], chunk: int) -> str:
    return "model" if "model" in stage and chunk == 0 else f"model{chunk}"


def _in_chunk(stage: Mapping[str, Any], chunk: int) -> dict[Name, Tensor]:
    """Return the tensors of a chunk of layers."""
    key = _model_key(stage, chunk)
    file = stage["file"]
    if not isinstance(stage.get(key), dict):
        raise ValueError(
            f"{file} has no 'model' of the chunk {chunk} of layers, which other stages have; the "
            "files must be of the same run"
        )
    return {
        parse_name(name, file): torch_tensor(name, values, file)
        for name, values in _flat(stage[key], file)
    }


def _flat(module: Mapping[Any, Any], file: Path, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and tensors of a module; earlier versions have a dict for each submodule."""
    import torch

    for key, value in module.items():
        name = f"{prefix}{key}"
        if str(key).endswith("_extra_state"):  # Transformer Engine's scales for float8
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
