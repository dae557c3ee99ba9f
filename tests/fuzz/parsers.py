"""Every parser of files and messages that may come from a stranger, with valid input for it.

A parser reads the file at `path` in a directory whose other files are valid. It returns, or raises
a ValueError or an OSError of one sentence, which the commands print.
"""

import json
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoint.checksums import find_damage, write_checksums
from checkpoint.lazy import stored_arrays
from convert.source import read_source
from convert.tensor_files import open_tensors
from data.cache import read_array, write_array
from data.images.readability import problem_of
from data.text.text_files import lazy_documents, split_files
from data.text.token_files import open_token_file
from distributed.handshake import Process
from distributed.message_socket import MessageSocket
from pipeline.schedules.csv_table import read_csv, write_csv
from pipeline.schedules.generators import one_f_one_b
from pipeline.schedules.table import verify
from predict.machines.targets import Target, parse_target
from tests.convert import cases
from tests.fuzz import tables, tokenizers, trainers, valid
from tests.fuzz.mutations import (
    damaged_bytes,
    damaged_json,
    damaged_lines,
    damaged_safetensors,
    damaged_yaml,
)
from tests.fuzz.parser import Parser
from tests.fuzz.templates import damaged_template, render_template, write_template
from train.compile import run_for
from train.config import deepspeed
from train.config.config_files import load, shorten
from train.config.inherit_config import take_init_from
from train.config.overrides import Overrides
from train.config.schema import validate_config
from train.goodput import summarize
from train.lifecycle.restore import restore_or_initialize
from train.reporting.metrics import read_metrics

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
#: Models of all families, with the variants that read more keys.
ARCHITECTURES = """
    gpt2 opt_350m llama_llama3 llama_yarn llama_longrope mistral qwen3 qwen2_windowed bert_sequence
    roberta_mlm t5_v1.1 vit_odd mae swin_odd swinv2_odd
""".split()


def _read_all_tensors(directory: Path, *, allows_pickle: bool = False) -> None:
    for tensor in open_tensors(directory, allow_pickle_weights=allows_pickle).values():
        np.array(tensor.map())


def _read_run(directory: Path) -> None:
    source = read_source(directory / "run")
    source.abstract()
    _ = source.labels


def _read_run_with_new_checksums(directory: Path) -> None:
    step = directory / "run" / "checkpoints" / "0"
    write_checksums(step)  # Like somebody who changes a checkpoint on purpose.
    stored_arrays(step)


def _resume(directory: Path) -> None:
    """Resume a run from a checkpoint that somebody has changed on purpose."""
    write_checksums(directory / "checkpoints" / "2")
    (run, corpus) = valid.resumable()
    restored = restore_or_initialize(run, corpus, directory)
    restored.checkpoints.close()
    next(restored.batches)


def _read_deepspeed(directory: Path) -> None:
    path = str(directory / "deepspeed.json")
    translated = deepspeed.read(path, load("configs/gpt2.py"))
    validate_config(load("configs/gpt2.py", Overrides().with_deepspeed(translated.values)))


def _read_target(directory: Path) -> None:
    target = parse_target(f"{directory / 'gpu.txtpb'}:1x8")
    _ = (target.device_kind, target.memory_bytes)


def _read_documents(name: str) -> Callable[[Path], Any]:
    def parse(directory: Path) -> None:
        for spans in split_files([directory / name], 0.5, 16).values():
            list(lazy_documents(spans, "text"))

    return parse


def _decode_image(directory: Path) -> None:
    with warnings.catch_warnings():  # As in training, where warnings are not errors.
        warnings.simplefilter("ignore")
        problem_of((directory / "image").read_bytes())


