"""Builds a run from the command line: the config, the devices, the data, and the run itself."""

import dataclasses
import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import jax

from checkpoint.paths import check_path
from convert.options import ReadOptions
from convert.source import Source
from convert.to_hf import export_problem
from data.batches import epoch_elements
from data.corpus import expected_vocab_size, load_corpus
from data.examples import Corpus
from distributed import startup
from distributed.compilation_cache import use_compilation_cache
from distributed.launchers import read_distributed_env
from distributed.messages import LONGEST_START_S, Exchange
from predict.machines.targets import Target, target_of
from sharding.memory import AUTO
from sharding.mesh import num_replicas
from train.config import config_files, deepspeed
from train.config.inherit_config import take_init_from
from train.config.overrides import Overrides
from train.config.remat import AUTO_REMAT
from train.config.repositories import (
    may_name_repositories,
    pin_repositories,
    store_pinned,
)
from train.config.run_length import choose_length, with_num_steps
from train.config.schema import RunConfig, checked_value, validate_config
from train.lifecycle import workdir
from train.lifecycle.callbacks import import_callbacks
from train.lifecycle.store_workdir import StoreWorkdir
from train.lifecycle.validation_data import load_data_to_evaluate
from train.lifecycle.watchdog import jax_heartbeat_timeout_s
from train.planning.auto_plan import plan_config
from train.planning.memory.budget import Budget, budget_of
from train.planning.memory.fitter import MemoryFitter
from train.planning.parallel_plan import open_config
from train.planning.plan_devices import PlanDevices, described_devices, present_devices
from train.reporting.trackers import find_trackers
from train.run.assemble import assemble_run
from train.run.compatibility import check_tokenizer
from train.run.run import Run
from train.run.summary import describe
from train.samples import check_prompts

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command line of `train.main`.

    Attributes:
        config: config file, as given to `--config`.
        workdir: directory of the run's files.
        deepspeed: path of a DeepSpeed JSON, or None.
        is_evaluation: whether `--mode=eval` is given.
        is_fast_dev_run: whether `--fast_dev_run` is given: 3 steps, in a temporary `workdir`.
        is_check: whether `--check` is given: no step, and no file in `workdir`.
        is_verbose: whether `--verbose` is given.
        store: object store of which `workdir` is a copy, or None.
        reading: what `config.yaml` and the `init_from` checkpoint may do.
    """

    config: str
    overrides: Overrides
    workdir: Path
    deepspeed: str | None = None
    is_evaluation: bool = False
    is_fast_dev_run: bool = False
    is_check: bool = False
    is_verbose: bool = False
    reading: ReadOptions = ReadOptions()
    store: StoreWorkdir | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltRun:
    """A run with its data. Its state is not computed yet.

    The training step is traced already, except in an evaluation. With `memory.placement=auto` the
    steps are compiled too.

    Attributes:
        run: model, mesh, layout of the state, and steps.
        corpus: training and validation data.
        source: `init_from` checkpoint, or None.
        planner: checks the memory of the compiled steps, and reports the run's plan.
        options: command line that describes the run.
    """

    run: Run
    corpus: Corpus
    source: Source | None
    planner: MemoryFitter
    options: RunOptions


def build_run(options: RunOptions) -> BuiltRun:
    """Build the run that a command line describes, and print its summary.

    Raises:
        ValueError: the config, the mesh, the model or the data are wrong or incompatible, or no
            checkpoint can be stored in the workdir.
        OSError: a file cannot be read.
    """
    check_path(options.workdir)
    loaded = _load_config(options)
    source = loaded.source
    fixed = loaded.overrides.keys
    mesh = _start_devices(loaded.config, options, fixed)
    config = _complete_config(loaded, mesh)
    if options.is_evaluation and config.memory.placement == AUTO:
        memory = Exchange().on_all(lambda: workdir.planned_memory(options.workdir))
        config = dataclasses.replace(config, memory=memory)
    if options.is_evaluation and config.train.remat == AUTO_REMAT:  # it has no backward pass
        config = config.with_values({"train.remat": "none"})

    # Whatever the config alone decides is refused here, before data is downloaded or tokenized.
    if not options.is_evaluation:
        Exchange(LONGEST_START_S).on_first(lambda: _check_observers(config, options.workdir))
    sizes = Exchange(LONGEST_START_S).on_all(lambda: _expected_sizes(config))
    run, planner = _assemble(config, fixed, mesh, sizes, options)

    corpus = Exchange(LONGEST_START_S).on_all(lambda: _load_data(config, source, options))
    # The base of an adapter is named by the adapter, not by the config.
    base = "" if source is None else source.init_from
    workdir.check_processes_agree("config", f"{workdir.full_config(run)!r} {base}")
    workdir.check_processes_agree("data", f"{corpus.fingerprint} {corpus.contents}")
    if options.is_evaluation and not corpus.validation_sets:
        raise ValueError(f"--mode=eval: data.name={config.data.name!r} has no validation data")
    if config.train.early_stopping is not None and not corpus.validation_sets:
        raise ValueError(
            f"train.early_stopping={config.train.early_stopping} needs evaluations, but data.name="
            f"{config.data.name!r} has no validation data; set data.validation_paths, or remove it"
        )
    sizes = _DataSizes(vocab_size=corpus.vocab_size, num_labels=len(corpus.labels) or None)
    if len(corpus.train):
        config = with_num_steps(config, epoch_elements(corpus, config.data, config.images))
    has_other_sizes = run.config.model_config(**dataclasses.asdict(sizes)) != run.model_config
    if has_other_sizes or run.config.train.num_steps != config.train.num_steps:
        run, planner = _assemble(config, fixed, mesh, sizes, options)
    check_tokenizer(run.config, run.model_config, corpus)
    if not options.is_evaluation:
        check_prompts(run, corpus)
    Exchange(LONGEST_START_S).on_all(lambda: workdir.check(options.workdir, run))
    _log.info("%s", "\n".join([describe(run, corpus), planner.report]).strip())
    if jax.process_index() == 0 and not options.is_evaluation:
        _warn(run, source, options)
    return BuiltRun(run=run, corpus=corpus, source=source, planner=planner, options=options)


def _warn(run: Run, source: Source | None, options: RunOptions) -> None:
    """Log problems that do not keep a run from training."""
    problem = export_problem(run.config.model.name, run.model_config, source)
    if problem is not None:
        _log.warning("python -m convert.to_hf will not be able to export this run: %s", problem)
    if not options.is_fast_dev_run:  # it is shorter than any warmup
        for warning in run.config.optimizer.length_warnings(run.config.train.num_steps):
            _log.warning("%s", warning)


def _check_observers(config: RunConfig, directory: Path) -> None:
    """Import the callbacks and trackers, which run on the first process only."""
    import_callbacks(config.train, directory)
    find_trackers(config.log.trackers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DataSizes:
    """The sizes that a model takes from its data.

    Attributes:
        vocab_size: number of tokens of the tokenizer; None if there is no tokenizer.
        num_labels: number of labels; None if the data has no labels.
    """

    vocab_size: int | None
    num_labels: int | None


def _expected_sizes(config: RunConfig) -> _DataSizes:
    """Return the sizes of the data as far as they are known before it is read.

    A `bpe` tokenizer may turn out smaller, and there may be more than two labels. The run is then
    assembled again.
    """
    vocab_size = expected_vocab_size(config.data)
    configured = config.model_fields.get("vocab_size")
    if config.data.tokenizer == "bpe" and vocab_size is not None and isinstance(configured, int):
        vocab_size = min(vocab_size, configured)
    return _DataSizes(vocab_size=vocab_size, num_labels=2 if config.data.has_labels else None)


def _assemble(
    config: RunConfig,
    fixed: Collection[str],
    mesh: jax.sharding.Mesh,
    sizes: _DataSizes,
    options: RunOptions,
) -> tuple[Run, MemoryFitter]:
    """Assemble the run of a config, and trace its training step unless it only evaluates.

    With `mesh.auto` or `memory.placement=auto`, the run has the plan that was chosen for it.

    Args:
        config: run's config, with the sizes that depend on the devices.
        fixed: keys that a plan must not change.
        mesh: mesh of all devices; with `mesh.auto`, the plan divides them.

    Returns:
        The run, and the object that checks the memory of its compiled steps.

    Raises:
        ValueError: the parts of the run are not compatible, or it does not fit into memory.
    """
    budget = budget_of(config.memory, mesh)
    assemble = partial(assemble_run, device_budget=budget.device_bytes, **dataclasses.asdict(sizes))
    if config.mesh.auto:
        devices = _plan_devices(config, mesh, budget, assemble)
        saved = Exchange(LONGEST_START_S).on_all(lambda: workdir.saved_config(options.workdir))
        config = plan_config(config, fixed, devices, saved, timeout_s=LONGEST_START_S)
        mesh = config.make_mesh([*mesh.devices.flat])
    assemble = partial(assemble, mesh=mesh)
    planner = MemoryFitter(assemble, budget)
    if options.is_evaluation:
        run = assemble(config)
    elif config.memory.placement == AUTO:
        run = planner.search(config)  # assembles many runs, and compiles a few of them
    else:
        run = assemble(config)
        run.trace_train_step()
        planner.check_estimate(run)
    run.check_metrics(ranks_checkpoints=not options.is_evaluation)
    return run, planner


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LoadedConfig:
    """The config of a run before its devices are known.

    Attributes:
        source: checkpoint that its `init_from` names, or None.
        overrides: values of the command line and of the DeepSpeed JSON.
        open_batch: batch sizes of the DeepSpeed JSON that depend on the devices, or None.
    """

    config: RunConfig
    source: Source | None
    overrides: Overrides
    open_batch: deepspeed.BatchSizes | None


def _load_config(options: RunOptions) -> _LoadedConfig:
    """Load the config of a run.

    A later source overrides an earlier one: the config file, the DeepSpeed JSON, the command line.
    Then the model's sizes and the tokenizer are taken from the `init_from` checkpoint; a command
    line that contradicts them is an error (see config/inherit_config.py).
    """
    overrides = options.overrides
    config_dict: Any = config_files.load(
        options.config, overrides, allow_import=options.reading.allow_import
    )
    open_batch = None
    if options.deepspeed is not None:
        translated = deepspeed.read(
            options.deepspeed, config_dict, fixed=overrides.command_line_keys
        )
        overrides = overrides.with_deepspeed(translated.values)
        Overrides(deepspeed=overrides.deepspeed).apply(config_dict)
        command_line = overrides.command_line_keys & {"train.num_epochs"}
        choose_length(config_dict, command_line or {o.key for o in overrides.deepspeed})
        open_batch = translated.open_batch
    if options.store is not None:
        _open_store(config_dict, options.store, is_evaluation=options.is_evaluation)
    if options.is_evaluation and not (
        config_dict.get("init_from") or workdir.has_checkpoint(options.workdir)
    ):
        raise ValueError(
            f"--mode=eval: --workdir={options.workdir} has no checkpoint; train first, or set "
            "--config.init_from"
        )
    if options.is_fast_dev_run:
        config_files.shorten(config_dict)
    _pin_repositories(config_dict, options)
    # Before processes have joined each other, each of them is on its own here.
    source = Exchange(LONGEST_START_S).on_all(
        lambda: take_init_from(config_dict, overrides, options.reading)
    )
    return _LoadedConfig(
        config=open_config(config_dict, overrides.keys)
        if config_dict.mesh.auto
        else validate_config(config_dict),
        source=source,
        overrides=overrides,
        open_batch=open_batch,
    )


def _pin_repositories(config_dict: Any, options: RunOptions) -> None:
    """Pin the repositories of the Hugging Face hub that a config names to the same commits.

    The first process asks the hub. Hosts may take very different times to download a checkpoint, so
    processes join each other first.
    """
    if not may_name_repositories(config_dict):
        return
    _join(config_dict)
    exchange = Exchange(LONGEST_START_S)
    pinned = exchange.on_first(
        lambda: pin_repositories(config_dict, workdir.saved_config(options.workdir) or {})
    )
    exchange.on_all(lambda: store_pinned(config_dict, pinned))


def _open_store(config_dict: Any, store: StoreWorkdir, *, is_evaluation: bool) -> None:
    """Lock the workdir in a store, unless the run only evaluates, and download changed files."""
    _join(config_dict)
    if is_evaluation:
        Exchange(LONGEST_START_S).on_all(store.download)
    else:
        store.open(checked_value(config_dict, "train.start_timeout_s"))


def _join(config_dict: Any) -> None:
    """Join the other processes of the run before its config is complete."""
    startup.join(
        start_timeout_s=checked_value(config_dict, "train.start_timeout_s"),
        heartbeat_timeout_s=jax_heartbeat_timeout_s(
            checked_value(config_dict, "train.failure_timeout_s")
        ),
    )


def _complete_config(loaded: _LoadedConfig, mesh: jax.sharding.Mesh) -> RunConfig:
    """Return the config with the sizes that depend on the number of devices.

    With `mesh.auto`, a DeepSpeed JSON's batch size per replica refers to the mesh before it is
    planned: all devices are replicas, except along axes that the command line fixes.
    """
    config = loaded.config
    values: dict[str, Any] = {}
    if not config.mesh.auto:
        sizes = config.mesh.filled_in(mesh.size).sizes
        values = {f"mesh.{axis}": size for axis, size in sizes.items()}
    if loaded.open_batch is not None:
        completed = loaded.open_batch.completed(num_replicas(mesh), config.train.num_microbatches)
        fixed = loaded.overrides.command_line_keys
        values |= {key: value for key, value in completed.items() if key not in fixed}
    return config.with_values(values)


def _load_data(config: RunConfig, source: Source | None, options: RunOptions) -> Corpus:
    if options.is_evaluation:
        return load_data_to_evaluate(config, options.workdir, source, options.reading)
    return load_corpus(config.data, config.images)


def _start_devices(
    config: RunConfig, options: RunOptions, fixed: Collection[str]
) -> jax.sharding.Mesh:
    """Join the processes of the run, and return the mesh of its devices.

    With `mesh.auto`, these are all devices, which a plan divides later.
    """
    process = read_distributed_env(os.environ)
    if not options.is_fast_dev_run and (process is None or process.process_id == 0):
        _log.info("workdir %s", options.store or options.workdir)
    jax.config.update("jax_enable_x64", config.precision.compute == "float64")
    if config.train.compilation_cache:
        use_compilation_cache(_program_cache(config, options))
    sizes = config.mesh
    of_experts = ("expert",) if config.model_fields.get("num_experts") else ()
    planned_axes = ("data", *of_experts, "model", "pipeline")
    open_axes = [axis for axis in planned_axes if f"mesh.{axis}" not in fixed]
    if sizes.auto and open_axes and -1 not in sizes.sizes.values():
        sizes = dataclasses.replace(sizes, **{open_axes[0]: -1})
    mesh = startup.start(
        sizes,
        config.tensor,
        start_timeout_s=config.train.start_timeout_s,
        heartbeat_timeout_s=jax_heartbeat_timeout_s(config.train.failure_timeout_s),
    )
    if jax.process_index() > 0:
        logging.disable(logging.INFO)
    return mesh


def _plan_devices(
    config: RunConfig, mesh: jax.sharding.Mesh, budget: Budget, assemble: Callable[..., Run]
) -> PlanDevices:
    """Return the devices of the run, to plan for.

    Steps for GPUs are compiled for their description, which needs no other process; steps for CPUs
    and for GPUs without a description are compiled for the devices themselves.

    Args:
        mesh: mesh of all devices.
        budget: memory that a step may use.
        assemble: builds the run of a config on a `mesh` and, if they are described, for a `target`.

    Raises:
        ValueError: several processes have GPUs without a description.
    """
    all_devices = [*mesh.devices.flat]
    kind = all_devices[0].device_kind
    target = target_of(kind, len(all_devices), budget.devices_per_host)
    if target is not None:

        def run_for(config: RunConfig, target: Target) -> Run:
            return assemble(config, config.make_mesh(target.devices()), target=target)

        return described_devices(target, budget, run_for)
    if all_devices[0].platform != "cpu" and jax.process_count() > 1:
        raise ValueError(
            f"mesh.auto=True: there is no description of {kind!r}, which "
            "several processes need to plan; choose a mesh with python -m train.plan and a "
            "description of this GPU, or set the section mesh"
        )
    return present_devices(all_devices, budget, config.data.cache_path, assemble)


def _program_cache(config: RunConfig, options: RunOptions) -> Path:
    """Return the directory of compiled programs.

    Compiled programs are code. A config.yaml, which may come with a cache from somebody else, does
    not choose their directory.
    """
    data = config.data
    is_overridden = "data.cache_dir" in options.overrides.command_line_keys
    if config_files.is_data_file(options.config) and not is_overridden:
        data = dataclasses.replace(data, cache_dir="")
    return data.cache_path / "xla"
