"""Small runs that are disturbed, what they leave behind, and what they are compared with."""

import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from checkpoint.checksums import CHECKSUMS_FILE, find_damage
from checkpoint.layout import STATE, TMP_SUFFIX, steps_in
from checkpoint.manager import CheckpointConfig, Checkpoints
from sharding.mesh import MeshConfig
from tests.faults.start import ROOT, Attempt, Broken
from train import goodput
from train.lifecycle.exit_codes import FINISHED
from train.reporting.metrics import METRICS_FILE, read_metrics

#: Devices of the simulated mesh, whatever the number of processes.
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
#: Of runs in two processes.
FAILURE_TIMEOUT_S = 10
#: Processes that restore may begin so far apart, on two cores.
SAVE_TIMEOUT_S = 30
GRACE_S = 10

_TIMES = ("step_time_s", "data_wait_s", "tokens_per_s", "images_per_s", "mfu")
CLOCK_SEED = "TAIBAI_FAULTS_CLOCK_SEED"
#: A sitecustomize.py: time.time goes on as it should, but for jumps of hours either way.
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
    """Return the setting of runs in one process; what they read is written into `scratch`."""
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
    """What all runs of a campaign share."""

    scratch: Path  # for all files
    overrides: tuple[str, ...]  # of the config
    num_steps: int
    num_processes: int = 1

    def command(self, workdir: Path, *more: str) -> list[str]:
        """Return the command of a run; `more` are further overrides."""
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
        """Where the sitecustomize.py lies that makes the clock jump."""
        return self.scratch / "clock"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The undisturbed run.

    Attributes:
      trajectory: step -> all that was logged of it but times.
      digests: step -> digest of its checkpoint, and of those that signals add.
      start_s: from the start to the first step, with a warm compilation cache.
      save_s: what a save takes in all.
    """

    trajectory: Mapping[int, tuple]
    digests: dict[int, str]
    start_s: float
    save_s: float


class DisturbedRun:
    """A run that is started again after each fault."""

    def __init__(self, setting: Setting, reference: Reference, directory: Path):
        self.setting = setting
        self.reference = reference
        self.directory = directory
        self.workdir = directory / "run"
        self.checkpoints = self.workdir / "checkpoints"
        self.num_starts = 0
        self.last: Attempt | None = None
        #: Checkpoints that were damaged on purpose.
        self.damaged: set[int] = set()
        # The newest of them, which no start after this one has been seen to find yet.
        self._must_be_named: Path | None = None
        self._damaged_after: Attempt | None = None
        logs = setting.scratch / "logs"
        logs.mkdir(exist_ok=True)
        self._log_prefix = logs / directory.name

    def start(self, env: Mapping[str, str] | None = None, *overrides: str) -> Attempt:
        """Start the run from its newest checkpoint."""
        self.num_starts += 1
        log = self._log_prefix.with_name(f"{self._log_prefix.name}_{self.num_starts:02d}.log")
        command = self.setting.command(self.workdir, *overrides)
        self.last = Attempt(command, _environment() | dict(env or {}), self.workdir, log)
        return self.last

    def finish(self) -> None:
        """Start the run and let it finish."""
        start = self.start()
        code = start.end()
        if code != FINISHED:
            raise Broken(f"undisturbed, it ended with code {code}:\n{start.tail()}")

    def last_logged(self) -> int:
        """Return the newest step whose loss was logged."""
        entries = read_metrics(self.workdir / METRICS_FILE)
        return max((entry["step"] for entry in entries if "loss" in entry), default=0)

    def stalls_s(self) -> list[float]:
        """Return for each start that was killed how long a save kept it from training: the mean.

        That is the time until the arrays are copied, and until the save before is written.
        """
        found = []
        for start in goodput.summarize(self.workdir).starts:
            saved_by = start.last_step - 1  # what was written as a step was logged
            num_saves = saved_by // SAVE_EVERY_STEPS - start.first_step // SAVE_EVERY_STEPS
            if start.ended is None and num_saves > 0:
                found.append(start.seconds["save"] / num_saves)
        return found

    def damage(self, step: int, how: Callable[[Path, random.Random], None], rng: random.Random):
        """Damage a random file of a checkpoint; the next start has to say so.

        Raises:
            Broken: nobody notices.
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
            raise Broken(f"{how.__name__}: nobody notices that {file} was damaged")

    def check_after_fault(self) -> None:
        """Check what a start left behind, and what it said.

        Raises:
            Broken: a checkpoint is damaged, does not load, or is not that of the undisturbed run.
        """
        assert self.last is not None
        is_newer = self.last is not self._damaged_after and self.last.first_step_s is not None
        if self._must_be_named is not None and is_newer:
            if f"Skipping checkpoint {self._must_be_named}: " not in self.last.log:
                raise Broken(
                    f"{self._must_be_named} is damaged, and the next start does not say so"
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
                # What is saved at another step, after a signal, has to equal its like.
                if digest != self.reference.digests.setdefault(step, digest):
                    raise Broken(f"{path} is not what the undisturbed run saved")
            elif step not in self.damaged:
                raise Broken(f"{path} is damaged, and by no fault of ours: {damage}")

    def check_end(self) -> None:
        """Check a run that came to its last step.

        Raises:
            Broken: it differs from the undisturbed one, or left something half-written.
        """
        self.check_after_fault()
        compare(trajectory(self.workdir), self.reference.trajectory)
        steps = steps_in(self.checkpoints)
        if steps[-1] != self.setting.num_steps:
            raise Broken(f"the newest checkpoint is {steps[-1]}, not that of the last step")
        # Not goodput/.0003.json.tmp: whoever reads that directory passes it over.
        paths = [*self.checkpoints.iterdir(), *self.workdir.iterdir()]
        left = [path.name for path in paths if TMP_SUFFIX in path.name or path.suffix == ".new"]
        if left:
            raise Broken(f"half-written files are left: {', '.join(left[:5])}")
        if self.damaged:
            raise Broken(f"the damaged checkpoints {sorted(self.damaged)} are left")
        goodput.summarize(self.workdir)


def _is_list(file: Path) -> bool:
    return file.name == CHECKSUMS_FILE


def trajectory(workdir: Path) -> dict[int, tuple]:
    """Return step -> everything logged for it except times, in order."""
    steps: dict[int, tuple] = {}
    for line in (workdir / METRICS_FILE).read_text().splitlines():
        entry = json.loads(line)
        kept = tuple(sorted(item for item in entry.items() if item[0] not in _TIMES))
        steps[entry["step"]] = (*steps.get(entry["step"], ()), kept)
    return steps


def compare(found: Mapping[int, tuple], expected: Mapping[int, tuple]) -> None:
    """Compare two trajectories.

    Raises:
        Broken: they differ; the first step that does is named.
    """
    for step in sorted(found.keys() | expected.keys()):
        if found.get(step) != expected.get(step):
            raise Broken(
                f"step {step} differs from the undisturbed run: {found.get(step)} was logged, "
                f"not {expected.get(step)}"
            )


def load(path: Path, scratch: Path) -> str:
    """Return a digest of a checkpoint's arrays and data state, restored as a run restores them.

    Args:
        path: the checkpoint, `<step>/`.
        scratch: a directory that may be written.

    Raises:
        Broken: it does not load.
    """
    # Of all checkpoints of a directory the newest would be restored: so one that has but this.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / path.name).symlink_to(path.absolute())
    checkpoints = Checkpoints(scratch, CheckpointConfig(every_steps=0, max_to_keep=1))
    try:
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, enable_pinned_host_transfer=False)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
            handler.metadata(epath.Path(path / STATE)).tree,
            is_leaf=lambda leaf: hasattr(leaf, "shape"),
        )
        restored = checkpoints.restore(abstract)
        assert restored is not None
    except Exception as error:
        raise Broken(f"{path} passes for intact and does not load: {error}") from error
    finally:
        checkpoints.close()
    _, state, data_state = restored
    digest = hashlib.sha256(json.dumps(data_state, sort_keys=True).encode())
    for name, leaf in jax.tree_util.tree_leaves_with_path(state):
        digest.update(str(name).encode() + np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAIBAI_")}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
