"""Exports a run to the Hugging Face format: `python -m convert.to_hf CKPT DST`.

docs/convert.md explains the options.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint.run_copies import run_path
from convert.adapters.merged import without_adapters
from convert.adapters.write_peft import base_of, write_adapter
from convert.architecture import Architecture
from convert.command import run
from convert.files import preprocessor
from convert.files.model_card import write_card
from convert.files.tokenizer_files import write_tokenizer
from convert.from_hf import copy_hf_files
from convert.keys import plain, read, write
from convert.model_on_disk import Source
from convert.names import TensorMapping, assemble
from convert.options import DEFAULTS, ReadOptions, add_read_options, read_options
from convert.registry import architectures
from convert.runs import DTYPES_FILE, newest_checkpoint
from convert.source import read_source
from convert.tensor_files import DTYPES, ShardWriter
from fields.paths import local_path
from untrusted.commands import command_parser, run_command
from untrusted.files import new_directory, write_text
from untrusted.messages import shortened

#: Config fields that config.json cannot express, and that a Hugging Face model does not need.
_WITHOUT_COUNTERPART = (
    "vocab_multiple",
    "loss",
    "drop_path",
    "label_smoothing",
    "router_loss",
    "router_loss_over",
    "router_z_loss",
    "balancing_rate",
    "mtp_loss",
    "image_mean",
    "image_stddev",
    "positions",
    "kernels",
)

#: Model -> keys of tokens that it may lack. Some of its classes have such a token by default, which
#: may be outside of a small vocabulary.
_MAY_LACK = {
    **dict.fromkeys(("gpt2", "opt"), ("pad",)),
    "llama": ("pad", "eos"),
    "modernbert": ("pad", "bos", "eos", "cls", "sep"),
}

_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}

_log = logging.getLogger("convert")  # Not __name__, which is "__main__" if the module is run.


def convert(
    checkpoint: Path,
    dst: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 2**30,
    averaged: bool = True,
    merge: bool = False,
    options: ReadOptions = DEFAULTS,
) -> None:
    """Write the parameters of a run as a Hugging Face model, or its adapters for PEFT.

    The directory of a model gets safetensors files, config.json, preprocessor_config.json for a
    vision model, and the tokenizer files found in the run's `hf/`.

    Args:
        checkpoint: directory of a run, whose newest intact checkpoint is read, or one of its
            checkpoints.
        dtype: dtype of all tensors. None gives each tensor the dtype that it has in the
            original model, if the run was imported, and float32 otherwise.
        max_shard_bytes: maximum size of a file in bytes, at least 1, unless it contains a
            single tensor.
        averaged: whether to write the averages of the parameters, if the run kept such averages.
        merge: whether to merge the adapters into the model, instead of writing only them.
        options: for reading the run, and the model that its adapters are for.

    Raises:
        ValueError: There is no intact checkpoint, no Hugging Face architecture can express this
            model, or a value is too large for `dtype`.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"--max_shard_bytes={max_shard_bytes} must be at least 1")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"--dtype={dtype} is unknown; choose {', '.join(_DTYPES)}")
    if (checkpoint / "config.json").is_file():
        raise ValueError(
            f"{checkpoint} is already a Hugging Face model, because it has a config.json; to_hf "
            "reads the directory of a run or of a checkpoint"
        )
    step = newest_checkpoint(checkpoint)
    source = read_source(step, options, averaged=averaged)
    if merge:
        source = without_adapters(source)
    with new_directory(dst) as directory:
        architecture, hf = describe(source.model, source.config, source)
        if source.hf_files is not None:
            copy_hf_files(source.hf_files, directory)
        has_adapters = source.lora.rank is not None
        if has_adapters:
            chosen = None if dtype is None else _DTYPES[dtype]
            base = base_of(source, partial(_read_base, options))
            write_adapter(source, architecture, directory, chosen, base)
        else:
            _write_model(source, architecture, hf, directory, dtype, max_shard_bytes)
        write_card(source, architecture, step, directory)
    what = f"adapters of {architecture.name}" if has_adapters else architecture.name
    _log.info("%s: %s of %s", dst, what, step)


def _read_base(options: ReadOptions, path: str, hub_commits: Mapping[str, str]) -> Source:
    return read_source(path, dataclasses.replace(options, hub_commits=hub_commits))


def _write_model(
    source: Source,
    architecture: Architecture,
    hf: dict[str, Any],
    directory: Path,
    dtype: str | None,
    max_shard_bytes: int,
) -> None:
    """Write the files of a model; `hf` is its config.json without dtype and labels."""
    hf, default = _with_dtype({**hf, **_labels(source)}, dtype)
    shapes = source.shapes()
    arrays = source.open(shapes)
    parts: dict[str, list[TensorMapping]] = {}
    vocab_size = getattr(source.config, "vocab_size", None)
    for place in architecture.tensor_mappings(shapes, vocab_size=vocab_size):
        parts.setdefault(place.theirs, []).append(place)
    dtypes = {} if dtype is not None else source.dtypes
    for name, known in dtypes.items():
        if known not in _DTYPES:
            raise ValueError(
                f"{DTYPES_FILE} of {source.path} has the dtype {shortened(known)!r} for "
                f"{shortened(name)}; it must be one of {', '.join(_DTYPES)}, or set --dtype"
            )
    tensors = [
        (name, _DTYPES[dtypes.get(name, default)], places[0].their_shape)
        for name, places in parts.items()
    ]
    dtype_of = {name: dtype for name, dtype, _ in tensors}
    writer = ShardWriter(directory, tensors, max_shard_bytes=max_shard_bytes)
    writer.write(lambda name: assemble(parts[name], arrays, dtype_of[name]))
    preprocessor.write(source, directory)
    # RoBERTa's pad_token_id is part of the model: it determines where positions begin.
    hf = {**write_tokenizer(source, architecture, directory), **hf}
    for use in _MAY_LACK.get(architecture.model, ()):
        hf.setdefault(f"{use}_token_id", None)
    write_text(directory / "config.json", json.dumps(hf, indent=2) + "\n")


