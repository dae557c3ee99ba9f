"""Trains from Python, such as in a notebook: `from train import build_run, train`.

    built = build_run("configs/gpt2.py", {"mesh.data": 4}, workdir="runs/gpt2")
    result = train(built)

A process can do this many times, on other meshes of the same devices. Unlike the command, this
installs no signal handlers, never ends the process, and raises errors instead of printing them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from convert.options import ReadOptions
from fields.paths import check_local
from train import build, loop
from train.build import BuiltRun, RunOptions
from train.config.overrides import Overrides
from train.lifecycle.exit_codes import UNSAVED
from train.lifecycle.phases import Phases
from train.preparation import prepare, start_watchdog
from train.reporting.metrics import METRICS_FILE, read_metrics
from train.state.train_state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of `train`.

    Attributes:
        step: number of the last step.
        state: state after that step, on the run's mesh; `state.params` are the parameters.
        history: lines of the run's `metrics.jsonl`, from its first step on. A logged step has the
            keys `step`, `loss` and more; an evaluation has `step`, `eval_loss` and more.
    """

    step: int
    state: TrainState
    history: list[dict[str, Any]]

    def values(self, name: str) -> dict[int, float]:
        """Return step -> value of a metric, for the steps that have it."""
        return {line["step"]: line[name] for line in self.history if line.get(name) is not None}


def build_run(
    config: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    workdir: str | Path,
    **permissions: Any,
) -> BuiltRun:
    """Build a run: read its config and its data, and trace its training step.

    Args:
        config: config file, as `--config` of the command: `configs/llama.py:3-8b` or `config.yaml`.
        overrides: values by key, such as {"train.num_steps": 100}.
        workdir: directory of the run's files. If it has checkpoints, `train` resumes from them.
        permissions: fields of `convert.options.ReadOptions`, such as `allow_import`.

    Raises:
        ValueError: the config, the mesh, the model or the data are wrong or incompatible.
        OSError: a file cannot be read.
    """
    for name, path in (("config", config), ("workdir", workdir)):
        check_local(name, str(path))
    options = RunOptions(
        config=str(config),
        overrides=Overrides.of(overrides or {}),
        workdir=Path(workdir),
        reading=ReadOptions(**permissions),
    )
    with _restoring_settings():
        return build.build_run(options)


def train(built: BuiltRun) -> TrainingResult:
    """Train a run from the newest checkpoint of its workdir, or from the start.

    Interrupting it (`KeyboardInterrupt`) closes all files and releases the workdir. The next call
    resumes from the newest checkpoint.

    Raises:
        ValueError: the compiled step does not fit into memory, or the workdir has no intact
            checkpoint.
        OSError: a file cannot be read or written, or another run uses the workdir.
        Diverged: too many steps in a row were not finite.
        BrokenExample: an example that was intact at the start can no longer be read.
    """
    run = built.run
    workdir = built.options.workdir
    phases = Phases(age_s=0.0)  # the process may have done other things before
    with ExitStack() as stack:
        stack.enter_context(_restoring_settings())
        jax.config.update("jax_enable_x64", run.config.precision.compute == "float64")
        prepared = stack.enter_context(prepare(built, phases))
        if jax.process_count() > 1:
            # It ends a process that waits for a lost one. A notebook is a process of its own.
            watchdog = start_watchdog(run, workdir, prepared.start_id, phases)
            stack.enter_context(closing(watchdog))
        outcome = loop.train(
            run,
            built.corpus,
            prepared.restored,
            workdir,
            prepared.logs,
            saves=True,
            phases=phases,
        )
        if outcome.exit_code == UNSAVED:
            raise OSError(f"the last save failed: {prepared.restored.checkpoints.last_failure}")
    history = read_metrics(workdir / METRICS_FILE)
    return TrainingResult(step=outcome.step, state=outcome.state, history=history)


@contextlib.contextmanager
def _restoring_settings() -> Iterator[None]:
    """Undo changes of jax's precision after the block, and prepare Flax in this thread."""
    nnx.use_eager_sharding(False)  # as in models/layers/basic.py: Flax has a value per thread
    config: Any = jax.config
    before = config.jax_enable_x64
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
