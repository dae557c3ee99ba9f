"""Small runs to disturb: how they are started, and the checks of the files they leave behind."""

import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.checksums import CHECKSUMS_FILE, find_damage
from checkpoint.layout import TMP_SUFFIX, steps_in
from sharding.mesh import MeshConfig
from tests.faults.results import compare, load, trajectory
from tests.faults.start import ROOT, Attempt, Broken
from train import goodput
from train.lifecycle.exit_codes import FINISHED
from train.reporting.metrics import METRICS_FILE, read_metrics

#: Simulated mesh; its 8 devices are split evenly between the processes.
MESH = MeshConfig(pipeline=2, data=2, model=2)
NUM_STEPS = 100
SAVE_EVERY_STEPS = 10
OVERRIDES = (
    "data.name=text",
    "data.tokenizer=bytes",
    "data.sequence_length=16",
    "data.global_batch_size=16",
    "data.validation_fraction=0.2",
    "mesh.pipeline=2",
    "mesh.data=2",
    "mesh.model=2",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.embed_dim=32",
    "model.dropout=0.1",
    "train.num_microbatches=2",
    "optimizer.warmup_steps=5",
    "optimizer.learning_rate=0.01",
    "log.every_steps=1",
    "eval.every_steps=15",
    f"checkpoint.every_steps={SAVE_EVERY_STEPS}",
)
#: `train.failure_timeout_s` of runs with two processes.
FAILURE_TIMEOUT_S = 10
#: `checkpoint.timeout_s` of the same runs. On two cores, their processes may begin to restore this
#: far apart.
SAVE_TIMEOUT_S = 30
#: The launcher's time between SIGTERM and SIGKILL.
GRACE_S = 10

CHECKPOINT_DIRECTORY = "checkpoints"

CLOCK_SEED = "TAIBAI_FAULTS_CLOCK_SEED"
#: A sitecustomize.py, which Python runs at its start. It replaces time.time by a clock that runs at
#: the right speed, but on one call in ten jumps to a random offset of up to 28 hours either way.
_JUMPING_CLOCK = f"""
import os, random, time

_random = random.Random(int(os.environ["{CLOCK_SEED}"]))
_time, _offset_s = time.time, [0.0]


def _jumping():
    if _random.random() < 0.1:
        _offset_s[0] = _random.uniform(-1e5, 1e5)
    return _time() + _offset_s[0]


time.time = _jumping
time.time_ns = lambda: int(_jumping() * 1e9)
"""


def prepare(scratch: Path, overrides: Sequence[str] = OVERRIDES, num_steps: int = NUM_STEPS):
    """Write the corpus and the jumping clock, and return the setting of runs with one process.

    Args:
        scratch: existing directory for all files of the campaign.
        overrides: overrides of configs/gpt2.py.
        num_steps: number of steps of a run.

    Returns:
        The setting.
    """
    text = Path(json.__file__).with_name("decoder.py").read_text()
    (scratch / "corpus").mkdir()
    for i in range(10):
        part = text[i * 1000 : (i + 1) * 1000]
        (scratch / "corpus" / f"part_{i}.txt").write_text(part)
    setting = Setting(scratch=scratch, overrides=tuple(overrides), num_steps=num_steps)
    setting.clock.mkdir()
    (setting.clock / "sitecustomize.py").write_text(_JUMPING_CLOCK)
    return setting


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that all runs of a campaign share."""

    scratch: Path  # directory for all files
    overrides: tuple[str, ...]  # overrides of configs/gpt2.py
    num_steps: int
    num_processes: int = 1

    def command(self, workdir: Path, *more: str) -> list[str]:
        """Return the command of a run; `more` are additional overrides."""
        python = [sys.executable] if self.num_processes == 1 else ["python"]
        config = ROOT / "configs" / "gpt2.py"
        train = [*python, "-m", "train.main", f"--config={config}", f"--workdir={workdir}"]
        overrides = (
            *self.overrides,
            f"data.paths={self.scratch}/corpus/*.txt",
            f"data.cache_dir={self.cache}",
            f"train.num_steps={self.num_steps}",
            *more,
        )
        train += [f"--config.{override}" for override in overrides]
        if self.num_processes == 1:
            return train
        per_process = MESH.num_devices // self.num_processes
        return [
            sys.executable,
            "-m",
            "launch.local",
            f"--processes={self.num_processes}",
            f"--devices_per_process={per_process}",
            f"--grace_s={GRACE_S}",
            "--",
            *train,
            f"--config.train.failure_timeout_s={FAILURE_TIMEOUT_S}",
            f"--config.checkpoint.timeout_s={SAVE_TIMEOUT_S}",
        ]

    @property
    def cache(self) -> Path:
        return self.scratch / "cache"

    @property
    def clock(self) -> Path:
        """Directory of the sitecustomize.py that makes the clock jump."""
        return self.scratch / "clock"

    @property
    def read_errors(self) -> Path:
        """Library that makes reads of checkpoints fail."""
        return self.scratch / "read_errors.so"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The undisturbed run.

    Attributes:
        trajectory: step -> everything that was logged for it, except times.
        digests: step -> digest of its checkpoint. Disturbed runs add the steps at which a signal
            made them save; later checkpoints of the same step must have the same digest.
        start_s: seconds from the start to the first step, with a warm compilation cache.
        save_s: seconds that a save takes, including the writing of files.
    """

    trajectory: Mapping[int, tuple]
    digests: dict[int, str]
    start_s: float
    save_s: float


