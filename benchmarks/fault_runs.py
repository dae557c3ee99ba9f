"""Small runs that are disturbed, what they leave behind, and what they are compared with."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
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
from train import goodput
from train.exit_codes import FINISHED
from train.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[1]
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
GRACE_S = 10
#: Nothing here takes so long: what does hangs.
PATIENCE_S = 300.0

_TIMES = ("step_time_s", "tokens_per_s", "mfu")
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


class Broken(Exception):
    """A promise that a run did not keep; the message says which."""


class Missed(Exception):
    """The run came to its end before the fault."""


def prepare(scratch: Path, overrides: Sequence[str] = OVERRIDES, num_steps: int = NUM_STEPS):
    """Returns the setting of runs in one process; what they read is written into `scratch`."""
    text = Path(json.__file__).with_name("decoder.py").read_text()
    (scratch / "corpus").mkdir()
    for i in range(10):
        part = text[i * 1000 : (i + 1) * 1000]
        (scratch / "corpus" / f"part_{i}.txt").write_text(part)
    setting = Setting(scratch=scratch, overrides=tuple(overrides), num_steps=num_steps)
    setting.clock.mkdir()
    (setting.clock / "sitecustomize.py").write_text(_JUMPING_CLOCK)
    return setting


# One start of a run.


class Start:
    """A process, or a launcher with its processes, and what can be seen of it from outside."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], workdir: Path, log: Path):
        """Starts it.

        Args:
            command: program and arguments.
            env: the whole environment.
            workdir: the run's directory.
            log: where standard output and standard error go.
        """
        self._workdir, self._log = workdir, log
        self._record = workdir / goodput.GOODPUT_DIRECTORY / f"{_num_starts(workdir) + 1:04d}.json"
        self._being_saved: dict[str, float] = {}
        self._stale = _half_written(workdir)
        #: Seconds from here to the first new step; None before it.
        self.first_step_s: float | None = None
        #: What each save took in all, of those seen from beginning to end.
        self.saves_s: list[float] = []
        self.began_s = time.monotonic()
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def step(self) -> int:
        """Returns the last new step that it logged, 0 before the first."""
        try:
            return json.loads(self._record.read_text())["last_step"]
        except OSError:
            return 0

    def is_saving(self) -> bool:
        """Returns whether a directory is there that is being written or deleted."""
        return bool(_half_written(self._workdir) - self._stale)

    def look(self) -> int | None:
        """Notes what is new; returns the exit code, or None while it runs."""
        code, now_s = self.process.poll(), time.monotonic()
        if self.first_step_s is None and self._record.exists():
            self.first_step_s = now_s - self.began_s
        written = {name for name, *_ in _half_written(self._workdir) - self._stale}
        for name in {name for name in written if "-deleted-" not in name}:
            self._being_saved.setdefault(name, now_s)
        for name in self._being_saved.keys() - written:
            self.saves_s.append(now_s - self._being_saved.pop(name))
        return code

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Returns as soon as `condition` holds.

        Raises:
            Missed: it finished before.
            Broken: it ended in another way, or nothing happened for PATIENCE_S.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            code = self.look()
            if condition():
                return
            if code == FINISHED:
                raise Missed
            if code is not None:
                raise Broken(f"it ended with code {code} by itself, before {what}:\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise Broken(f"no {what} in {PATIENCE_S:.0f} s:\n{self.tail()}")
            time.sleep(0.002)

    def wait_for_step(self, num_new: int) -> None:
        """Returns when it has logged so many new steps."""
        self.wait_until(lambda: self.step() > 0, "a first step")
        last = self.step() + num_new - 1
        self.wait_until(lambda: self.step() >= last, f"step {last}")

    def sleep(self, seconds: float) -> None:
        """Returns after so many seconds, or when it has ended."""
        deadline_s = time.monotonic() + seconds
        while self.look() is None and time.monotonic() < deadline_s:
            time.sleep(min(0.002, seconds))

    def end(self, bound_s: float = PATIENCE_S) -> int:
        """Returns the exit code once it has ended.

        Raises:
            Broken: it lives for longer than `bound_s`, or a process of it outlives its end.
        """
        pids = self.pids().values()
        deadline_s = time.monotonic() + bound_s
        while (code := self.look()) is None:
            if time.monotonic() > deadline_s:
                raise Broken(f"it lives after {bound_s:.0f} s:\n{self.tail()}")
            time.sleep(0.002)
        left = [pid for pid in pids if is_alive(pid)]
        if left:
            raise Broken(f"the processes {left} outlive their launcher:\n{self.tail()}")
        return code

    def kill(self) -> None:
        """Kills all that is left of it."""
        pids = self.pids()
        for pid in (self.process.pid, *pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait()
        self.look()

    def pids(self) -> dict[int, int]:
        """Returns the process ids of the launcher's processes by their numbers in the run."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    entries = (directory / "environ").read_bytes().split(b"\0")
                    variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
                    found[int(variables.get(b"TAIBAI_PROCESS_ID", b""))] = int(directory.name)
        return found

    def tail(self) -> str:
        """Returns the end of its output."""
        return "\n".join(self.log.splitlines()[-12:])


def _num_starts(workdir: Path) -> int:
    names = (path.stem for path in (workdir / goodput.GOODPUT_DIRECTORY).glob("[0-9]*.json"))
    return max(map(int, names), default=0)


def _half_written(workdir: Path) -> set[tuple[str, int, int]]:
    """Returns name, inode and time of change of what is being written, or was when it was killed.

    Another process may use a name and an inode again, but it cannot set the time of change.
    """
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(workdir / "checkpoints"):
            if TMP_SUFFIX in entry.name:
                with contextlib.suppress(OSError):
                    stat = entry.stat()
                    found.add((entry.name, stat.st_ino, stat.st_ctime_ns))
    return found


def is_alive(pid: int) -> bool:
    """Returns whether there is such a process, and it has not ended."""
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


# The run that is disturbed, and what it is compared with.


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of a campaign share."""

    scratch: Path  # for all files
    overrides: tuple[str, ...]  # of the config
    num_steps: int
    num_processes: int = 1

    def command(self, workdir: Path, *more: str) -> list[str]:
        """Returns the command of a run; `more` are further overrides."""
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
            *(sys.executable, "-m", "launch.local", f"--processes={self.num_processes}"),
            *(f"--devices_per_process={per_process}", f"--grace_s={GRACE_S}", "--"),
            *train,
            f"--config.train.failure_timeout_s={FAILURE_TIMEOUT_S}",
            f"--config.checkpoint.timeout_s={FAILURE_TIMEOUT_S}",
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
        self.setting, self.reference, self.directory = setting, reference, directory
        self.workdir = directory / "run"
        self.checkpoints = self.workdir / "checkpoints"
        self.num_starts = 0
        self.last: Start | None = None
        #: Checkpoints that were damaged on purpose.
        self.damaged: set[int] = set()
        # The newest of them, which no start after this one has been seen to find yet.
        self._must_be_named: Path | None = None
        self._damaged_after: Start | None = None
        logs = setting.scratch / "logs"
        logs.mkdir(exist_ok=True)
        self._log_prefix = logs / directory.name

    def start(self, env: Mapping[str, str] | None = None, *overrides: str) -> Start:
        """Starts the run, where it stands."""
        self.num_starts += 1
        log = self._log_prefix.with_name(f"{self._log_prefix.name}_{self.num_starts:02d}.log")
        command = self.setting.command(self.workdir, *overrides)
        self.last = Start(command, _environment() | dict(env or {}), self.workdir, log)
        return self.last

    def finish(self) -> None:
        """Starts the run and lets it come to its end."""
        start = self.start()
        code = start.end()
        if code != FINISHED:
            raise Broken(f"undisturbed, it ended with code {code}:\n{start.tail()}")

    def last_logged(self) -> int:
        """Returns the newest step whose loss was logged."""
        entries = read_metrics(self.workdir / METRICS_FILE)
        return max((entry["step"] for entry in entries if "loss" in entry), default=0)

    def stalls_s(self) -> list[float]:
        """Returns for each start that was killed how long a save kept it from training: the mean.

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
        """Damages a random file of a checkpoint; the next start has to say so.

        Raises:
            Broken: nobody notices.
        """
        path = self.checkpoints / str(step)
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
        file = rng.choice([file for file in files if file.parent != path or _is_list(file)])
        how(file, rng)
        if find_damage(path) is not None:
            self.damaged.add(step)
            self._must_be_named, self._damaged_after = path, self.last
        elif not _is_list(file):
            raise Broken(f"{how.__name__}: nobody notices that {file} was damaged")

    def check_after_fault(self) -> None:
        """Checks what a start left behind, and what it said.

        Raises:
            Broken: a checkpoint is damaged, does not load, or is not that of the undisturbed run.
        """
        assert self.last is not None
        is_newer = self.last is not self._damaged_after and self.last.first_step_s is not None
        if self._must_be_named is not None and is_newer:
            if f"Checkpoint {self._must_be_named} is passed over" not in self.last.log:
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
        """Checks a run that came to its last step.

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
    """Returns step -> all that was logged of it but times, in order."""
    steps: dict[int, tuple] = {}
    for line in (workdir / METRICS_FILE).read_text().splitlines():
        entry = json.loads(line)
        kept = tuple(sorted(item for item in entry.items() if item[0] not in _TIMES))
        steps[entry["step"]] = (*steps.get(entry["step"], ()), kept)
    return steps


def compare(found: Mapping[int, tuple], expected: Mapping[int, tuple]) -> None:
    """Compares two trajectories.

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
    """Returns a digest of a checkpoint's arrays and data state, restored as a run restores them.

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
