"""Writes valid files of every kind that the parsers read."""

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from convert import from_hf
from data.examples import Corpus
from data.text.token_files import write_token_file
from distributed.handshake import Process
from predict.machines.targets import TARGETS, parse_target
from tests.convert import cases
from tests.data.corpora import word_piece
from tests.data.text.tokenization.tokenizer_folders import KINDS
from tests.runs import TINY, make_run, write_corpus
from train.config.config_files import as_yaml, load
from train.lifecycle.restore import identity_of, restore_or_initialize
from train.run.run import Run

TEXT = "The quick brown fox\njumped over  lazy dogs: 数据 🙂\n"
_DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
}


def write_shards(directory: Path) -> None:
    cases.make("gpt2").save_pretrained(directory, max_shard_size="20KB")


def write_pickle(directory: Path) -> None:
    torch.save(dict(cases.make("gpt2").state_dict()), directory / "pytorch_model.bin")


def write_tokenizer(directory: Path) -> None:
    Path(word_piece(directory)).rename(directory / "tokenizer.json")


def write_vocab(directory: Path) -> None:
    vocab = [*"Ġabcdefghijklmnopqrstuvwxyz", "th", "the", "Ġthe", "<s>", "</s>", "<pad>"]
    (directory / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(vocab)}))
    (directory / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n")
    named = {"eos_token": "</s>", "cls_token": {"content": "<s>"}, "add_prefix_space": False}
    (directory / "special_tokens_map.json").write_text(json.dumps(named))
    added = {"<new>": len(vocab), "  ": len(vocab) + 1}
    (directory / "added_tokens.json").write_text(json.dumps(added))


def write_vocab_txt(directory: Path) -> None:
    KINDS["bert"](directory)


def write_tokenizer_config(directory: Path) -> None:
    KINDS["qwen2"](directory)


def write_run(directory: Path) -> None:
    source = cases.save("vit", directory / "source")
    from_hf.convert(source, directory / "run")


@functools.cache
def resumable() -> tuple[Run, Corpus]:
    """A run on one device, and its corpus."""
    corpus = tempfile.mkdtemp(prefix="taibai_fuzz_")
    return make_run((*TINY, *write_corpus(Path(corpus))))


def write_checkpoint(directory: Path) -> None:
    """Write a checkpoint of `resumable`."""
    (run, corpus) = resumable()
    restored = restore_or_initialize(run, corpus, directory)
    position = {"batches": restored.batches.get_state(), **identity_of(corpus)}
    with contextlib.closing(restored.checkpoints) as checkpoints:
        checkpoints.save(2, run.state_layout.to_portable(restored.state), position)


def write_config(directory: Path) -> None:
    (directory / "config.yaml").write_text(as_yaml(load("configs/gpt2_3d.py").to_dict()))


def write_image_config(directory: Path) -> None:
    (directory / "config.yaml").write_text(as_yaml(load("configs/vit_finetune.py").to_dict()))


def write_deepspeed(directory: Path) -> None:
    (directory / "deepspeed.json").write_text(json.dumps(_DEEPSPEED))


def write_target(directory: Path) -> None:
    (directory / "gpu.txtpb").write_text(parse_target(f"{TARGETS[0]}:1x1").description)


def write_documents(name: str, text: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_text(text)


def write_tokens(directory: Path) -> None:
    documents = [np.arange(5), np.arange(9), np.arange(3)]
    write_token_file(str(directory / "tokens"), documents, np.dtype(np.uint16))


def write_image(kind: str) -> Callable[[Path], Any]:
    def prepare(directory: Path) -> None:
        pixels = np.arange(12 * 9 * 3, dtype=np.uint8).reshape(12, 9, 3)
        Image.fromarray(pixels).save(directory / "image", format=kind)

    return prepare


def write_attempt(directory: Path) -> None:
    attempt = {
        "started_at": 1e9,
        "written_at": 1e9 + 50,
        "seconds": {"compile": 20.0, "train": 30.0},
        "first_step": 0,
        "last_step": 30,
        "recomputed_steps": 0,
        "recomputed_s": 0.0,
        "num_devices": 1,
        "num_processes": 1,
        "ended": None,
    }
    (directory / "goodput").mkdir()
    (directory / "goodput" / "0001.json").write_text(json.dumps(attempt))


def write_metrics(directory: Path) -> None:
    lines = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": "NaN"}, {"step": 2, "eval/loss": 3}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_process(directory: Path) -> None:
    process = Process(process_id=1, num_processes=4)
    (directory / "message").write_bytes(process.to_json().encode() + b"\n")


def write_preprocessor(directory: Path) -> None:
    cases.save("vit", directory)
    content = {"do_resize": True, "size": {"height": 20, "width": 20}, "rescale_factor": 1 / 255}
    content |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
    (directory / "preprocessor_config.json").write_text(json.dumps(content))