class DisturbedRun:
    """A run that is restarted after each fault.

    Args:
        setting: setting of the campaign.
        reference: undisturbed run.
        directory: existing directory for the run's working directory.
    """

    def __init__(self, setting: Setting, reference: Reference, directory: Path):
        self.setting = setting
        self.reference = reference
        self.directory = directory
        self.workdir = directory / "run"
        self.checkpoints = self.workdir / CHECKPOINT_DIRECTORY
        self.num_starts = 0
        self.last: Attempt | None = None
        #: Steps of the checkpoints that were damaged on purpose and still exist.
        self.damaged: set[int] = set()
        # The last one, until a start after `_damaged_after` has logged that it skips it.
        self._must_be_named: Path | None = None
        self._damaged_after: Attempt | None = None
        logs = setting.scratch / "logs"
        logs.mkdir(exist_ok=True)
        self._log_prefix = logs / directory.name

    def start(
        self,
        env: Mapping[str, str] | None = None,
        *overrides: str,
        output: int | None = None,
    ) -> Attempt:
        """Start the run; it resumes from its newest intact checkpoint.

        Args:
            env: additional environment variables.
            overrides: additional overrides of the config.
            output: file descriptor for standard output and standard error, instead of a log file.

        Returns:
            The start.
        """
        self.num_starts += 1
        log = self._log_prefix.with_name(f"{self._log_prefix.name}_{self.num_starts:02d}.log")
        command = self.setting.command(self.workdir, *overrides)
        env = _environment() | dict(env or {})
        self.last = Attempt(command, env, self.workdir, log, output=output)
        return self.last

    def finish(self) -> None:
        """Start the run and wait until it finishes.

        Raises:
            Broken: it exits with an error, or hangs.
        """
        start = self.start()
        code = start.end()
        if code != FINISHED:
            raise Broken(f"without a fault, it exited with code {code}:\n{start.tail()}")

    def last_logged(self) -> int:
        """Return the newest step whose loss was logged, or 0."""
        entries = read_metrics(self.workdir / METRICS_FILE)
        return max((entry["step"] for entry in entries if "loss" in entry), default=0)

    def stalls_s(self) -> list[float]:
        """Return, for each start that was killed, the mean time for which a save blocked training.

        A save blocks training until its arrays are copied and the previous save is written.
        """
        found = []
        for start in goodput.summarize(self.workdir).starts:
            # The goodput file was written when the last step was logged, before its save.
            saved_by = start.last_step - 1
            num_saves = saved_by // SAVE_EVERY_STEPS - start.first_step // SAVE_EVERY_STEPS
            if start.ended is None and num_saves > 0:
                found.append(start.seconds["save"] / num_saves)
        return found

    def damage(self, step: int, how: Callable[[Path, random.Random], None], rng: random.Random):
        """Damage a random file of a checkpoint; the next start must report that it skips it.

        Args:
            step: step of the checkpoint.
            how: function that damages a file.
            rng: source of all random choices.

        Raises:
            Broken: verification does not find the damage.
        """
        path = self.checkpoints / str(step)
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
        file = rng.choice([file for file in files if file.parent != path or _is_list(file)])
        how(file, rng)
        if find_damage(path) is not None:
            self.damaged.add(step)
            self._must_be_named = path
            self._damaged_after = self.last
        elif not _is_list(file):
            raise Broken(f"{how.__name__}: verification does not find the damage of {file}")

    def check_after_fault(self) -> None:
        """Check the checkpoints and the log that a start left behind.

        Raises:
            Broken: a checkpoint is damaged by a fault that must not damage it, does not load, or
                differs from the undisturbed run's; or a start did not report damage.
        """
        assert self.last is not None
        is_newer = self.last is not self._damaged_after and self.last.first_step_s is not None
        if self._must_be_named is not None and is_newer:
            line = f"Skipping checkpoint {self._must_be_named}: "
            if self.last.has_log and line not in self.last.log:
                raise Broken(
                    f"{self._must_be_named} is damaged, but the next start does not report it"
                )
            self._must_be_named = None
        steps = steps_in(self.checkpoints)
        self.damaged &= set(steps)
        for step in steps:
            path = self.checkpoints / str(step)
            damage = find_damage(path)
            if damage is None:
                self.damaged.discard(step)
                digest = load(path, self.setting.scratch / "loads")
                # A signal makes a run save at a step at which the undisturbed run does not. The
                # first such checkpoint becomes the reference for the others.
                if digest != self.reference.digests.setdefault(step, digest):
                    raise Broken(f"{path} differs from the undisturbed run's checkpoint")
            elif step not in self.damaged:
                raise Broken(f"{path} is damaged, but no fault damaged it on purpose: {damage}")

    def check_end(self) -> None:
        """Check a run that has finished.

        Raises:
            Broken: it differs from the undisturbed run, or left half-written files or damaged
                checkpoints behind.
        """
        self.check_after_fault()
        compare(trajectory(self.workdir), self.reference.trajectory)
        steps = steps_in(self.checkpoints)
        if steps[-1] != self.setting.num_steps:
            raise Broken(f"the newest checkpoint is of step {steps[-1]}, not of the last step")
        # A file such as goodput/.0003.json.tmp may stay: readers of that directory ignore it.
        paths = [*self.checkpoints.iterdir(), *self.workdir.iterdir()]
        left = [path.name for path in paths if TMP_SUFFIX in path.name or path.suffix == ".new"]
        if left:
            raise Broken(f"the run left half-written files behind: {', '.join(left[:5])}")
        if self.damaged:
            raise Broken(f"the run left damaged checkpoints behind: steps {sorted(self.damaged)}")
        goodput.summarize(self.workdir)


def _is_list(file: Path) -> bool:
    return file.name == CHECKSUMS_FILE


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAIBAI_")}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
