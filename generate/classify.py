"""Classifies image files: prints the most likely labels of each, with their probabilities.

    python -m generate.classify photo.jpg other.png --model=runs/vit --top=3

Images are prepared as in evaluations of the model (`images.eval_crop`).

B batch, K labels.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from convert.from_hf import load_model
from data.image_config import ImageConfig
from data.images.readability import MAX_IMAGE_BYTES, problem_of
from data.images.transforms.augment import central
from data.images.transforms.crops import open_image
from distributed.startup import start
from fields.paths import local_path
from generate.batches import check_batch_size
from generate.command import add_model_options, mesh_of, read_model, run
from generate.image_eval import read_sections, split_rows
from sharding.mesh import use_mesh
from untrusted.commands import command_parser, run_command
from untrusted.files import read_bytes


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("generate.classify")
    parser.add_argument("images", nargs="+", type=local_path, metavar="IMAGE", help="a file")
    add_model_options(parser, batch_size=8)
    parser.add_argument("--top", type=int, default=5, metavar="N", help="labels of each image")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each image")
    return run(_classify, parser.parse_args(argv))


def _classify(args: argparse.Namespace) -> None:
    if args.top < 1:
        raise ValueError(f"--top={args.top} must be at least 1")
    mesh = start(mesh_of(args.mesh))
    check_batch_size(mesh, args.batch_size)
    source = read_model(args.model, args)
    _, preprocessing = read_sections(source, args.model)
    images = [read_image(path, preprocessing) for path in args.images]
    with use_mesh(mesh):
        model = load_model(source, dtype=args.dtype)
        names = [*source.labels]
        rows = probabilities(model, images, batch_size=args.batch_size)
        for path, row_K in zip(args.images, rows, strict=True):
            numbers = np.argsort(-row_K, stable=True)[: args.top].tolist()
            # A model may have no names for its labels.
            top = {names[i] if names else str(i): float(row_K[i]) for i in numbers}
            print(_line(path, top, as_json=args.json), flush=True)


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
    model: nnx.Module, images: Sequence[np.ndarray], *, batch_size: int
) -> Iterator[np.ndarray]:
    """Yield the probabilities float[K] of the labels of each image.

    Args:
        model: classifier; called as `model(images)`, it returns logits `[B, K]`.
        images: pixels of each, as from `read_image`.
        batch_size: images at a time; a multiple of the number of replicas of the mesh.
    """
    graph, params = nnx.split(model)

    @jax.jit
    def predict(params: Any, images: jax.Array) -> jax.Array:
        logits: Any = nnx.merge(graph, params)(images)
        return jax.nn.softmax(logits)

    for first in range(0, len(images), batch_size):
        batch = images[first : first + batch_size]
        padded = [*batch, *[np.zeros_like(batch[0])] * (batch_size - len(batch))]
        yield from np.asarray(predict(params, split_rows(np.stack(padded))))[: len(batch)]


def _line(path: Path, top: dict[str, float], *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"image": str(path), "labels": top}, ensure_ascii=False)
    parts = (f"{name} {share:.1%}" for name, share in top.items())
    return f"{path}: {', '.join(parts)}"


if __name__ == "__main__":
    run_command(main)
