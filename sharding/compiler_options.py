"""Options for XLA's GPU compiler, each with its reason; XLA_FLAGS overrides every one of them.

    step traced on a mesh -> hardware of its devices -> options_for(hardware) -> lowered.compile()

A GPU that is only described gets the same options as a real one, and a few more, because XLA cannot
query it or measure times on it. CPUs have none. Variables that must be set before the process
starts are in launch/environment.py.

Left out on purpose:

- The latency-hiding scheduler, for GPUs since Hopper: there it is XLA's default.
- XLA pipelines reduce-scatters and all-reduces by default: one that nothing else in its iteration
  reads ends in the next. Pipelined all-gathers need copies of the gathered weights, which took as
  long as the communication that they hid.
- Double buffering of loops, which removes such copies, doubles the program and its compile time,
  for 0.5 % of the predicted step at most.
- Higher thresholds for combining collectives. A combined reduce-scatter starts only when the last
  gradient of a layer is known, so that nothing is left to hide it behind: thresholds of 128 MiB
  added 52 ms of exposed communication to a step of 650 ms (LLaMA-2-7B on 8 H100s with fsdp=8,
  predicted).
- Fusions with dynamic slices, for jax 0.10 and 0.12: they let cuBLAS read a layer's weights where
  they are stored. They are a default of jax 0.12; jax 0.10 fails to compile them
  ("BufferAllocation::Slice not assigned").
- Splitting collective permutes into send and receive. Their order relative to the collectives in
  a pipeline's branches is untested.
"""

import dataclasses
import math
import os
from pathlib import Path

import jax

from sharding.hardware import Hardware

#: Compute capability of the first GPU of a generation.
VOLTA = 7.0
HOPPER = 9.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerOption:
    """An option of XLA's compiler that differs from its default.

    Attributes:
        name: name, as in XLA_FLAGS without dashes.
        value: value; "True" or "False" for a bool.
        reason: reason for the value.
        since: first compute capability that has the option.
        before: first later compute capability that does not need it any more.
        since_jax: first version of jax that needs it.
        before_jax: first later version of jax that does not need it any more.
        only_described: whether it is only for GPUs that are not present.
    """

    name: str
    value: str
    reason: str
    since: float = VOLTA
    before: float = math.inf
    since_jax: tuple[int, ...] = ()
    before_jax: tuple[int, ...] = (1,)
    only_described: bool = False


OPTIONS = (
    CompilerOption(
        name="xla_gpu_enable_triton_gemm",
        value="False",
        reason="autotuning Triton products takes minutes and mostly selects cuBLAS; untuned ones "
        "would keep their results in float32",
    ),
    CompilerOption(
        name="xla_gpu_enable_cub_radix_sort",
        value="False",
        reason="CUB's sort asks the GPU how much memory it takes; XLA's own sort does not",
        only_described=True,
    ),
    CompilerOption(
        name="xla_gpu_enable_latency_hiding_scheduler",
        value="True",
        reason="collectives run at the same time as kernels; XLA's default for later GPUs, but on "
        "these, kernels wait for every collective",
        before=HOPPER,
    ),
    CompilerOption(
        name="xla_gpu_collect_cost_model_stats",
        value="True",
        reason="writes time estimates into the program, for the prediction; XLA has none for "
        "earlier GPUs, and fails",
        since=HOPPER,
        only_described=True,
    ),
    CompilerOption(
        name="xla_gpu_experimental_use_collective_kernels",
        value="",
        reason="leaves small all-reduces to NCCL; XLA's own kernel does not appear as a collective "
        "in the program, and its compiler aborts for groups across hosts",
        since_jax=(0, 12),
        only_described=True,
    ),
    CompilerOption(
        name="xla_gpu_enable_dynamic_slice_fusion",
        value="False",
        reason="jax 0.11 computes a product twice if a layer reads and stores it: 17 % more FLOPs "
        "in a step of LLaMA-3.2-3B",
        since_jax=(0, 11),
        before_jax=(0, 12),
    ),
)

