"""Writes a Hugging Face model as Megatron-LM's checkpoint in the format `torch_dist`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from tests.convert.trainers.megatron_layout import Layout, arguments, whole_model


def write_dist(
    model: Any,
    directory: Path,
    *,
    numbers_layers: bool = False,
    has_common_file: bool = True,
    names_gates: bool = False,
) -> None:
    """Write a model with PyTorch's own writer, in parts of one layer and half of the rows.

    Args:
        numbers_layers: whether each layer has tensors of its own.
        has_common_file: whether the arguments are in common.pt, and not in a part.
        names_gates: whether the parts of a gated MLP have names of their own.
    """
    layout = Layout(tensor=1, pipeline=1)
    folder = directory / "iter_0000010"
    common = {"args": arguments(model, layout), "checkpoint_version": 3.0, "iteration": 10}
    tensors = whole_model(model, layout)
    if names_gates:
        for name in [name for name in tensors if name.endswith("linear_fc1.weight")]:
            tensors[f"{name}_w"], tensors[f"{name}_v"] = tensors.pop(name).chunk(2)
    if not numbers_layers:
        tensors = _stacked(tensors)
    with _one_process() as group:
        state: dict[str, Any] = {name: _in_parts(x, group) for name, x in tensors.items()}
        state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(3)
        if not has_common_file:
            state["common_state/shard_0_1"] = [common]
        # Without flattening, lists stay as they are, as with Megatron-LM's own planner.
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(state, checkpoint_id=folder, planner=planner)
    if has_common_file:
        torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (directory / "latest_checkpointed_iteration.txt").write_text("10")


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors; the layers' tensors of the same name become one."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, values in tensors.items():
        stacks.setdefault(re.sub(r"layers\.\d+\.", "layers.", name), []).append(values)
    return {
        name: torch.stack(values) if ".layers." in name else values[0]
        for name, values in stacks.items()
    }


def _in_parts(values: torch.Tensor, group: Any) -> ShardedTensor:
    """Divide a tensor along its first two dimensions, as layers and tensor parallelism do."""
    rows = [values.shape[0]] if values.dim() == 1 else [*map(len, values.chunk(2))]
    shards = []
    start = 0
    for size in rows:
        half = values.narrow(0, start, size)
        offsets = [start] + [0] * (values.dim() - 1)
        shards.append(
            Shard(half.contiguous(), ShardMetadata(offsets, list(half.shape), "rank:0/cpu"))
        )
        start += size
    return ShardedTensor._init_from_local_shards(shards, values.shape, process_group=group)


@contextmanager
def _one_process() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
