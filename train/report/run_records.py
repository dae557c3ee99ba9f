"""Reads the records of runs in their workdirs.

A workdir may come from someone else, and the run may still be writing to it. So every file may be
missing, which leaves out a part of the report, or be damaged, which becomes a sentence in it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from convert.runs import CONFIG_FILE
from train.config.config_files import flat_config, load_data
from train.goodput import GOODPUT_DIRECTORY, Goodput, summarize
from train.lifecycle.config_history import CONFIGS
from train.reporting.metrics import METRICS_FILE, read_metrics
from train.run.run_facts import RUN_FILE
from train.samples import SAMPLES_FILE
from untrusted import schema
from untrusted.documents import each_json_line, read_json
from untrusted.messages import sentence_of

T = TypeVar("T")

#: Steps and bytes from here on are damaged: JavaScript's numbers are exact up to it.
_LIMIT = 2**53
#: Types of the values of run.json that the report computes with.
_FACTS = {
    "software": dict[str, Any],
    "machine": dict[str, Any],
    "model": dict[str, Any],
    "unit": str,
    "units_per_step": int,
    "memory": dict[str, Any],
}
_MEMORY = {
    "planned_device": dict[str, int],
    "planned_host": dict[str, int],
    "compiled_device": int | None,
    "device_budget": float | None,
}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The records of one run."""

    name: str  # unique among the runs of a report
    workdir: Path
    entries: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl, in the order of their steps
    configs: Sequence[tuple[str, Mapping[str, Any]]]  # (file, flat config), the newest one last
    goodput: Goodput | None
    facts: Mapping[str, Any] | None  # contents of run.json
    samples: Sequence[Mapping[str, Any]]  # lines of samples.jsonl, in the order of their steps
    problems: list[str] = field(default_factory=list)  # sentences

    @property
    def config(self) -> Mapping[str, Any]:
        """The newest config, key -> value; empty if there is none."""
        return self.configs[-1][1] if self.configs else {}


def read_runs(workdirs: Sequence[Path]) -> list[RunRecord]:
    """Read runs.

    Raises:
        ValueError: a directory is not the workdir of a run, or is named twice.
    """
    paths = [path.resolve() for path in workdirs]
    twice = {str(path) for path in paths if paths.count(path) > 1}
    if twice:
        raise ValueError(f"{min(twice)} is named twice; name each run once")
    return [_read_run(path, name) for path, name in zip(workdirs, _names(paths), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that differ: "run", or "a/run" and "b/run"."""
    longest = max(len(path.parts) for path in paths)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len({*names}) == len(names):
            break
    return names


def _read_run(workdir: Path, name: str) -> RunRecord:
    metrics = workdir / METRICS_FILE
    config = workdir / CONFIG_FILE
    samples = workdir / SAMPLES_FILE
    if not metrics.is_file() and not config.is_file():
        raise ValueError(
            f"{workdir} has neither {METRICS_FILE} nor {CONFIG_FILE}; give the --workdir of a run"
        )
    reader = _Reader()
    return RunRecord(
        name=name,
        workdir=workdir,
        entries=reader.read(metrics, lambda: _read_entries(metrics, reader.problems)) or [],
        configs=reader.configs(workdir),
        goodput=reader.read(
            workdir / GOODPUT_DIRECTORY, lambda: summarize(workdir, reader.problems.append)
        ),
        facts=reader.read(workdir / RUN_FILE, lambda: _read_facts(workdir / RUN_FILE)),
        samples=reader.read(samples, lambda: _read_samples(samples, reader.problems)) or [],
        problems=reader.problems,
    )


class _Reader:
    """Reads the files of a run, and collects a sentence about each one that is damaged."""

    def __init__(self):
        self.problems: list[str] = []

    def read(self, path: Path, read: Callable[[], T]) -> T | None:
        """Return the result of `read`; None if there is nothing at `path`, or it is damaged."""
        if not path.exists():
            return None
        try:
            return read()
        except (ValueError, OSError, TypeError, RecursionError) as error:
            self.problems.append(f"{path} is left out: {sentence_of(error)}")
            return None

    def configs(self, workdir: Path) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the configs of all starts that changed it, as (file, flat config)."""
        earlier = workdir / CONFIGS
        names = [path.name for path in earlier.iterdir()] if earlier.is_dir() else []
        numbered = sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{4,9}\.yaml", name))
        files = [*(earlier / f"{number:04d}.yaml" for number in numbered), workdir / CONFIG_FILE]
        configs = []
        for file in files:
            config = self.read(file, lambda file=file: flat_config(load_data(file)))
            if config is not None:
                configs.append((str(file.relative_to(workdir)), config))
        return configs


def _read_entries(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, ordered by step, and name those that are damaged."""
    damaged: list[int] = []
    entries = read_metrics(path, on_damaged=damaged.append)
    _report_damaged(path, damaged, problems)
    possible = [entry for entry in entries if 0 <= entry["step"] < _LIMIT]
    if len(possible) < len(entries):
        problems.append(
            f"{path} has {len(entries) - len(possible):,} line(s) with an impossible step, which "
            "are left out"
        )
    return sorted(possible, key=lambda entry: entry["step"])


def _report_damaged(path: Path, lines: Sequence[int], problems: list[str]) -> None:
    if lines:
        numbers = ", ".join(map(str, lines[:5]))
        more = f" and {len(lines) - 5:,} more" if len(lines) > 5 else ""
        problems.append(f"{path} has damaged lines, which are left out: {numbers}{more}")


def _read_samples(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the lines of samples.jsonl, ordered by step, and name those that are damaged."""
    damaged: list[int] = []
    samples = []
    for line, entry in each_json_line(path):
        entry = entry or {}
        step = entry.get("step")
        has_step = type(step) is int and 0 <= step < _LIMIT
        if has_step and all(isinstance(entry.get(key), str) for key in ("prompt", "text")):
            samples.append(entry)
        else:
            damaged.append(line)
    _report_damaged(path, damaged, problems)
    return sorted(samples, key=lambda entry: entry["step"])


def _read_facts(path: Path) -> dict[str, Any]:
    facts = read_json(path)
    schema.check_fields(facts, _FACTS, path)
    memory = facts["memory"]
    schema.check_fields(memory, _MEMORY, f"{path}: memory")
    numbers = [*memory["planned_device"].values(), *memory["planned_host"].values()]
    numbers += [facts["units_per_step"], memory.get("compiled_device"), memory.get("device_budget")]
    if any(number is not None and not 0 <= number < _LIMIT for number in numbers):
        raise ValueError(f"{path} is damaged: it has a number of bytes or tokens out of range")
    return facts