def _receive_process(directory: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.send((directory / "message").read_bytes()[:50_000])
        theirs.close()
        message = MessageSocket(ours, time.monotonic() + 1).receive()
    Process.from_json(json.dumps(message))


def _hugging_face(case: str) -> Parser:
    return Parser(
        file="config.json",
        prepare=lambda directory: cases.save(case, directory),
        parse=read_source,
        damaged=damaged_json,
        share=0.3,
    )


def _tensor_files(file: str, prepare: Any, damaged: Any, *, allows_pickle: bool = False) -> Parser:
    def parse(directory: Path) -> None:
        _read_all_tensors(directory, allows_pickle=allows_pickle)

    return Parser(file=file, prepare=prepare, parse=parse, damaged=damaged)


def _vocab_file(file: str, damaged: Any) -> Parser:
    return Parser(file=file, prepare=valid.write_vocab, parse=tokenizers.tokenize, damaged=damaged)


def _run_file(file: str, damaged: Any, parse: Any = _read_run) -> Parser:
    return Parser(
        file=f"run/{file}", prepare=valid.write_run, parse=parse, damaged=damaged, share=0.3
    )


def _checkpoint_file(file: str) -> Parser:
    return Parser(
        file=f"checkpoints/2/{file}",
        prepare=valid.write_checkpoint,
        parse=_resume,
        damaged=damaged_json,
        share=0.3,
    )


class _TargetOfCpus(Target):
    """A target whose devices are simulated, so that it needs no compiler for GPUs."""

    def devices(self) -> list[Any]:
        return jax.devices()[: self.num_devices]


def _assemble(directory: Path, target: str) -> None:
    """Assemble a config's run without data, as far as the memory estimate needs."""
    given: Any = load(str(directory / "config.yaml"))
    shorten(given)
    take_init_from(given, Overrides())
    try:
        run_for(validate_config(given), _TargetOfCpus(**vars(parse_target(target))))
    finally:
        jax.config.update("jax_enable_x64", False)


def _run_config(prepare: Callable[[Path], Any], target: str) -> Parser:
    return Parser(
        file="config.yaml",
        prepare=prepare,
        parse=lambda directory: _assemble(directory, target),
        damaged=damaged_yaml,
    )


def _documents(file: str, text: str, damaged: Any) -> Parser:
    prepare = valid.write_documents(file, text)
    return Parser(file=file, prepare=prepare, parse=_read_documents(file), damaged=damaged)


def _image(kind: str) -> Parser:
    prepare = valid.write_image(kind)
    return Parser(file="image", prepare=prepare, parse=_decode_image, damaged=damaged_bytes)


PARSERS: dict[str, Parser] = {
    **{f"config.json of {case}": _hugging_face(case) for case in ARCHITECTURES},
    "preprocessor_config.json": Parser(
        file="preprocessor_config.json",
        prepare=valid.write_preprocessor,
        parse=read_source,
        damaged=damaged_json,
        share=0.3,
    ),
    "safetensors": _tensor_files(
        "model.safetensors", lambda path: cases.save("gpt2", path), damaged_safetensors
    ),
    "safetensors index": _tensor_files(
        "model.safetensors.index.json", valid.write_shards, damaged_json
    ),
    "pytorch .bin": _tensor_files(
        "pytorch_model.bin", valid.write_pickle, damaged_bytes, allows_pickle=True
    ),
    "tokenizer.json": Parser(
        file="tokenizer.json",
        prepare=valid.write_tokenizer,
        parse=tokenizers.tokenize,
        damaged=damaged_json,
    ),
    "chat template": Parser(
        file="chat_template.jinja",
        prepare=write_template,
        parse=render_template,
        damaged=damaged_template,
    ),
    **tokenizers.PARSERS,
    **trainers.PARSERS,
    "vocab.json": _vocab_file("vocab.json", damaged_json),
    "merges.txt": _vocab_file("merges.txt", damaged_bytes),
    "vocab.txt": Parser(
        file="vocab.txt",
        prepare=valid.write_vocab_txt,
        parse=tokenizers.tokenize,
        damaged=damaged_bytes,
    ),
    "special_tokens_map.json": _vocab_file("special_tokens_map.json", damaged_json),
    "added_tokens.json": _vocab_file("added_tokens.json", damaged_json),
    "tokenizer_config.json": Parser(
        file="tokenizer_config.json",
        prepare=valid.write_tokenizer_config,
        parse=tokenizers.tokenize,
        damaged=damaged_json,
    ),
    "config.yaml of a text run": _run_config(valid.write_config, "h100:1x8"),
    "config.yaml of an image run": _run_config(valid.write_image_config, "h100:1x1"),
    "config.yaml of a run to convert": _run_file("config.yaml", damaged_yaml),
    "hf/config.json of a run": _run_file("hf/config.json", damaged_json),
    "hf/dtypes.json of a run": _run_file("hf/dtypes.json", damaged_json),
    "checksums of a checkpoint": Parser(
        file="run/checkpoints/0/checksums.sha256",
        prepare=valid.write_run,
        parse=lambda directory: find_damage(directory / "run" / "checkpoints" / "0"),
        damaged=damaged_bytes,
    ),
    "structure of a checkpoint": _run_file(
        "checkpoints/0/state/_METADATA", damaged_json, _read_run_with_new_checksums
    ),
    "position of a checkpoint to resume": _checkpoint_file("data_state/metadata"),
    "structure of a checkpoint to resume": _checkpoint_file("state/_METADATA"),
    "DeepSpeed JSON": Parser(
        file="deepspeed.json",
        prepare=valid.write_deepspeed,
        parse=_read_deepspeed,
        damaged=damaged_json,
    ),
    "schedule table": Parser(
        file="schedule.csv",
        prepare=lambda directory: write_csv(one_f_one_b(2, 4), directory / "schedule.csv"),
        parse=lambda directory: verify(read_csv(directory / "schedule.csv")),
        damaged=damaged_bytes,
    ),
    "GPU target": Parser(
        file="gpu.txtpb", prepare=valid.write_target, parse=_read_target, damaged=damaged_bytes
    ),
    "text corpus": _documents("text.txt", valid.TEXT * 20, damaged_bytes),
    "JSONL corpus": _documents(
        "text.jsonl",
        "".join(json.dumps({"text": f"{i} {valid.TEXT}"}) + "\n" for i in range(60)),
        damaged_lines,
    ),
    "token index": Parser(
        file="tokens.idx",
        prepare=valid.write_tokens,
        parse=lambda directory: list(open_token_file(str(directory / "tokens"))),
        damaged=damaged_bytes,
    ),
    **tables.PARSERS,
    **{f"{kind} image": _image(kind) for kind in IMAGE_FORMATS},
    "cached array": Parser(
        file="array",
        prepare=lambda directory: write_array(directory / "array", np.arange(9)),
        parse=lambda directory: read_array(directory / "array"),
        damaged=damaged_bytes,
    ),
    "metrics.jsonl": Parser(
        file="metrics.jsonl",
        prepare=valid.write_metrics,
        parse=lambda directory: read_metrics(directory / "metrics.jsonl"),
        damaged=damaged_lines,
    ),
    "goodput record": Parser(
        file="goodput/0001.json", prepare=valid.write_attempt, parse=summarize, damaged=damaged_json
    ),
    "handshake": Parser(
        file="message", prepare=valid.write_process, parse=_receive_process, damaged=damaged_json
    ),
}
