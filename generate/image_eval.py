"""Evaluates a classifier of images: accuracies, a table of the classes, and which are confused.

    python -m generate.image_eval --model=runs/vit --out=evaluation
    python -m generate.image_eval --model=path/to/vit --images=photos --mesh=data=4

The images are the validation split of the run, or the contents of the folder `--images`, which has
a subfolder for each class. docs/vision.md explains the results.

B batch, K labels.
"""

import argparse
import csv
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from checkpoint.layout import CHECKPOINTS
from convert.from_hf import load_model
from convert.model_on_disk import Source
from convert.runs import config_of, newest_checkpoint
from data.batches import validation_batches
from data.config import DataConfig
from data.corpus import load_corpus
from data.examples import Corpus
from data.image_config import ImageConfig
from fields.keys import check_keys
from fields.paths import local_path
from generate.batches import check_batch_size
from generate.command import add_model_options, read_model, run, start_mesh
from generate.evaluation.following import add_follow, check_follow, follow
from models.vision.common import label_rank
from sharding.mesh import BATCH_AXES, use_mesh
from untrusted.commands import command_parser, run_command
from untrusted.documents import read_yaml
from untrusted.files import new_directory, write_text
from untrusted.imports import check_imports
from untrusted.outputs import check_new_directory
from untrusted.schema import check_fields

_TOP = 5
#: Loads the images once; the checkpoints of a run share them.
_load_corpus = functools.lru_cache(maxsize=1)(load_corpus)
#: How many classes are printed, and how many have their names in the picture.
_MAX_PRINTED = 20
_MAX_NAMED = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassScores:
    """Scores of one class."""

    name: str
    num_images: int
    recall: float  # share of its images that were recognized; NaN without images
    precision: float  # share of the images that were taken for it, and are of it; NaN without such
    mistaken_for: str  # the other class that its images were taken for most often; "" if none


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageScores:
    """Scores of a classifier."""

    labels: Sequence[str]
    # int[K, K], number of images of each class (row) by the class that they were taken for
    # (column)
    confusion: np.ndarray
    num_in_top: int  # number of images whose class is among the five most likely

    @property
    def num_images(self) -> int:
        """Number of images."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Share of the images whose most likely class is the right one."""
        return float(np.trace(self.confusion) / self.num_images)

    @property
    def top5_accuracy(self) -> float:
        """Share of the images whose class is among the five most likely."""
        return self.num_in_top / self.num_images

    @property
    def totals(self) -> dict[str, float]:
        """The figures of all images together, by name."""
        return {
            "num_images": self.num_images,
            "accuracy": self.accuracy,
            "top5_accuracy": self.top5_accuracy,
        }

    def classes(self) -> Iterator[ClassScores]:
        """Yield the scores of each class."""
        taken = self.confusion.sum(axis=0)
        for i, name in enumerate(self.labels):
            row = self.confusion[i]
            others = np.where(np.arange(len(row)) == i, 0, row)
            yield ClassScores(
                name=name,
                num_images=int(row.sum()),
                recall=float(row[i] / row.sum()) if row.sum() else float("nan"),
                precision=float(row[i] / taken[i]) if taken[i] else float("nan"),
                mistaken_for=self.labels[int(others.argmax())] if others.any() else "",
            )