#: Name of the option that lists passes of the compiler that do not run.
DISABLED_PASSES = "xla_disable_hlo_passes"
NO_REMATERIALIZATION = CompilerOption(
    name=DISABLED_PASSES,
    value="rematerialization",
    reason="the step fits into memory, so XLA need not recompute anything to save some; what is "
    "recomputed is for train.remat to decide",
)
OVERLAP = CompilerOption(
    name="xla_gpu_memory_limit_slop_factor",
    value="200",
    reason="the step fits into memory, so collectives may run at the same time as kernels; by "
    "default XLA's scheduler gives this up for a step that needs more than about three quarters of "
    "the memory",
)
#: For steps that fit into memory with them.
MEMORY_FOR_SPEED = (NO_REMATERIALIZATION, OVERLAP)

#: For steps with several pipeline stages.
SENDS_IN_FLIGHT = CompilerOption(
    name="xla_gpu_experimental_parallel_collective_overlap_limit",
    value="3",
    reason="a send between stages may be on its way while layers gather weights or tokens and "
    "scatter the ones before; by default only one collective is on its way at any time",
)

#: For steps that multiply in float8.
SEPARATE_PRODUCTS = CompilerOption(
    name="xla_gpu_dot_merger_threshold_mb",
    value="-1",
    reason="keeps small products of one input apart, such as those for queries and keys; merged, "
    "their kernels would have several scales, and the product would not be in float8",
)


#: Bytes of results up to which XLA combines reduce-scatters by default.
_COMBINED_BYTES = 30 * 2**20


def _separate_layers(bytes_of_layer: int) -> CompilerOption:
    """Return the option that keeps the gradients of unrolled layers apart."""
    return CompilerOption(
        name="xla_gpu_reduce_scatter_combine_threshold_bytes",
        value=str(bytes_of_layer),
        reason="gradients of an unrolled layer are sent while the layers before it run; on many "
        "devices XLA would combine those of several layers, which then wait for the last one",
    )


def options_for(
    hardware: Hardware,
    *,
    is_described: bool,
    saves_memory: bool,
    has_stages: bool = False,
    in_float8: bool = False,
    bytes_of_layer: int = 0,
) -> list[CompilerOption]:
    """Return the options for a step, except those that the user sets in XLA_FLAGS.

    Args:
        hardware: devices that the step is compiled for.
        is_described: whether they are only described, as in `Target`.
        saves_memory: whether XLA may make the step slower to save memory, because it does not fit
            otherwise.
        has_stages: whether the step has several pipeline stages.
        in_float8: whether the step multiplies in float8.
        bytes_of_layer: bytes of the gradients that a device receives from the reduce-scatters of an
            unrolled layer; 0 if there are none, or no unrolled layers.
    """
    if hardware.platform != "gpu":
        return []
    user_flags = flags_in(os.environ.get("XLA_FLAGS", ""))
    options = [*OPTIONS]
    if not saves_memory:
        options += MEMORY_FOR_SPEED
    if has_stages:
        options.append(SENDS_IN_FLIGHT)
    if in_float8:
        options.append(SEPARATE_PRODUCTS)
    if 0 < bytes_of_layer < _COMBINED_BYTES:
        options.append(_separate_layers(bytes_of_layer))
    return [
        option
        for option in options
        if option.since <= hardware.compute_capability < option.before
        and option.since_jax <= jax.__version_info__ < option.before_jax
        and is_described >= option.only_described
        and option.name not in user_flags
    ]


def flags_in(xla_flags: str) -> set[str]:
    """Return the names of the flags in a value of XLA_FLAGS, which may also name a file of flags.

    Raises:
        OSError: the file cannot be read.
    """
    if xla_flags.strip() and not xla_flags.lstrip().startswith("-"):
        xla_flags = Path(xla_flags.strip()).read_text(encoding="utf-8")
    return {flag.lstrip("-").partition("=")[0] for flag in xla_flags.split()}


def as_dict(options: list[CompilerOption]) -> dict[str, str | bool]:
    """Return the options as `compile(compiler_options=...)` takes them."""
    return {option.name: option.value for option in options}


def describe_options(options: list[CompilerOption]) -> str:
    """Return a line for each option, with its value and its reason."""
    if not options:
        return "compiler  XLA's defaults"
    lines = [f"{option.name}={option.value}: {option.reason}" for option in options]
    return "\n".join(f"compiler  {line}" for line in lines)
