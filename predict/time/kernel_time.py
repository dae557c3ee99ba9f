"""Estimates how long one instruction of a compiled GPU program takes.

XLA's own cost model is used where it is available and plausible. In a program that is compiled with
`xla_gpu_collect_cost_model_stats`, every kernel carries XLA's estimates:

    backend_config={..., "reification_cost":[{"exec_time_us":6.26,...,"name":""},
                                             {"exec_time_us":6.26,...,"name":"sol"}]}

- For a cuBLAS call or a collective, the entry `sol` is interpolated from measurements on an H100 or
  a B200, or computed from a ring for a collective across hosts. It is far too large outside the
  measured range: for a bfloat16 product with a float32 result of 512x32000, it is 80 times the time
  that the FLOPs take.
- For a Triton fusion, use the entry `indexing-cost-model`; its unnamed entry is implausible.
- For any other fusion, use the unnamed entry.
- There are no estimates for cuDNN's calls, sorts, copies, most reduce-scatters and all-to-alls, and
  collectives whose groups are written as axes of a mesh (jax 0.12). On other GPUs than these two,
  there are none at all.

If an estimate is implausible or missing, the time is computed here from FLOPs, bytes and the
efficiencies below.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal

from predict.machines.machine import MEMORY_EFFICIENCY, Machine
from predict.program import asynchrony, device_groups
from predict.program.instruction import Instruction, arrays_of, custom_call_target
from predict.program.instruction_work import AttentionWork, attention_work, product_flops
from predict.program.module import Module
from predict.time.memory_traffic import array_bytes, moved_bytes, scatters_in_place
from predict.time.transfer import transfer_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """Time of fused attention, as the FLOPs that tensor cores would do in it at their peak.

    The exponential of a pair of a query and a key takes the same time for every head dim, so small
    heads reach a smaller share of the peak.

    Attributes:
        query: FLOPs per query, whatever the head dim.
        query_dim: FLOPs per query and head dim.
        pair: FLOPs per pair of a query and a key, whatever the head dim.
        pair_dim: FLOPs per pair and head dim.
    """

    query: float
    query_dim: float
    pair: float
    pair_dim: float

    def flops(self, work: AttentionWork) -> float:
        """Return the time of the work, as a number of FLOPs at the peak rate."""
        query = self.query + self.query_dim * work.head_dim
        pair = self.pair + self.pair_dim * work.head_dim
        return query * work.num_queries + pair * work.num_pairs


#: If XLA's estimate of a product implies less than this share of the peak FLOP/s and of the memory
#: bandwidth, the product is assumed to be outside the measured range of XLA's tables. There the
#: share is 0.01 to 0.04; within the range it is 0.6 to 0.8. It is less only for products so small
#: that launching the kernel dominates; SMALL_S allows for these.
#: An estimate that exceeds the peak is outside of the range too: of a float8 product, for which the
#: tables for an H100 have no entry, XLA says 1.2 times the peak.
LOWEST_EFFICIENCY = 0.4
SMALL_S = 20e-6
#: Least time of cuDNN's flash attention, forward and backward, which `AttentionCost` explains.
#: Fitted to kernels on an H200 that benchmarks/results/gpu_steps.json holds, with 197, 1,024 and
#: 4,096 tokens and head dims of 64 and 128. The fit is within 10 % of each.
ATTENTION_FORWARD = AttentionCost(query=64e3, query_dim=0, pair=300, pair_dim=5.4)
ATTENTION_BACKWARD = AttentionCost(query=150e3, query_dim=4200, pair=790, pair_dim=15.4)
#: Bytes per second that a Triton fusion, such as a norm, moves at most, whatever the memory's
#: bandwidth: norms over 1,024 to 2,048 dims moved 2.2 to 3.4 TB/s on the same H200.
TRITON_BYTES_PER_S = 2.4e12
Category = Literal["matmul", "attention", "other"]
_ENTRIES = re.compile(r'"reification_cost":\s*\[([^\]]*)\]')
_ENTRY = re.compile(r'"exec_time_us":\s*([\d.eE+\-]+)[^{}]*"name":\s*"([^"]*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel on the compute stream: its category, and its seconds per execution."""

    category: Category
    seconds: float