def evaluate_images(
    model: nnx.Module, corpus: Corpus, data: DataConfig, labels: Sequence[str], *, batch_size: int
) -> ImageScores:
    """Return the scores of a classifier on the validation images.

    Args:
        model: classifier; called as `model(images)`, it returns logits `[B, K]`.
        labels: model's labels, in the order of its logits. The data may order its labels
            differently. If the model's labels have no names, the names in the data are used.

    Raises:
        ValueError: the data has other labels than the model.
    """
    names = [str(label) for label in corpus.labels]
    order = _order(names, labels)
    known = list(labels) or names
    graph, params = nnx.split(model)

    @jax.jit
    def predict(params: Any, images: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits: Any = nnx.merge(graph, params)(images)
        if logits.shape[1] != len(known):
            raise ValueError(
                f"the model has {logits.shape[1]} labels, but the data has {len(known)}; evaluate "
                "images of the classes that it was trained on"
            )
        return jnp.argmax(logits, axis=1), label_rank(logits, targets)

    data = dataclasses.replace(data, global_batch_size=batch_size, rampup_batch_size=())
    confusion = np.zeros((len(known), len(known)), np.int64)
    num_in_top = 0
    for batch in validation_batches(corpus, data, range(batch_size)):
        targets = order[batch["targets"]]
        predictions, ranks = map(
            np.asarray, predict(params, split_rows(batch["images"]), split_rows(targets))
        )
        is_there = batch["weights"] > 0
        np.add.at(confusion, (targets[is_there], predictions[is_there]), 1)
        num_in_top += int((ranks[is_there] < _TOP).sum())
    return ImageScores(labels=known, confusion=confusion, num_in_top=num_in_top)


def split_rows(x: np.ndarray) -> jax.Array:
    """Split the examples of an array over the replicas of the current mesh."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(x)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))


def _order(names: Sequence[str], labels: Sequence[str]) -> np.ndarray:
    """Return the number of each of the data's labels among the model's."""
    if not labels:
        return np.arange(len(names))
    unknown = [name for name in names if name not in labels]
    if unknown:
        raise ValueError(
            f"the data has a class {unknown[0]!r}, but the model knows {len(labels)} others, such "
            f"as {labels[0]!r}; rename the folders of the images"
        )
    return np.array([list(labels).index(name) for name in names])


def sections_of(source: Source, path: Path, images: Path | None) -> tuple[DataConfig, ImageConfig]:
    """Return the sections `data` and `images` of the images to evaluate.

    Args:
        images: folder of images; None: use the images of the run.

    Raises:
        ValueError: the model is no classifier of images, or it is no run and there is no folder.
    """
    data, preprocessing = read_sections(source, path)
    if images is not None:
        # The same folder twice: for training, of which nothing is read, and for validation.
        data |= {"name": "image_folder", "paths": (str(images), str(images))}
    elif "name" not in data:
        raise ValueError(f"{path} is not a run, so it has no images; pass --images=FOLDER")
    data["global_batch_size"] = 1  # training would need as many images as a batch
    data["rampup_batch_size"] = ()
    check_keys(DataConfig, data, "data")
    return DataConfig(**data), preprocessing


def read_sections(source: Source, path: Path) -> tuple[dict[str, Any], ImageConfig]:
    """Return the section `data` of a classifier's run, and how images are prepared for it.

    A model that is no run has no data, and the size of its images is in its config.

    Raises:
        ValueError: the model is no classifier of images.
    """
    size = getattr(source.config, "image_size", None)
    if size is None or not hasattr(source.config, "num_labels"):
        raise ValueError(f"{path} is a {source.model}, which does not classify images")
    data: dict[str, Any] = {"objective": "image_classification"}
    preprocessing: dict[str, Any] = {"size": size, "channels": source.config.num_channels}
    if (path / CHECKPOINTS).is_dir() or path.name.isdigit():
        step = newest_checkpoint(path)
        config = read_yaml(config_of(step), within=step.parent.parent)
        check_fields(config, {"data": dict[str, Any] | None, "images": dict[str, Any] | None}, path)
        data = config.get("data") or data
        preprocessing = config.get("images") or preprocessing
        check_imports({"data": data})
    check_keys(ImageConfig, preprocessing, "images")
    # Images that are mixed or repeated in training are not in an evaluation.
    return data, ImageConfig(**preprocessing | {"repeats": 1, "mixup": 0.0, "cutmix": 0.0})


def write_scores(scores: ImageScores, directory: Path) -> None:
    """Write scores.json, classes.csv, confusion.csv and confusion.png.

    Raises:
        ValueError: the directory exists and is not empty.
    """
    with new_directory(directory) as temporary:
        write_text(temporary / "scores.json", json.dumps(scores.totals, indent=1) + "\n")
        with (temporary / "classes.csv").open("x", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow([field.name for field in dataclasses.fields(ClassScores)])
            rows.writerows(dataclasses.astuple(each) for each in scores.classes())
        with (temporary / "confusion.csv").open("x", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["class", *scores.labels])
            for name, row in zip(scores.labels, scores.confusion.tolist(), strict=True):
                rows.writerow([name, *row])
        _draw(scores, temporary / "confusion.png")


def _draw(scores: ImageScores, file: Path) -> None:
    """Draw the confusion matrix: each row is the share of a class's images."""
    from matplotlib.figure import Figure

    totals = scores.confusion.sum(axis=1, keepdims=True)
    shares = scores.confusion / np.maximum(totals, 1)
    figure = Figure(figsize=(7, 6), dpi=150, layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(picture, label="share of the class's images")
    axes.set(xlabel="taken for", ylabel="class")
    if len(scores.labels) <= _MAX_NAMED:
        ticks = range(len(scores.labels))
        axes.set_xticks(ticks, scores.labels, rotation=90)
        axes.set_yticks(ticks, scores.labels)
    figure.savefig(file)


def as_text(scores: ImageScores) -> str:
    """Return the scores as a table, with the classes of the lowest recall first."""
    classes = sorted(scores.classes(), key=lambda each: (not each.num_images, each.recall))
    width = max(len("class"), *(len(each.name) for each in classes[:_MAX_PRINTED]))
    lines = [
        f"{scores.num_images:,} images: accuracy {scores.accuracy:.4f}, top-5 accuracy "
        f"{scores.top5_accuracy:.4f}",
        f"{'class':{width}}  images  recall  precision  mistaken for",
    ]
    lines += [
        f"{each.name:{width}}  {each.num_images:6,}  {each.recall:6.4f}  {each.precision:9.4f}  "
        f"{each.mistaken_for}"
        for each in classes[:_MAX_PRINTED]
    ]
    if len(classes) > _MAX_PRINTED:
        lines.append(f"… and {len(classes) - _MAX_PRINTED} classes with a higher recall")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("generate.image_eval")
    add_model_options(parser, batch_size=64)
    parser.add_argument(
        "--images", type=local_path, metavar="FOLDER", help="a folder for each class"
    )
    parser.add_argument(
        "--out", type=local_path, metavar="DIR", help="write tables and a picture here"
    )
    add_follow(parser)
    return run(_evaluate, parser.parse_args(argv))


def _evaluate(args: argparse.Namespace) -> None:
    """Evaluate the model, and print its scores; or follow a run."""
    check_new_directory(args.out)
    mesh = start_mesh(args)
    check_batch_size(mesh, args.batch_size)
    if args.follow:
        check_follow(args)
        settings = {"dtype": args.dtype}
        if args.images is not None:
            if not args.images.is_dir():
                raise ValueError(f"--images={args.images} is not a directory")
            settings["images"] = str(args.images)
        with use_mesh(mesh):
            follow(args.model, "image_eval", settings, lambda step: _scores(args, step).totals)
        return
    with use_mesh(mesh):
        scores = _scores(args, args.model)
    if args.out is not None:
        write_scores(scores, args.out)
    print(as_text(scores))


def _scores(args: argparse.Namespace, path: Path) -> ImageScores:
    """Return the scores of the model at a path."""
    source = read_model(path, args)
    data, images = sections_of(source, path, args.images)
    model = load_model(source, dtype=args.dtype)
    corpus = _load_corpus(data, images)
    return evaluate_images(model, corpus, data, source.labels, batch_size=args.batch_size)


if __name__ == "__main__":
    run_command(main)
