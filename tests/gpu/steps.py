"""Runs of the shipped models for GPUs that are only described, shared by the tests of a process."""

import dataclasses
import functools

import jax

from predict.machines.targets import parse_target
from predict.program.memory import memory
from tests.runs import ROOT
from tests.train.meshes.models_on_meshes import MODELS, SHARED
from train.compile import run_for
from train.config.config_files import load
from train.config.schema import validate_config
from train.run.run import Run

BFLOAT16 = ("precision.compute=bfloat16",)
MESHES = {
    "one device": (),
    "model=2": ("mesh.model=2",),
    "fsdp=2": ("mesh.fsdp=2",),
    "2×2×2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
}
_TEXT = ("data.tokenizer=bytes", "data.sequence_length=32")
_SIZES = ("model.num_heads=4", "model.embed_dim=32", "model.num_layers=4")


@functools.cache
def make_run(
    config: str,
    overrides: tuple[str, ...],
    target: str = "h100",
    *,
    has_machine_code: bool = False,
) -> Run:
    """Return the run of a config, for as many GPUs as its mesh has.

    Args:
        config: name of a file in configs/, with or without `:size`.
        overrides: overrides of the config. Unless one says otherwise, layers are a loop.
        target: kind of GPU.
        has_machine_code: whether the compiled step contains machine code, which takes longer.

    Returns:
        The run, from a cache if it has been made before.
    """
    file, _, size = config.partition(":")
    path = f"{ROOT}/configs/{file}.py" + (f":{size}" if size else "")
    run_config = validate_config(load(path, ("train.unroll=False", *overrides)))
    count = run_config.mesh.num_devices
    chosen = parse_target(f"{target}:{max(1, count // 8)}x{min(8, count)}")
    return run_for(run_config, dataclasses.replace(chosen, has_machine_code=has_machine_code))


def model_run(model: str, *overrides: str, has_machine_code: bool = False) -> Run:
    """Return the run of a model from `models_on_meshes.MODELS`, in bfloat16 and at a tiny size."""
    config, own = MODELS[model]
    is_text = "images" not in " ".join(own) and config not in ("vit", "swin", "resmlp", "mae")
    is_text = is_text and config != "moco"
    sizes = (*_TEXT, *_SIZES) if is_text else ()
    if "data.objective=classification" in own:
        sizes = (*sizes, "data.name=text", "data.paths=labelled.jsonl")
    every = (*SHARED, *sizes, *own, *BFLOAT16, *overrides)
    return make_run(config, every, has_machine_code=has_machine_code)


def text_of(run: Run) -> str:
    """Return the program of the compiled training step as text."""
    text = run.compile_train_step().as_text()
    assert text is not None
    return text


def compiled_bytes(run: Run) -> int:
    """Return the memory of the compiled training step on one device, in bytes."""
    found = memory(run.compile_train_step()).in_all
    assert found is not None
    return found


def forget() -> None:
    """Clear jax's caches of compiled programs, which grow to gigabytes after many of them."""
    jax.clear_caches()
