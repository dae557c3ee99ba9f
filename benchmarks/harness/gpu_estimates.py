"""Compares estimated memory with the memory that XLA plans for GPUs: the cases and their tables.

The cases are every shipped config on a dozen meshes, and published sizes on the GPUs that they are
meant for, all in bfloat16. No GPU is needed: steps are compiled for a description of one.
"""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import docs_page
from predict.machines.targets import parse_target
from predict.program.memory import memory
from train.compile import run_for
from train.config.config_files import load
from train.config.schema import validate_config
from train.run.run import Run

CONFIGS = Path(__file__).parents[2] / "configs"
GPUS_PER_HOST = 8

#: Models with fewer bytes of parameters are small: single buffers are a large part of their step.
SMALL_MODEL_BYTES = 10_000_000
#: Allowed range of estimated ÷ compiled bytes, for large and for small models.
BOUNDS = (0.97, 1.10)
SMALL_BOUNDS = (0.9, 1.2)

_HALVES = ("mesh.data=2",)
#: Mesh name -> overrides. Mesh axes that are not named have size 1.
MESHES = {
    "one GPU": (),
    "data=2": _HALVES,
    "fsdp=2": ("mesh.fsdp=2",),
    "model=2": ("mesh.model=2",),
    "pipeline=2": ("mesh.pipeline=2",),
    "2×2×2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
    "ZeRO 1": (*_HALVES, "memory.zero_stage=1"),
    "ZeRO 2": (*_HALVES, "memory.zero_stage=2"),
    "ZeRO 3": (*_HALVES, "memory.zero_stage=3"),
    "zero bubble": ("mesh.pipeline=2", "pipeline.schedule=zero_bubble"),
    "zbv": ("mesh.pipeline=2", "pipeline.schedule=zbv", "pipeline.chunks=2"),
    "host": ("memory.placement=host",),
}

