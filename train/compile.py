"""Compiles a training step for GPUs that you do not have, and predicts its time.

    python -m train.compile --config=configs/llama.py:3-8b --target=h100:1x8 --config.mesh.fsdp=8

You need neither GPUs nor data: XLA compiles for a description of a GPU, and the vocabulary size
comes from the config. Memory and collectives in the report are read from the compiled program;
times are predictions. docs/before_you_rent.md explains the output.
"""

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from convert.options import DEFAULTS, ReadOptions, add_permissions, read_options
from data.text.text_corpus import load_fixed_tokenizer
from fields.paths import local_path
from predict.machines.datasheets import machine_of
from predict.machines.targets import TARGETS, Target, parse_target
from predict.time.picture import draw
from predict.time.trace import write_trace
from sharding.compiler_options import describe_options
from sharding.memory import AUTO
from train.config import config_files
from train.config.inherit_config import take_init_from
from train.config.overrides import Overrides
from train.config.schema import RunConfig, validate_config
from train.lifecycle.exit_codes import FINISHED
from train.planning.compiled_step import CompiledStep, compile_and_predict
from train.planning.memory.budget import target_budget
from train.planning.memory.fitter import MemoryFitter
from train.run.assemble import assemble_run
from train.run.run import Run
from untrusted.commands import command_parser, refuses_bad_input, run_command
from untrusted.files import write_text

