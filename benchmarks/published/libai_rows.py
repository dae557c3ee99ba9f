"""The published benchmark of LiBai and Megatron: its rows, and the same jobs as configs of Taibai.

A row names its job, for example

    nl24_fp16_4x2x1_ac_mb128_gb4096_1n8g

for 24 layers in float16 on data=4 × tensor=2 × pipeline=1, with activation checkpointing, 128
sequences per replica and microbatch, 4,096 sequences per step, on 1 host with 8 GPUs. All jobs have
1,024 embedding dimensions and 16 heads.
"""

import csv
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

COLUMNS = ("section", "model", "config_dxmxp", "libai_samples_s", "megatron_samples_s")
#: Name in the column `model` -> config file and size: 24 layers, 16 heads, embed dim 1,024. The
#: sequences have 512 (BERT) and 1,024 tokens (GPT-2).
MODELS = {"BERT": "bert.py:large", "GPT-2": "gpt2.py:medium"}
#: The GPUs are not named. These have 32 GB, as the jobs need, and tensor cores for float16.
GPU = "v100"
#: Assumed network: one adapter of 100 Gbit/s per host, which its 8 GPUs share.
NETWORK_GBIT_PER_S = 100 / 8

_NAME = re.compile(
    r"nl(?P<num_layers>\d+)_fp16_(?P<data>\d+)x(?P<tensor>\d+)x(?P<pipeline>\d+)_(?P<ac>ac_)?"
    r"mb(?P<micro_batch_size>\d+)_gb(?P<global_batch_size>\d+)_"
    r"(?P<num_hosts>\d+)n(?P<gpus_per_host>\d+)g",
    flags=re.ASCII,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A published job.

    Attributes:
        section: heading under which it was published.
        model: key of `MODELS`.
        name: name of the job, as in the module's docstring.
        libai_samples_per_s: measured sequences per second of LiBai, on all GPUs together.
        megatron_samples_per_s: the same of Megatron.
        num_layers: Transformer layers.
        data: number of replicas.
        tensor: number of GPUs over which layers are split.
        pipeline: number of pipeline stages.
        recomputes: whether the backward pass recomputes each layer from its input.
        micro_batch_size: sequences per replica and microbatch.
        global_batch_size: sequences per step.
        num_hosts: number of hosts.
        gpus_per_host: number of GPUs per host.
    """

    section: str
    model: str
    name: str
    libai_samples_per_s: float
    megatron_samples_per_s: float
    num_layers: int
    data: int
    tensor: int
    pipeline: int
    recomputes: bool
    micro_batch_size: int
    global_batch_size: int
    num_hosts: int
    gpus_per_host: int

    def __post_init__(self):
        where = f"{self.model} {self.name}"
        if self.model not in MODELS:
            raise ValueError(f"{where}: model {self.model!r} is unknown; use {', '.join(MODELS)}")
        sizes = ("num_layers", "data", "tensor", "pipeline", "micro_batch_size")
        sizes += ("global_batch_size", "num_hosts", "gpus_per_host")
        for name in (*sizes, "libai_samples_per_s", "megatron_samples_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{where}: {name}={getattr(self, name)} must be positive")
        mesh_size = self.data * self.tensor * self.pipeline
        if mesh_size != self.num_gpus:
            raise ValueError(
                f"{where}: the mesh {self.data}x{self.tensor}x{self.pipeline} has {mesh_size} "
                f"GPUs, but {self.num_hosts} × {self.gpus_per_host} are named; make them equal"
            )
        if self.global_batch_size % (self.data * self.micro_batch_size):
            raise ValueError(
                f"{where}: {self.data} replicas × {self.micro_batch_size} sequences must divide "
                f"the global batch of {self.global_batch_size}"
            )

    @property
    def key(self) -> tuple[str, str]:
        """Model and name: rows with the same key are the same job."""
        return self.model, self.name

    @property
    def num_gpus(self) -> int:
        """Number of GPUs."""
        return self.num_hosts * self.gpus_per_host

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and replica."""
        return self.global_batch_size // (self.data * self.micro_batch_size)

    @property
    def is_fitted(self) -> bool:
        """Whether constants may be fitted to the row: it has one GPU, or replicas only."""
        return self.tensor == 1 and self.pipeline == 1

    @property
    def target(self) -> str:
        """The GPUs, as for `--target`."""
        return f"{GPU}:{self.num_hosts}x{self.gpus_per_host}"

    @property
    def overrides(self) -> list[str]:
        """Overrides of the model's config.

        They follow the published implementations: activation checkpointing recomputes each layer
        once, attention computes all scores at once, gradients are summed in float16, and tensor
        parallelism splits attention and MLP only, so each GPU computes all norms and residuals.
        The memory budget is all of the GPU's memory instead of nine tenths: a published job on one
        GPU needs more, and XLA would make its step slower.
        """
        return [
            f"model.num_layers={self.num_layers}",
            "model.attention=plain",
            f"mesh.pipeline={self.pipeline}",
            f"mesh.data={self.data}",
            f"mesh.model={self.tensor}",
            f"data.global_batch_size={self.global_batch_size}",
            f"train.num_microbatches={self.num_microbatches}",
            f"train.remat={'full' if self.recomputes else 'none'}",
            "train.unroll=false",
            "pipeline.schedule=1f1b",
            "precision.compute=float16",
            "precision.reduce=float16",
            "memory.zero_stage=0",
            "memory.device_budget=31.7",
            "rules.act_tokens=none",
        ]


def parse_rows(text: str) -> list[Row]:
    """Parse the benchmark.

    Args:
        text: CSV file with the header `COLUMNS`.

    Returns:
        The rows in their order. A job may appear twice, in two sections.

    Raises:
        ValueError: a row has another form, a number that is not positive, or a mesh or batch that
            does not match its name, or the two rows of one job differ.
    """
    lines = [*csv.reader(text.splitlines())]
    if not lines or tuple(lines[0]) != COLUMNS:
        raise ValueError(f"the first line must be {','.join(COLUMNS)}")
    rows = [_row(number, cells) for number, cells in enumerate(lines[1:], start=2)]
    published: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows:
        speeds = row.libai_samples_per_s, row.megatron_samples_per_s
        if published.setdefault(row.key, speeds) != speeds:
            raise ValueError(f"{row.model} {row.name} appears twice, with different speeds")
    return rows


def jobs_of(rows: Iterable[Row]) -> list[Row]:
    """Return each job once, in the order in which they first appear."""
    jobs: dict[tuple[str, str], Row] = {}
    for row in rows:
        jobs.setdefault(row.key, row)
    return [*jobs.values()]


def _row(number: int, cells: list[str]) -> Row:
    if len(cells) != len(COLUMNS):
        raise ValueError(f"line {number} has {len(cells)} cells; it must have {len(COLUMNS)}")
    section, model, name, libai, megatron = cells
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"line {number}: {name!r} must have the form nl24_fp16_4x2x1_ac_mb128_gb4096_1n8g"
        )
    sizes: dict[str, Any] = {key: int(x) for key, x in match.groupdict().items() if key != "ac"}
    return Row(
        section=section,
        model=model,
        name=name,
        libai_samples_per_s=_speed(number, libai),
        megatron_samples_per_s=_speed(number, megatron),
        recomputes=match["ac"] is not None,
        **sizes,
    )


def _speed(number: int, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"line {number}: {cell!r} is not a number of samples per second") from None
