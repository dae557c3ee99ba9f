"""Writes workdirs with known values, as runs leave them."""

import json
import math
from pathlib import Path

from train.config.config_files import as_yaml
from train.config.defaults import default_config
from train.reporting.metrics import MetricsWriter

STEPS = (1, *range(5, 105, 5))
UNITS_PER_STEP = 2048
FACTS = {
    "software": {"jax": "0.10.2"},
    "machine": {"host": "node1", "devices": "8 × H100", "processes": 1},
    "model": {"class": "GPT2", "parameters": 1_071_872},
    "unit": "token",
    "units_per_step": UNITS_PER_STEP,
    "memory": {
        "planned_device": {"parameters": 3 * 2**30, "activations": 5 * 2**30},
        "planned_host": {},
        "compiled_device": 7 * 2**30,
        "device_budget": 9.0 * 2**30,
    },
}


def loss_at(step: int, rate: float) -> float:
    """Return a loss with digits that no other step has."""
    return 2 + 5 * math.exp(-rate * step / 50) + 0.01 * math.sin(step)


def write_run(workdir: Path, *, rate: float = 1.0, **changes: object) -> Path:
    """Write all files of a run that the report reads.

    Args:
        rate: how quickly the loss falls.
        changes: config key, with `__` for the dot, -> value.
    """
    config = default_config().to_dict() | {"model": {"name": "gpt2", "num_layers": 4}}
    config["mesh"] |= {"pipeline": 2, "data": 2}
    config["train"]["num_microbatches"] = 4
    config["data"]["validation_paths"] = ["wiki=w.txt"]
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    writer = MetricsWriter(workdir, resume_step=0)
    for step in STEPS:
        rates = {"tokens_per_s": None if step == 1 else 4096.0, "step_time_s": 0.5}
        losses = {"loss": loss_at(step, rate), "learning_rate": 1e-3, "num_skipped": 0}
        writer.write(step, losses | rates)
        if step % 50 == 0:
            writer.write(step, {"eval_loss": loss_at(step, rate) + 0.5})
            writer.write(step, {"eval_wiki_loss": loss_at(step, rate) + 0.25})
    writer.close()
    (workdir / "config.yaml").write_text(as_yaml(config))
    (workdir / "run.json").write_text(json.dumps(FACTS))
    lines = [
        {"step": step, "prompt": "def f(", "text": f"x):\n    return {step}"} for step in (50, 100)
    ]
    (workdir / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_starts(workdir)
    return workdir


def write_starts(workdir: Path) -> None:
    """Write the records of two starts: 100 s, 50 s without a process, and 80 s."""
    (workdir / "goodput").mkdir(exist_ok=True)
    phases = {"startup": 10.0, "compile": 20.0, "step": 50.0}
    common = {"recomputed_steps": 0, "num_devices": 8, "num_processes": 1}
    first = common | {"started_at": 1000.0, "written_at": 1100.0, "first_step": 0, "last_step": 60}
    first |= {"seconds": phases | {"eval": 20.0}, "recomputed_s": 0.0, "ended": None}
    second = common | {"started_at": 1150.0, "written_at": 1230.0, "first_step": 50}
    second |= {"last_step": 100, "seconds": phases | {"step": 40.0}, "recomputed_s": 10.0}
    starts = (first, second | {"ended": "finished"})
    for number, start in enumerate(starts, start=1):
        (workdir / "goodput" / f"{number:04d}.json").write_text(json.dumps(start))