#: Configs that start from a checkpoint -> the config that such a checkpoint is trained with.
_STARTS_FROM = {"bert_classify": "bert.py", "opt_finetune": "opt.py"}
_WITHOUT_CHECKPOINT = {
    "bert_classify": (
        "data.tokenizer=bpe",
        "data.paths=texts/*.txt",
        "data.sequence_length=128",
    ),
    "opt_finetune": ("data.tokenizer=bpe", "data.sequence_length=512"),
}
_DOTS = "train.remat=stage,dots"
_TEXT_AT_SCALE = ("train.remat=stage,full", "memory.zero_stage=1")
_EIGHT = (
    "mesh.data=8",
    "memory.zero_stage=3",
    "train.remat=stage,full",
    "data.global_batch_size=128",
)
_IMAGES = ("mesh.data=8", "data.global_batch_size=1024")
#: Name -> config and overrides.
PUBLISHED = {
    "GPT-2 XL, 1 GPU": (
        "gpt2.py:xl",
        "train.remat=stage,full",
        "data.global_batch_size=64",
    ),
    "LLaMA-3.2-3B, ZeRO 3, data=8": ("llama.py:3.2-3b", *_EIGHT),
    "LLaMA-3-8B, ZeRO 3, data=8": ("llama.py:3-8b", *_EIGHT),
    "LLaMA-3-8B, fsdp=8": (
        "llama.py:3-8b",
        "mesh.fsdp=8",
        "train.remat=stage,full",
        "data.global_batch_size=128",
    ),
    "LLaMA-3-8B, pipeline=4, data=2": (
        "llama.py:3-8b",
        "mesh.pipeline=4",
        "mesh.data=2",
        "data.global_batch_size=32",
        *_TEXT_AT_SCALE,
    ),
    "LLaMA-3-70B, pipeline=4, data=2, model=8": (
        "llama.py:3-70b",
        "mesh.pipeline=4",
        "mesh.data=2",
        "mesh.model=8",
        "data.global_batch_size=64",
        "train.num_microbatches=32",
        *_TEXT_AT_SCALE,
    ),
    "GPT-3 175B, pipeline=8, data=16, model=8": (
        "gpt2.py:175b",
        "mesh.pipeline=8",
        "mesh.data=16",
        "mesh.model=8",
        "data.global_batch_size=1536",
        "train.num_microbatches=96",
        *_TEXT_AT_SCALE,
    ),
    "LLaMA-2-7B, 2.5d, model=8": (
        "llama.py:2-7b",
        "mesh.model=8",
        "tensor.mode=2.5d",
        "tensor.depth=2",
        _DOTS,
        "data.global_batch_size=8",
        "train.num_microbatches=1",
    ),
    "LLaMA-2-7B, 3d, model=8": (
        "llama.py:2-7b",
        "mesh.model=8",
        "tensor.mode=3d",
        _DOTS,
        "data.global_batch_size=8",
        "train.num_microbatches=1",
    ),
    "Ministral-8B, ZeRO 3, data=8": (
        "llama.py:mistral-7b",
        *_EIGHT,
        "model.num_layers=36",
        "model.mlp_dim=12288",
        "model.rope_theta=1e8",
        "model.sliding_window=32768",
        "data.vocab_size=131072",
    ),
    "CamemBERT base, data=8": ("roberta.py:base", _DOTS, "data.vocab_size=32005", "mesh.data=8"),
    "DistilBERT, data=8": (
        "bert.py:base",
        _DOTS,
        "data.objective=masked_lm",
        "model.head=masked_lm",
        "model.num_layers=6",
        "model.num_token_types=0",
        "mesh.data=8",
    ),
    "XLM-R base, data=8": ("roberta.py:base", _DOTS, "data.vocab_size=250002", "mesh.data=8"),
    "ELECTRA small, data=8": (
        "bert.py:base",
        _DOTS,
        "data.objective=masked_lm",
        "model.head=masked_lm",
        "model.num_heads=4",
        "model.embed_dim=256",
        "model.mlp_dim=1024",
        "model.token_embed_dim=128",
        "mesh.data=8",
    ),
    "ModernBERT large, data=8": ("bert.py:modernbert-large", _DOTS, "mesh.data=8"),
    "CLIP ViT-B/32, data=8": ("clip.py:clip_base32", "mesh.data=8", "data.global_batch_size=4096"),
    "CLIP ViT-B/16, data=8": ("clip.py:clip_base16", "mesh.data=8", "data.global_batch_size=4096"),
    "SigLIP ViT-B/16, data=8": (
        "clip.py:siglip_base16",
        "mesh.data=8",
        "data.global_batch_size=4096",
    ),
    "DeiT-B/16 distilled, data=8": ("vit.py:base16", *_IMAGES, "model.distillation=classifier"),
    "ViT-B/16, data=8": ("vit.py:base16", *_IMAGES),
    "Swin-T, data=8": ("swin.py:tiny1", *_IMAGES),
}