#: Number of labels to assume if only the data determines it: `data.name` of images -> labels.
_IMAGE_LABELS = {"digits": 10}
_OTHER_IMAGE_LABELS = 1000  # as in ImageNet
_TEXT_LABELS = 2
#: Values of `data.name` that read `data.paths`.
_READ_FROM_PATHS = ("text", "megatron", "image_folder")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code, see train/lifecycle/exit_codes.py."""
    parser = target_parser(
        "train.compile", "Compiles a training step for GPUs you do not have, and predicts its time."
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also print the compiler's options, with reasons"
    )
    parser.add_argument(
        "--expert_load",
        type=float,
        help="also predict a step whose most chosen experts have so many times the mean of tokens",
    )
    parser.add_argument(
        "--out", type=local_path, help="directory for HLO, report, trace and picture"
    )
    args, others = parser.parse_known_args(argv)
    logging.basicConfig(format="%(message)s", force=True)

    def report() -> str:
        overrides = Overrides.parse(others)
        target = parse_target(args.target, args.network)
        options = read_options(args)
        load = args.expert_load
        step = compile_step(args.config, target, overrides, options, expert_load=load)
        if args.out is not None:
            write_files(step, args.out)
        if args.json:
            return json.dumps(step.to_json())
        text = step.to_text()
        described = describe_options(step.run.compiler_options()) if args.verbose else ""
        return f"{text}\n{described}" if described else text

    return print_or_refuse(report)


def target_parser(
    module: str, description: str, *, required: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all commands that compile for absent GPUs."""
    parser = command_parser(module, description=description)
    parser.add_argument(
        "--config", required=required, help="file.py, file.py:argument or config.yaml"
    )
    parser.add_argument(
        "--target",
        required=required,
        help=f"KIND:HOSTSxGPUS, such as h100:8x8; KIND is {', '.join(TARGETS)}, or a file",
    )
    parser.add_argument(
        "--network", type=float, help="Gbit/s per GPU between hosts, if not as in NVIDIA's DGX"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    add_permissions(parser)
    return parser


@refuses_bad_input(with_hint=True)
def print_or_refuse(report: Callable[[], str], *, needs_devices: bool = False) -> int:
    """Print a report, or the error of invalid input in one sentence; return the exit code.

    Args:
        needs_devices: whether it runs programs on the devices of this machine.
    """
    if not needs_devices:
        # Compiling needs no device, and a CUDA plugin without a driver would fail to find one.
        jax.config.update("jax_platforms", "cpu")
    # jax could store a program for absent GPUs, but not load it again.
    jax.config.update("jax_enable_compilation_cache", False)
    print(report())
    return FINISHED


def compile_step(
    path: str,
    target: Target,
    overrides: Overrides | Sequence[str],
    options: ReadOptions = DEFAULTS,
    *,
    expert_load: float | None = None,
) -> CompiledStep:
    """Compile the training step of a config.

    Args:
        path: config file, as for `--config`.
        overrides: parsed, or strings `section.key=value`.
        expert_load: load of experts to predict in addition to an even one; see
            predict/time/prediction.py.

    Raises:
        ValueError: the config, the mesh, the target or the load is not valid.
        OSError: a file is missing.
    """
    config = validate_config(load_config(path, overrides, options))
    run = run_for(config, target)
    if expert_load is not None:
        _check_expert_load(expert_load, run.model)
    step = compile_run(run, sizes_without_data(config).assumed, expert_load=expert_load)
    compiled = step.memory.in_all
    if step.fits or compiled is None:
        return step
    remedies = _fitter(run.config, target).remedies(run, compiled)
    return dataclasses.replace(step, remedies=remedies)


def _check_expert_load(load: float, model: Any) -> None:
    config: Any = getattr(model, "config", None)
    num_experts = getattr(config, "num_experts", None)
    if num_experts is None:
        raise ValueError(
            f"--expert_load={load:g}: {type(model).__name__} has no experts; leave it out"
        )
    largest = num_experts / config.experts_per_token
    limit = "the load if all tokens choose the same experts"
    if config.expert_capacity is not None and config.expert_capacity < largest:
        largest = max(1.0, config.expert_capacity)
        limit = "model.expert_capacity, beyond which tokens are dropped"
    if not 1 <= load <= largest:
        raise ValueError(
            f"--expert_load={load:g} must be from 1, an even load, to {largest:g}, {limit}"
        )


def load_config(
    path: str, overrides: Overrides | Sequence[str], options: ReadOptions = DEFAULTS
) -> Any:
    """Return the ConfigDict of a run whose data is not read; arguments as for `compile_step`."""
    overrides = Overrides.of(overrides)
    config_dict: Any = config_files.load(path, overrides, allow_import=options.allow_import)
    take_init_from(config_dict, overrides, options)
    if config_dict.data.name in _READ_FROM_PATHS and not config_dict.data.paths:
        config_dict.data.paths = ("not_read",)  # required by the config, but no data is read here
    return config_dict


def run_for(config: RunConfig, target: Target) -> Run:
    """Build the run of a config for target GPUs, without reading its data.

    Raises:
        ValueError: the mesh does not match the target's number of GPUs, or the config is not
            consistent.
    """
    jax.config.update("jax_enable_x64", config.precision.compute == "float64")
    mesh_config = config.mesh.filled_in(target.num_devices)
    if mesh_config.num_devices != target.num_devices:
        raise ValueError(
            f"mesh {mesh_config} has {mesh_config.num_devices} devices, but --target={target.name} "
            f"has {target.num_devices}; make them equal, for example with mesh.data=-1"
        )
    config = dataclasses.replace(config, mesh=mesh_config)
    if config.memory.placement == AUTO:
        return _fitter(config, target).search(config)
    return _assembler(config, target)(config)


def _assembler(config: RunConfig, target: Target) -> Callable[[RunConfig], Run]:
    """Return a function that builds the runs of a config with other settings for target GPUs.

    Args:
        config: config whose mesh has the target's GPUs.
    """
    sizes = sizes_without_data(config)
    return partial(
        assemble_run,
        mesh=config.make_mesh(target.devices()),
        vocab_size=sizes.vocab_size,
        num_labels=sizes.num_labels,
        target=target,
        device_budget=target_budget(config.memory, target).device_bytes,
    )


def _fitter(config: RunConfig, target: Target) -> MemoryFitter:
    return MemoryFitter(_assembler(config, target), target_budget(config.memory, target))


def compile_run(
    run: Run, assumed: tuple[str, ...] = (), *, expert_load: float | None = None
) -> CompiledStep:
    """Compile and analyze the training step of a run that has a target.

    Args:
        assumed: assumptions about values that the data would determine, as text.
        expert_load: as for `compile_step`.
    """
    assert run.target is not None
    budget = target_budget(run.config.memory, run.target)
    return compile_and_predict(
        run,
        run.target.name,
        machine_of(run.target),
        budget,
        assumed=assumed,
        expert_load=expert_load,
    )


def write_files(step: CompiledStep, directory: Path) -> None:
    """Write the HLO, the JSON report, a trace for Perfetto and a picture into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "step.hlo.txt", step.compiled.as_text() or "")
    write_text(directory / "report.json", json.dumps(step.to_json(), indent=2) + "\n")
    write_trace(step.prediction, directory / "trace.json")
    model = f"{type(step.run.model).__name__}, {step.run.num_params:,} parameters"
    title = f"{model}, {step.devices}"
    write_text(directory / "step.svg", draw(step.prediction, title))


class DataSizes(NamedTuple):
    """Sizes of a model that the data determines; None for sizes that the model does not have."""

    vocab_size: int | None
    num_labels: int | None
    assumed: tuple[str, ...]  # values that neither the config nor a tokenizer file states, as text


def sizes_without_data(config: RunConfig) -> DataSizes:
    """Return the sizes that a config's data would determine, with assumptions if necessary."""
    fields = {field.name for field in dataclasses.fields(config.model_class.Config)}
    vocab_size = None
    num_labels = None
    assumed = []
    if config.data.reads_text:
        vocab_size = config.model_fields.get("vocab_size")
        if vocab_size is None:
            tokenizer = load_fixed_tokenizer(config.data)
            vocab_size = config.data.vocab_size if tokenizer is None else tokenizer.vocab_size
            assumed.append(f"{vocab_size:,} tokens of data.tokenizer={config.data.tokenizer!r}")
    if "num_labels" in fields and config.model_fields.get("num_labels") is None:
        num_labels = _TEXT_LABELS
        if config.data.reads_images:
            num_labels = _IMAGE_LABELS.get(config.data.name, _OTHER_IMAGE_LABELS)
        assumed.append(f"{num_labels:,} labels; set --config.model.num_labels=N to change this")
    return DataSizes(vocab_size, num_labels, tuple(assumed))


if __name__ == "__main__":
    run_command(main)
