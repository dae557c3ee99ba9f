"""Classifies image files or texts: prints the most likely labels of each, with probabilities.

    python -m generate.classify photo.jpg other.png --model=runs/vit --top=3
    python -m generate.classify "A fine film." --model=runs/classify
    python -m generate.classify --texts=reviews.jsonl --model=runs/classify --json

Images are prepared as in evaluations of the model (`images.eval_crop`), and texts as in its
training. docs/generate.md explains the options.

B batch, K labels.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from convert.from_hf import load_model
from convert.model_on_disk import Source
from data.image_config import ImageConfig
from data.images.readability import MAX_IMAGE_BYTES, problem_of
from data.images.transforms.augment import central
from data.images.transforms.crops import open_image
from fields.paths import local_path
from generate.batches import check_batch_size
from generate.command import add_model_options, read_model, run, start_mesh
from generate.image_eval import read_sections, split_rows
from generate.text_rows import check_classifies_texts, read_texts, text_rows
from sharding.mesh import use_mesh
from untrusted.commands import command_parser, run_command
from untrusted.files import read_bytes


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("generate.classify")
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="an image file, or a text")
    add_model_options(parser, batch_size=8)
    parser.add_argument("--texts", type=local_path, metavar="FILE", help="a .jsonl file of texts")
    parser.add_argument("--text_field", default="text", help="field of a line with the text")
    parser.add_argument("--pair_field", help="field with the second text, if there are pairs")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="labels of each input")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each input")
    return run(_classify, parser.parse_args(argv))


def _classify(args: argparse.Namespace) -> None:
    if args.top < 1:
        raise ValueError(f"--top={args.top} must be at least 1")
    if bool(args.inputs) == (args.texts is not None):
        raise ValueError("give either image files or texts, or --texts=FILE")
    mesh = start_mesh(args)
    check_batch_size(mesh, args.batch_size)
    source = read_model(args.model, args)
    inputs = _read_inputs(args, source)
    with use_mesh(mesh):
        model = load_model(source, dtype=args.dtype)
        names = [*source.labels]
        rows = probabilities(model, [each.row for each in inputs], batch_size=args.batch_size)
        for each, row_K in zip(inputs, rows, strict=True):
            numbers = np.argsort(-row_K, stable=True)[: args.top].tolist()
            # A model may have no names for its labels.
            top = {names[i] if names else str(i): float(row_K[i]) for i in numbers}
            print(_line(each, top, as_json=args.json), flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Input:
    """An image or a text to classify.

    Attributes:
        names: key of its line of JSON -> path or text.
        row: arguments of the model.
    """

    names: dict[str, str]
    row: tuple[np.ndarray, ...]


def _read_inputs(args: argparse.Namespace, source: Source) -> list[_Input]:
    """Return the images or texts of the command, whichever the model classifies."""
    if hasattr(source.config, "image_size"):
        if args.texts is not None:
            raise ValueError(f"--texts={args.texts}: {args.model} classifies images; pass files")
        _, preprocessing = read_sections(source, args.model)
        paths = [*map(local_path, args.inputs)]
        return [
            _Input(names={"image": str(path)}, row=(read_image(path, preprocessing),))
            for path in paths
        ]
    check_classifies_texts(source)
    if args.texts is None:
        texts: list[tuple[str, ...]] = [(text,) for text in args.inputs]
    else:
        texts = read_texts(args.texts, args.text_field, args.pair_field)
    keys: tuple[str, ...] = ("text", "text_pair")
    names: list[dict[str, str]] = [dict(zip(keys, each, strict=False)) for each in texts]
    rows = text_rows(texts, source)
    return [_Input(names=each, row=row) for each, row in zip(names, rows, strict=True)]


def read_image(path: Path, config: ImageConfig) -> np.ndarray:
    """Return the pixels uint8[size, size, channels] of an image file, as in evaluations.

    Raises:
        ValueError: the file is no image, or is damaged.
        OSError: the file cannot be read.
    """
    content = read_bytes(path, max_bytes=MAX_IMAGE_BYTES)
    problem = problem_of(content)
    if problem is not None:
        raise ValueError(f"{path} cannot be classified: {problem}; pass other files")
    return central(open_image(content), config)


def probabilities(
    model: nnx.Module, rows: Sequence[tuple[np.ndarray, ...]], *, batch_size: int
) -> Iterator[np.ndarray]:
    """Yield the probabilities float[K] of the labels of each row.

    Args:
        model: classifier; called with the arrays of rows `[B, ...]`, it returns logits `[B, K]`.
        rows: arguments of the model for each row, all of the same shapes.
        batch_size: rows at a time; a multiple of the number of replicas of the mesh.
    """
    graph, params = nnx.split(model)

    @jax.jit
    def predict(params: Any, *arrays: jax.Array) -> jax.Array:
        logits: Any = nnx.merge(graph, params)(*arrays)
        return jax.nn.softmax(logits)

    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        padded = [*batch, *[batch[0]] * (batch_size - len(batch))]
        arrays = [split_rows(np.stack(column)) for column in zip(*padded, strict=True)]
        yield from np.asarray(predict(params, *arrays))[: len(batch)]


def _line(each: _Input, top: dict[str, float], *, as_json: bool) -> str:
    if as_json:
        return json.dumps({**each.names, "labels": top}, ensure_ascii=False)
    parts = (f"{name} {share:.1%}" for name, share in top.items())
    return f"{' / '.join(each.names.values())}: {', '.join(parts)}"


if __name__ == "__main__":
    run_command(main)