def describe(model: str, config: Any, source: Source | None) -> tuple[Architecture, dict[str, Any]]:
    """Find the Hugging Face architecture that expresses a model exactly, and its config.json.

    Args:
        model: `model.name` of the run.
        source: model on disk that the run starts from, or that is exported; None if there is
            none.

    Raises:
        ValueError: There is no such architecture; the message names the fields that the closest
            one cannot express.
    """
    config = getattr(config, "explicit", config)  # config.json has factors, no scaling rule
    original = None if source is None else source.hf_config
    candidates = _candidates(model)
    # Prefer the architecture that the run was imported from. It may belong to another model, if the
    # run took only the encoder of that model.
    imported = None if source is None else source.architecture
    if imported is not None and imported.model == model:
        # With another head, an XLM-R is still an XLM-R, although it could be written as a RoBERTa.
        candidates.sort(key=lambda each: each.model_type != imported.model_type)
        candidates.insert(0, imported)
    if not candidates:
        raise ValueError(f"model.name={model!r} has no counterpart in Hugging Face's models")
    differences: list[list[str]] = []
    for candidate in candidates:
        keep = original if original and original.get("model_type") == candidate.model_type else {}
        hf = _config(candidate, config, keep)
        differences.append(list(_differences(candidate, config, hf)))
        if not differences[-1]:
            return candidate, hf
    nearest = min(range(len(candidates)), key=lambda i: len(differences[i]))
    raise ValueError(
        "no Hugging Face architecture matches this model: the closest one, "
        f"{candidates[nearest].name}, cannot have {', '.join(differences[nearest])}"
    )


def export_problem(model: str, config: Any, source: Source | None) -> str | None:
    """Return why a model could not be exported after training, or None if it could.

    Models without any counterpart in Hugging Face, such as a user's own, are not reported.
    """
    if not _candidates(model):
        return None
    try:
        describe(model, config, source)
    except ValueError as error:
        return str(error)
    return None


def _candidates(model: str) -> list[Architecture]:
    """Return the architectures of a model."""
    return [each for each in architectures().values() if each.model == model]


def _config(architecture: Architecture, config: Any, original: Mapping[str, Any]) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    hf = write(fields, architecture.keys, original, harmless=list(original))
    names = {"architectures": [architecture.name], "model_type": architecture.model_type}
    return {**names, **hf, **names}


def _differences(architecture: Architecture, config: Any, hf: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings that an architecture cannot run or that its config.json cannot express."""
    if architecture.limits is not None:
        yield from architecture.limits(config)
    wanted = dataclasses.asdict(config)
    others = {
        name: wanted[name]
        for name in (*architecture.detected_fields, *_WITHOUT_COUNTERPART)
        if name in wanted
    }
    try:
        read_back = read(hf, architecture.keys, harmless=list(hf)) | dict(architecture.fields)
        back = dataclasses.asdict(type(config)(**read_back | others))
    except ValueError as error:
        yield f"these settings ({error})"
        return
    for name, value in wanted.items():
        if plain(back[name]) != plain(value):
            yield f"model.{name}={value!r}"


def _labels(source: Source) -> dict[str, Any]:
    """Return the keys of config.json with the names of the labels that a run was trained on."""
    labels = source.labels
    if not labels:
        return {}
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def _with_dtype(hf: dict[str, Any], dtype: str | None) -> tuple[dict[str, Any], str]:
    """Return config.json with its dtype, which is also the dtype of tensors without a known one."""
    name = "torch_dtype" if "torch_dtype" in hf else "dtype"
    original = hf.get(name)
    known = original if isinstance(original, str) and original in _DTYPES else "float32"
    chosen = dtype or known
    return {**hf, name: chosen}, chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("convert.to_hf")
    parser.add_argument(
        "checkpoint", type=run_path, help="directory of a run, or of one of its checkpoints"
    )
    parser.add_argument("dst", type=local_path, help="directory to write")
    parser.add_argument(
        "--dtype", default=None, help="dtype of all tensors; by default, as in the original model"
    )
    parser.add_argument(
        "--max_shard_bytes", type=int, default=2**30, help="maximum size of a file in bytes"
    )
    parser.add_argument(
        "--raw", action="store_true", help="write the weights themselves, not their averages"
    )
    parser.add_argument(
        "--merge", action="store_true", help="merge adapters into the model; otherwise, write them"
    )
    add_read_options(parser)
    args = parser.parse_args(argv)
    return run(
        lambda: convert(
            args.checkpoint,
            args.dst,
            dtype=args.dtype,
            max_shard_bytes=args.max_shard_bytes,
            averaged=not args.raw,
            merge=args.merge,
            options=read_options(args),
        )
    )


if __name__ == "__main__":
    run_command(main)
