"""Write the card of a model, README.md: data, config, evaluation, and the curve of the loss.

The config is the one in the checkpoint. Metrics are read from the run's metrics.jsonl, up to the
step of the checkpoint. The scores of `generate.lm_eval --follow` and `generate.image_eval --follow`
are read from the files that these commands write into the run.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from checkpoint.checksums import CHECKSUMS_FILE
from convert.architecture import Architecture
from convert.model_on_disk import Source
from convert.runs import config_of
from untrusted.documents import read_json_lines, read_yaml
from untrusted.files import digest_of, write_text
from untrusted.hub import pinned_model_of

METRICS_FILE = "metrics.jsonl"
PICTURE = "loss.png"
#: Files with scores of checkpoints -> the module that wrote them.
EVALUATIONS = {"lm_eval.jsonl": "generate.lm_eval", "image_eval.jsonl": "generate.image_eval"}

#: Keys of the section `data` that the card names first.
_DATA_KEYS = ("name", "paths", "objective", "tokenizer", "sequence_length", "global_batch_size")

Entry = dict[str, Any]


def write_card(source: Source, architecture: Architecture, step: Path, directory: Path) -> None:
    """Write README.md and loss.png, unless the model was only converted."""
    workdir = step.parent.parent
    if not (workdir / METRICS_FILE).exists():
        return
    entries = [each for each in _entries(workdir / METRICS_FILE) if each["step"] <= int(step.name)]
    config = read_yaml(config_of(step), within=workdir)
    shapes = source.shapes()
    num_params = sum(map(math.prod, shapes.values()))
    has_adapters = source.lora.rank is not None
    what = f"Adapters (rank {source.lora.rank}) of a" if has_adapters else "A"
    lines = [
        *_front_matter(source),
        f"# {architecture.name}",
        "",
        f"{what} `{source.model}` with {num_params:,} parameters, trained with Taibai for "
        f"{int(step.name):,} steps.",
    ]
    if source.init_from:
        lines += ["", f"It was trained from `{source.init_from}`."]
    scores = [*_evaluation(entries), *_other_evaluations(step)]
    lines += [*_data(config.get("data")), *(["", "## Evaluation", *scores] if scores else [])]
    lines += _loss(entries, directory)
    shown = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    fence = "```"
    while fence in shown:
        fence += "`"
    lines += ["", "## Config", "", f"{fence}yaml", shown.rstrip(), fence, ""]
    write_text(directory / "README.md", "\n".join(lines))


def _entries(file: Path) -> list[Entry]:
    """Return the lines of a file of metrics that have a step."""
    lines = read_json_lines(file, within=file.parent)
    return [entry for entry in lines if isinstance(entry.get("step"), int)]


def _front_matter(source: Source) -> list[str]:
    """Return the lines of YAML that Hugging Face's hub reads."""
    has_adapters = source.lora.rank is not None
    values: dict[str, Any] = {"library_name": "peft" if has_adapters else "transformers"}
    if source.init_from:
        repository = pinned_model_of(source.init_from)
        values["base_model"] = repository.name if repository else source.init_from
    values["tags"] = ["taibai"]
    return ["---", yaml.safe_dump(values, sort_keys=False).rstrip(), "---", ""]


def _data(section: Any) -> list[str]:
    if not isinstance(section, dict):
        return []
    rows = [(key, section[key]) for key in _DATA_KEYS if section.get(key) not in (None, "", [])]
    return ["", "## Data", "", *_table(("key", "value"), rows)]


def _evaluation(entries: Sequence[Entry]) -> list[str]:
    """Return the table of the last evaluation."""
    evaluated = [each for each in entries if "eval_loss" in each]
    if not evaluated:
        return []
    last = evaluated[-1]
    rows = [
        (name.removeprefix("eval_"), value)
        for name, value in last.items()
        if name.startswith("eval_")
    ]
    heading = f"After step {last['step']:,}, on the validation split:"
    return ["", heading, "", *_table(("metric", "value"), rows)]


def _other_evaluations(step: Path) -> list[str]:
    """Return a table for each evaluation of this checkpoint by another command."""
    workdir = step.parent.parent
    checksum = digest_of(step / CHECKSUMS_FILE, within=step)
    lines = []
    for name, maker in EVALUATIONS.items():
        entries = _entries(workdir / name) if (workdir / name).exists() else []
        for entry in entries:
            scores = entry.get("scores")
            if entry.get("checksum") != checksum or not isinstance(scores, dict):
                continue
            settings = entry.get("settings")
            items = settings.items() if isinstance(settings, dict) else ()
            options = "".join(f" --{key}={value}" for key, value in items)
            heading = f"After step {entry['step']:,}, by {_inline(maker + options)}:"
            lines += ["", heading, "", *_table(("metric", "value"), [*scores.items()])]
    return lines


def _loss(entries: Sequence[Entry], directory: Path) -> list[str]:
    """Draw the curve of the loss; return the lines that show it."""
    from matplotlib.figure import Figure  # slow, and training imports this module

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    num_points = 0
    for key, style in (("loss", "-"), ("eval_loss", "o--")):
        points = [
            (each["step"], each[key]) for each in entries if isinstance(each.get(key), int | float)
        ]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=key)
            num_points += len(points)
    if not num_points:
        return []
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(directory / PICTURE)
    return ["", "## Training", "", f"![Loss over steps]({PICTURE})"]


def _table(heading: tuple[str, str], rows: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(heading)} |", "| --- | --- |"]
    return [*lines, *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows)]


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _inline(text: str) -> str:
    """Return a text of one line as code."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"