class Costs:
    """Estimates the times of the instructions of one program.

    Args:
        module: program.
        mesh_shape: sizes of the mesh axes, in mesh order.
        machine: hardware that it runs on.
    """

    def __init__(self, module: Module, mesh_shape: Mapping[str, int], machine: Machine):
        self.module = module
        self.mesh_shape = mesh_shape
        self.machine = machine

    def kernel(self, instruction: Instruction) -> Kernel | None:
        """Return the kernel that an instruction runs on the compute stream, or None if none.

        Do not pass collectives, copies to or from the host, or calls of computations.
        """
        if instruction.opcode in asynchrony.NO_WORK:
            return None
        target = custom_call_target(instruction)
        if target == "AllocateBuffer":
            return None  # memory without a value
        if target.startswith("__cudnn$fmha"):
            return self._kernel("attention", self._attention_s(instruction))
        flops = self._flops(instruction)
        if flops:
            return self._kernel("matmul", self._product_s(instruction, flops))
        estimates = {} if scatters_in_place(self.module, instruction) else entries(instruction)
        seconds = estimates.get(
            "indexing-cost-model", None if _is_triton(instruction) else estimates.get("")
        )
        if seconds is None:
            seconds = self.machine.memory_s(moved_bytes(self.module, instruction))
        if _is_triton(instruction):
            seconds = max(seconds, moved_bytes(self.module, instruction) / TRITON_BYTES_PER_S)
        return self._kernel("other", seconds)

    def collective_s(self, instruction: Instruction) -> float:
        """Return the time of a collective or of its start."""
        num_devices = math.prod(self.mesh_shape.values())
        groups = device_groups.parse(instruction.attributes, num_devices)
        kind = asynchrony.collective_kind(instruction)
        assert kind is not None
        result = arrays_of(asynchrony.result_of(instruction))
        num_bytes = sum(array.bytes for array in result)
        given_s = entries(instruction).get("sol")
        return transfer_s(self.machine, kind, groups, num_bytes, given_s)

    def _flops(self, instruction: Instruction) -> int:
        """Return the FLOPs of the products in an instruction, including products in a fusion."""
        flops = product_flops(instruction)
        if flops is not None or instruction.opcode != "fusion":
            return flops or 0
        inner = (i for name in instruction.called for i in self.module.computations.get(name, []))
        return sum(product_flops(i) or 0 for i in inner)

    def _product_s(self, instruction: Instruction, flops: int) -> float:
        operands = [array for t in instruction.operand_types for array in arrays_of(t)]
        # The product is computed in the narrowest operand type: with bfloat16 operands, a float32
        # bias does not make it a float32 product.
        dtype = min(operands[:2], key=lambda array: array.bytes / max(1, array.num_elements)).dtype
        num_bytes = moved_bytes(self.module, instruction)
        least_s = flops / self.machine.peak_flops_per_s(dtype)
        roofline_s = max(least_s, num_bytes / self.machine.memory_bytes_per_s)
        slowest_s = SMALL_S + roofline_s / LOWEST_EFFICIENCY
        estimates = entries(instruction)
        given_s = estimates.get(
            "sol" if instruction.opcode == "custom-call" else "indexing-cost-model"
        )
        if given_s is not None and least_s <= given_s <= slowest_s:
            return given_s
        return self.machine.product_s(dtype, flops, num_bytes)

    def _attention_s(self, instruction: Instruction) -> float:
        is_backward = "Backward" in custom_call_target(instruction)
        cost = ATTENTION_BACKWARD if is_backward else ATTENTION_FORWARD
        dtype = next(arrays_of(instruction.operand_types[0])).dtype
        flops = cost.flops(attention_work(instruction))
        compute_s = flops / self.machine.peak_flops_per_s(dtype)
        moved_s = array_bytes(instruction) / self.machine.memory_bytes_per_s
        return max(compute_s, moved_s / MEMORY_EFFICIENCY)

    def _kernel(self, category: Category, seconds: float) -> Kernel:
        return Kernel(category=category, seconds=max(seconds, self.machine.kernel_s))


def entries(instruction: Instruction) -> dict[str, float]:
    """Return XLA's estimates of an instruction: name -> seconds."""
    match = _ENTRIES.search(instruction.attributes)
    parts = _ENTRY.findall(match[1]) if match else []
    return {name: float(microseconds) * 1e-6 for microseconds, name in parts}


def _is_triton(instruction: Instruction) -> bool:
    return '"__triton' in instruction.attributes
