"""Training jobs with a published speed or memory, and jobs for the plot of weak scaling."""

import dataclasses
from typing import Any

#: Gradients are added up in float32, and rounded once before they are sent.
_SENT_IN_BFLOAT16 = "precision.reduce=bfloat16"
#: By-layer gathers over all replicas, and one microbatch. Configs with a published size have
#: train.remat=auto: activations are kept as far as they fit.
_ZERO3 = ("memory.zero_stage=3", "train.num_microbatches=1")
#: Sequences over `context`, of which each device keeps what attention reads and writes.
_LONG_8B = (*_ZERO3, "train.remat=qkv,attention")
#: Four chunks per stage make the bubble short. Each job chooses the activations that a block saves
#: for the backward pass, depending on the memory that is left.
_PIPELINE = (
    "pipeline.schedule=interleaved_1f1b",
    "pipeline.chunks=4",
    "memory.zero_stage=2",
)
#: One microbatch per sequence of a replica, in the pipelines of the 70B and 405B models.
_PIPELINE_70B = ("train.num_microbatches=16", "train.remat=mlp,attention", *_PIPELINE)
_PIPELINE_405B = ("train.num_microbatches=32", "train.remat=attention", *_PIPELINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A published training job.

    Attributes:
        name: model and hardware.
        config: file in configs/ with a size.
        target: GPUs, as for `--target`.
        overrides: overrides of the config.
        compute: `precision.compute`.
        published: measured tokens/s per GPU of somebody else, or in HOST_MEMORY the GB of the GPU;
            None if there is none for this job.
        source: who published it.
    """

    name: str
    config: str
    target: str
    overrides: tuple[str, ...]
    compute: str = "bfloat16"
    published: float | None = None
    source: str = ""

    @property
    def all_overrides(self) -> list[str]:
        """All overrides, including `precision.compute`."""
        return [*self.overrides, f"precision.compute={self.compute}"]


def _sent_in_bfloat16(job: Job) -> Job:
    """Return a job whose gradients are sent in bfloat16 instead of float32."""
    name = f"{job.name}, gradients sent in bfloat16"
    return dataclasses.replace(job, name=name, overrides=(*job.overrides, _SENT_IN_BFLOAT16))


#: Jobs of which the gradients are sent in float32 and in bfloat16.
_IN_BOTH = (
    Job(
        name="LLaMA-2-7B, 8 H100s",
        config="llama.py:2-7b",
        target="h100:1x8",
        overrides=(
            "mesh.data=8",
            "data.global_batch_size=16",
            "data.sequence_length=4096",
            *_ZERO3,
        ),
        published=2 * 4096 / 0.721,
        source="MaxText, 721 ms a step",
    ),
    Job(
        name="LLaMA-3-8B, 8 H100s",
        config="llama.py:3-8b",
        target="h100:1x8",
        overrides=("mesh.data=8", "data.global_batch_size=8", *_ZERO3),
        published=6667,
        source="torchtitan",
    ),
    Job(
        name="LLaMA-3-8B, 8 H100s, float8",
        config="llama.py:3-8b",
        target="h100:1x8",
        overrides=("mesh.data=8", "data.global_batch_size=8", *_ZERO3),
        compute="float8",
        published=14451,
        source="Megatron-Bridge, batch of 128",
    ),
    Job(
        name="LLaMA-3-70B, 64 H100s, ZeRO 3",
        config="llama.py:3-70b",
        target="h100:8x8",
        overrides=("mesh.data=64", "data.global_batch_size=64", *_ZERO3),
        published=867,
        source="NeMo Automodel",
    ),
    Job(
        name="LLaMA-3-70B, 64 H100s, ZeRO 3, float8",
        config="llama.py:3-70b",
        target="h100:8x8",
        overrides=("mesh.data=64", "data.global_batch_size=64", *_ZERO3),
        compute="float8",
        published=1664,
        source="Megatron-Bridge, batch of 256",
    ),
)
JOBS = (
    *(each for job in _IN_BOTH for each in (job, _sent_in_bfloat16(job))),
    Job(
        name="LLaMA-3-8B, 8 H100s, 131,072 tokens, float8",
        config="llama.py:3-8b",
        target="h100:1x8",
        overrides=(
            "mesh.data=2",
            "mesh.context=4",
            "data.global_batch_size=2",
            "data.sequence_length=131072",
            "model.max_positions=131072",
            *_LONG_8B,
        ),
        compute="float8",
        published=1071,
        source="torchtitan, context=4",
    ),
    Job(
        name="LLaMA-3-8B, 8 H100s, 262,144 tokens, float8",
        config="llama.py:3-8b",
        target="h100:1x8",
        overrides=(
            "mesh.context=8",
            "data.global_batch_size=1",
            "data.sequence_length=262144",
            "model.max_positions=262144",
            *_LONG_8B,
        ),
        compute="float8",
        published=548,
        source="torchtitan, context=8",
    ),
    Job(
        name="LLaMA-3-8B, 8 H100s, 2×2×2",
        config="llama.py:3-8b",
        target="h100:1x8",
        overrides=(
            "mesh.pipeline=2",
            "mesh.data=2",
            "mesh.model=2",
            "data.global_batch_size=32",
            "train.num_microbatches=16",
            "train.remat=mlp,attention",
            *_PIPELINE,
        ),
    ),
    Job(
        name="LLaMA-3-70B, 64 H100s, pipeline",
        config="llama.py:3-70b",
        target="h100:8x8",
        overrides=(
            "mesh.pipeline=4",
            "mesh.data=4",
            "mesh.model=4",
            "data.global_batch_size=64",
            *_PIPELINE_70B,
        ),
    ),
    Job(
        name="LLaMA-3-70B, 256 H200s",
        config="llama.py:3-70b",
        target="h200:32x8",
        overrides=(
            "mesh.data=256",
            "data.global_batch_size=256",
            *_ZERO3,
        ),
        published=1056,
        source="MaxText",
    ),
    Job(
        name="LLaMA-3.1-405B, 512 H100s",
        config="llama.py:3.1-405b",
        target="h100:64x8",
        overrides=(
            "mesh.pipeline=8",
            "mesh.data=8",
            "mesh.model=8",
            "data.global_batch_size=256",
            *_PIPELINE_405B,
        ),
    ),
    Job(
        name="LLaMA-3.1-405B, 1,024 H100s",
        config="llama.py:3.1-405b",
        target="h100:128x8",
        overrides=(
            "mesh.pipeline=8",
            "mesh.data=16",
            "mesh.model=8",
            "data.global_batch_size=512",
            *_PIPELINE_405B,
        ),
    ),
    Job(
        name="GPT-3 175B, 1,024 H100s",
        config="gpt2.py:175b",
        target="h100:128x8",
        overrides=(
            "mesh.pipeline=8",
            "mesh.data=32",
            "mesh.model=4",
            "data.global_batch_size=1536",
            "train.num_microbatches=48",
            "train.remat=none",
            *_PIPELINE,
        ),
    ),
)


def _experts(name: str, size: str, target: str, *overrides: str, **published: Any) -> Job:
    """Return a job of a model with experts, on sequences of 4,096 tokens."""
    return Job(
        name=name,
        config=f"mixtral.py:{size}",
        target=target,
        overrides=("data.tokenizer=bytes", "data.sequence_length=4096", *overrides),
        **published,
    )


#: Models with experts.
EXPERTS = (
    _experts(
        "Qwen3-30B-A3B, 8 H100s",
        "qwen3-30b-a3b",
        "h100:1x8",
        "mesh.expert=8",
        "memory.zero_stage=3",
        "data.global_batch_size=256",
        "train.num_microbatches=16",
        "train.remat=attention,attention_out",
        _SENT_IN_BFLOAT16,
        published=12040,
        source="NeMo Automodel",
    ),
    _experts(
        "Qwen3-30B-A3B, 16 H100s",
        "qwen3-30b-a3b",
        "h100:2x8",
        "mesh.pipeline=2",
        "mesh.expert=8",
        "memory.zero_stage=2",
        "data.global_batch_size=512",
        "train.remat=none",
        "train.num_microbatches=32",
        published=9058,
        source="Megatron-Bridge, in float8",
    ),
    _experts(
        "Mixtral 8×7B, 8 H100s",
        "mixtral-8x7b",
        "h100:1x8",
        "mesh.expert=8",
        "memory.zero_stage=3",
        "memory.placement=host",
        "data.global_batch_size=64",
        "train.num_microbatches=8",
        "train.remat=full",
    ),
    _experts(
        "GPT-OSS-120B, 64 H100s",
        "gpt-oss-120b",
        "h100:8x8",
        "mesh.pipeline=4",
        "mesh.expert=8",
        "mesh.data=2",
        "memory.zero_stage=2",
        "data.global_batch_size=2048",
        "train.num_microbatches=32",
        "train.remat=full",
        published=7626,
        source="NeMo Automodel",
    ),
    _experts(
        "DeepSeek-V3, 256 H100s",
        "deepseek-v3",
        "h100:32x8",
        "mesh.pipeline=16",
        "mesh.expert=16",
        "memory.zero_stage=3",
        "memory.shard_parameters_fraction=0.99",
        "data.global_batch_size=4096",
        "train.num_microbatches=256",
        "train.remat=full",
        "pipeline.layers_per_stage=auto",
        "pipeline.share_vocab=true",
        _SENT_IN_BFLOAT16,
        published=1002,
        source="NeMo Automodel",
    ),
    _experts(
        "DeepSeek-V3, 1,024 H100s, float8",
        "deepseek-v3",
        "h100:128x8",
        "mesh.pipeline=16",
        "mesh.expert=16",
        "mesh.data=4",
        "memory.zero_stage=2",
        "data.global_batch_size=8192",
        "train.num_microbatches=128",
        "train.remat=full",
        "pipeline.layers_per_stage=auto",
        _SENT_IN_BFLOAT16,
        compute="float8",
        published=1297,
        source="Megatron-Bridge",
    ),
)


def _scaled(name: str, config: str, num_gpus: int, *overrides: str) -> Job:
    return Job(
        name=f"{name}, {num_gpus:,} H100s",
        config=config,
        target=f"h100:{num_gpus // 8}x8",
        overrides=overrides,
    )


#: Weak scaling, model -> jobs: the number of sequences per GPU is the same for all of them.
SCALING = {
    "LLaMA-3-8B": [
        _scaled(
            "LLaMA-3-8B",
            "llama.py:3-8b",
            count,
            f"mesh.data={count}",
            f"data.global_batch_size={count}",
            *_ZERO3,
        )
        for count in (8, 64, 512, 4096)
    ],
    "LLaMA-3-70B": [
        _scaled(
            "LLaMA-3-70B",
            "llama.py:3-70b",
            count,
            "mesh.pipeline=4",
            f"mesh.data={count // 16}",
            "mesh.model=4",
            f"data.global_batch_size={count}",
            *_PIPELINE_70B,
        )
        for count in (64, 512, 4096)
    ],
}


def _in_host_memory(name: str, gpu_gb: int, *overrides: str) -> Job:
    """Return a GPT job on one GPU, with the state of its blocks in host memory."""
    budget = 0.9 * gpu_gb * 1e9 / 2**30
    return Job(
        name=name,
        config="gpt2.py:xl",
        target="a100:1x1",
        overrides=(
            *overrides,
            "data.sequence_length=1024",
            "data.global_batch_size=16",
            "train.num_microbatches=1",
            "train.remat=full",
            "memory.placement=host",
            "memory.offload_parameters_fraction=1.0",
            f"memory.device_budget={budget:.2f}",
            "memory.host_budget=1024",
        ),
        published=gpu_gb,
        source="Colossal-AI",
    )


_WIDE = ("model.embed_dim=6144", "model.num_heads=48")
#: Models that others have trained on one GPU with host memory; `published` is its memory in GB.
HOST_MEMORY = (
    _in_host_memory("GPT, 1.5 B parameters", 6),
    _in_host_memory("GPT, 18 B parameters", 24, *_WIDE, "model.num_layers=40"),
    _in_host_memory("GPT, 24 B parameters", 32, *_WIDE, "model.num_layers=53"),
)

#: Name in the results -> jobs.
GROUPS = {
    "jobs": JOBS,
    "experts": EXPERTS,
    "scaling": [job for jobs in SCALING.values() for job in jobs],
    "host_memory": HOST_MEMORY,
}
