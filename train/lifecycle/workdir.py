"""The files of a run's workdir, and the checks that they belong to this run."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from checkpoint.checksums import find_damage_of_config
from checkpoint.errors import read_patiently
from checkpoint.layout import CHECKPOINTS, CONFIG, steps_in
from convert.files.tokenizer_files import add_stop_token, keep_tokenizer
from convert.from_hf import keep_hf_files
from convert.model_on_disk import LABELS_FILE
from convert.runs import CONFIG_FILE, HF_FILES
from convert.source import Source
from data.examples import Corpus, Label
from data.text.chat.template import TOOLS_FILE
from data.text.text_corpus import TextCorpus
from distributed.messages import Exchange
from fields.keys import check_keys
from sharding.memory import MemoryConfig
from train.config.config_files import differences, load_data
from train.config.schema import SECTIONS
from train.lifecycle.config_history import write_config
from train.run.run import Run
from untrusted import schema
from untrusted.documents import read_json
from untrusted.files import check_links, write_text

#: Sections and keys that a run must share with the checkpoints that it resumes from.
FIXED = (
    "init_from",
    "model",
    "lora",
    "preference",
    "data",
    "images",
    "train.seed",
    "train.init_labels",
    "train.ema_decay",
    "optimizer.name",
    "optimizer.frozen",
    "precision.params",
    "precision.frozen",
)
#: Keys below FIXED that may change: they only set how fast and from where data is read, and how
#: changes of it are noticed. The data itself is compared by hash.
FREE = (
    "data.cache_dir",
    "data.cache_gb",
    "data.mixture",
    "data.num_threads",
    "data.num_workers",
    "data.paths",
    "data.split",
    "data.validation_paths",
    "data.validation_splits",
    "data.verify",
    "images.num_workers",
    "images.on_broken",
    "model.attention",
)


def check(workdir: Path, run: Run) -> None:
    """Check that `workdir` has no checkpoints of another run.

    The config that counts is the one in the newest checkpoint, which must be the one that was
    written, as its checksum shows. `config.yaml` in the workdir, which anyone can edit, is read
    only if the checkpoints were written before they contained a config.

    Raises:
        ValueError: it has checkpoints of another model or other data, and the message lists the
            keys that differ; or their config is missing or damaged; or a link in it leads outside.
        ReadError: a file of a checkpoint cannot be read.
    """
    saved = saved_config(workdir)
    if saved is None:
        return
    if "train" not in saved:
        raise ValueError(
            f"{workdir} is a converted model, not a run; start from it with "
            f"--config.init_from={workdir}, and choose another --workdir"
        )
    # Schedule-free learning computes its iterate from parameters and average by this number.
    of_optimizer = ["optimizer.beta1"] if run.config.optimizer.name == "schedule_free" else []
    lines = differences(_complete(saved, run), full_config(run), (*FIXED, *of_optimizer))
    lines = [line for line in lines if line.partition(":")[0] not in FREE]
    if lines:
        raise ValueError(
            f"{workdir} has checkpoints of another run; these keys differ (saved -> now): "
            f"{'; '.join(lines)}. Change them back, or choose another --workdir"
        )


def check_processes_agree(what: str, value: str) -> None:
    """Check that all processes have the same config or the same data.

    Args:
        what: name of the value in the message, such as "config".
        value: text that must be the same on all processes.

    Raises:
        ValueError: on all processes, if one of them differs from the first.
    """
    exchange = Exchange()
    digest = hashlib.sha256(value.encode()).hexdigest()
    is_same = exchange.on_first(lambda: digest) == digest
    problem = exchange.agree(None if is_same else f"its {what} differs from process 0")
    if problem is not None:
        raise ValueError(
            f"{problem}; start all processes with the same command, software and files"
        )


def write_run_files(
    workdir: Path, run: Run, corpus: Corpus, source: Source | None = None, report: str = ""
) -> None:
    """Write `config.yaml`, `memory.txt`, and in `hf/` the input of `python -m convert.to_hf`.

    If the run resumes with another config, log the changes, and keep the earlier config; see
    config_history.py.

    `hf/` contains the tokenizer, its chat template, the token that ends answers, the labels of a
    classifier, and files of the Hugging Face model that the run starts from. Only the first process
    writes.
    """
    if jax.process_index() > 0:
        return
    hf = workdir / HF_FILES
    hf.mkdir(parents=True, exist_ok=True)
    saved = saved_config(workdir)
    write_config(workdir, full_config(run), saved, partial(_complete, run=run))
    write_text(workdir / "memory.txt", report + "\n")
    if source is not None:
        keep_hf_files(source, workdir)
    elif isinstance(corpus, TextCorpus):
        keep_tokenizer(corpus.tokenizer, hf)
    if isinstance(corpus, TextCorpus) and corpus.chat_templates:
        # Remove the source's template for tools: the run's own chat template may have none.
        (hf / TOOLS_FILE).unlink(missing_ok=True)
        for name, text in corpus.chat_templates.items():
            (hf / name).parent.mkdir(exist_ok=True)
            write_text(hf / name, text)
        if corpus.end_of_answers is not None:
            add_stop_token(hf, corpus.end_of_answers, corpus.tokenizer.eos_id)
    if corpus.labels:
        write_text(hf / LABELS_FILE, json.dumps(corpus.labels) + "\n")


def planned_memory(workdir: Path) -> MemoryConfig:
    """Return the memory settings that a run with memory.placement=auto chose; else the default."""
    path = workdir / CONFIG_FILE
    try:
        saved = _load(path)
    except FileNotFoundError:
        saved = {}
    values = saved.get("memory", {})
    check_keys(MemoryConfig, values, f"{path}: memory")
    return MemoryConfig(**values)


def saved_config(workdir: Path) -> dict[str, Any] | None:
    """Return the config of the newest checkpoint whose config is intact; None without checkpoints.

    Raises:
        ValueError: there are checkpoints, but none contains an intact config; or a link in the
            workdir leads outside.
        ReadError: a file of a checkpoint cannot be read; an older config may differ from it.
    """
    check_links(workdir)
    if not has_checkpoint(workdir):
        return None
    checkpoints = workdir / CHECKPOINTS
    damages = []
    has_older = False  # whether a checkpoint was written before they had a checksum of the config
    for step in reversed(steps_in(checkpoints)):
        directory = checkpoints / str(step)
        damage = find_damage_of_config(directory)
        if damage is not None:  # the checkpoint will be skipped
            damages.append(f"{directory}: {damage}")
            continue
        with contextlib.suppress(ValueError, FileNotFoundError):
            return _load(directory / CONFIG)
        has_older = True
    if not has_older:
        raise ValueError(
            f"no checkpoint of {workdir} has an intact {CONFIG}, which says what the checkpoint is "
            f"({damages[0]}); copy an intact checkpoint there, or choose another --workdir"
        )
    try:
        return _load(workdir / CONFIG_FILE)
    except FileNotFoundError:
        raise ValueError(
            f"{workdir} has checkpoints, but {CONFIG_FILE} is missing, which says what they are; "
            "put it back, or choose another --workdir"
        ) from None


def saved_labels(workdir: Path) -> tuple[Label, ...]:
    """Return the labels of a run's classifier, in order; empty if it has none.

    Raises:
        ValueError: their file is damaged.
        OSError: the file cannot be read.
    """
    file = workdir / HF_FILES / LABELS_FILE
    try:
        labels = read_patiently(file, lambda: read_json(file, list, within=workdir))
    except FileNotFoundError:
        return ()
    schema.check(labels, list[str | int], file)
    return tuple(labels)


def has_checkpoint(workdir: Path) -> bool:
    """Return whether a workdir has a checkpoint, intact or not."""
    return bool(steps_in(workdir / CHECKPOINTS))


def _load(file: Path) -> dict[str, Any]:
    return read_patiently(file, lambda: load_data(file))


def _complete(saved: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Return a saved config with defaults for keys that were added to the code later."""
    completed = {"init_from": "", **saved}
    for name, section in [*SECTIONS.items(), ("model", type(run.model_config))]:
        fields = [f for f in dataclasses.fields(section) if f.default is not dataclasses.MISSING]
        completed[name] = {f.name: f.default for f in fields} | completed.get(name, {})
    return completed


def full_config(run: Run) -> dict[str, Any]:
    """Return the full config of a run, including the values that it took from the data."""
    config = run.config
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    sections["model"] |= dataclasses.asdict(run.model_config)
    return {"init_from": config.init_from, **sections, "rules": dict(config.rules)}