#: Not configs, or configs that train the model of gpt2.py with other data or on other meshes.
_NOT_MODELS = ("__init__", "common", "chat", "chat_finetune", "dpo", "gpt2_tensor")
#: Configs of small models whose estimates are not close enough yet; docs/experts.md says how far
#: they are. tests/gpu/test_experts.py compares larger sizes.
_NOT_CLOSE = ("mixtral",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step to estimate and to compile.

    Attributes:
        name: name of the row and, after a comma, the column of a table.
        config: file in configs/, with or without a size.
        overrides: overrides of the config, including `precision.compute=bfloat16`.
    """

    name: str
    config: str
    overrides: tuple[str, ...]

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the mesh."""
        sizes = dict(o.split("=") for o in self.overrides if o.startswith("mesh."))
        return math.prod(map(int, sizes.values()))

    def to_json(self) -> dict[str, Any]:
        """Return the case as the results describe it."""
        return {"config": self.config, "overrides": list(self.overrides), "gpus": self.num_gpus}


def cases() -> list[Case]:
    """Return the cases: first the published sizes, then every config on every mesh."""
    published = [_case(name, *overrides) for name, overrides in PUBLISHED.items()]
    return published + [
        _case(f"{config}, {mesh}", f"{config}.py", *overrides, *_WITHOUT_CHECKPOINT.get(config, ()))
        for config in config_names()
        for mesh, overrides in MESHES.items()
    ]


def config_names() -> list[str]:
    """Return the names of the shipped configs, one for each model."""
    left_out = (*_NOT_MODELS, *_NOT_CLOSE)
    files = sorted(path for path in CONFIGS.glob("*.py") if path.stem not in left_out)
    return [path.stem for path in files if "def get_config" in path.read_text(encoding="utf-8")]


def _case(name: str, config: str, *overrides: str) -> Case:
    # Set every axis, because some configs set sizes of their own.
    axes = {axis: f"mesh.{axis}=1" for axis in ("pipeline", "data", "fsdp", "model")}
    for override in overrides:
        if override.startswith("mesh."):
            axes[override.partition("=")[0].removeprefix("mesh.")] = override
    other_overrides = (o for o in overrides if not o.startswith("mesh."))
    # A later override replaces an earlier one: layers are a loop unless the case says otherwise.
    all_overrides = (
        *axes.values(),
        "train.unroll=False",
        *other_overrides,
        "precision.compute=bfloat16",
    )
    return Case(name=name, config=config, overrides=all_overrides)


def make_run(case: Case, kind: str) -> Run:
    """Return the run of a case for GPUs that are only described.

    Args:
        kind: kind of GPU, such as "h100".

    Returns:
        The run, whose step can be estimated and compiled.

    Raises:
        ValueError: the config does not fit the mesh.
    """
    config = load(str(CONFIGS / case.config), case.overrides)
    name = case.config.removesuffix(".py")
    if name in _STARTS_FROM:
        base = load(str(CONFIGS / _STARTS_FROM[name]), ()).model
        with config.unlocked():
            for field, value in base.items():
                if config.model.get(field) is None:
                    config.model[field] = value
    target = parse_target(f"{kind}:1x{GPUS_PER_HOST}").resized(case.num_gpus)
    return run_for(validate_config(config), target)


def measure(case: Case, kind: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Estimate and compile the step of a case.

    Args:
        kind: kind of GPU, such as "h100".
        known: earlier result for the case; the step is then estimated again, but not compiled.

    Returns:
        A description of the case, the bytes of its parameters, and the bytes per GPU as estimated
        and as compiled. If the config does not fit the mesh, "refused" with the reason replaces
        these figures.
    """
    try:
        run = make_run(case, kind)
        estimated = run.estimate_memory()
    except ValueError as error:
        return case.to_json() | {"refused": str(error)}
    if known is not None:
        compiled = known["compiled"]
        seconds = known["seconds"]
    else:
        start = time.perf_counter()
        compiled = memory(run.compile_train_step()).in_all
        seconds = round(time.perf_counter() - start, 1)
    assert compiled is not None
    return case.to_json() | {
        "model": 4 * run.num_params,
        "estimated": estimated.device_bytes,
        "compiled": compiled,
        "ratio": round(estimated.device_bytes / compiled, 3),
        "seconds": seconds,
    }


def bounds(model: int) -> tuple[float, float]:
    """Return the allowed range of the ratio for a model with `model` bytes of parameters."""
    return SMALL_BOUNDS if model < SMALL_MODEL_BYTES else BOUNDS


def is_within(figures: dict[str, Any]) -> bool:
    """Return whether the ratio of a case is within its bounds."""
    low, high = bounds(figures["model"])
    return low <= figures["ratio"] <= high


def tables(found: dict[str, dict[str, Any]]) -> str:
    """Return Markdown tables of the published sizes and of every config on every mesh."""
    published = [["published size", "GPUs", "estimated, GB", "compiled, GB", "ratio"]]
    for name in PUBLISHED:
        if "ratio" in found.get(name, {}):
            figures = found[name]
            estimated, compiled = (figures[key] / 1e9 for key in ("estimated", "compiled"))
            row = [name, f"{figures['gpus']:,}", f"{estimated:.1f}", f"{compiled:.1f}"]
            published.append([*row, _ratio(figures)])
    ratios = [["ratio", *MESHES]]
    for config in config_names():
        row = [found.get(f"{config}, {mesh}", {}) for mesh in MESHES]
        if any(row):
            ratios.append([config, *map(_ratio, row)])
    return f"{docs_page.markdown(published)}\n\n{docs_page.markdown(ratios)}"


def _ratio(figures: dict[str, Any]) -> str:
    if "ratio" not in figures:
        return "×" if "refused" in figures else ""
    text = f"{figures['ratio']:.2f}"
    return text if is_within(figures) else f"**{text}**"


def out_of_bounds(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of the cases whose ratio is outside its bounds."""
    return [name for name, case in found.items() if "ratio" in case and not is_within(case)]
