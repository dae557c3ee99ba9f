"""Shows the reconstructions of a masked autoencoder on validation images.

python -m train.reconstructions runs/mae [--out=reconstructions.png] [--num_images=8]
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from checkpoint.run_copies import run_path
from convert.from_hf import load
from convert.runs import config_of, newest_checkpoint
from data.corpus import load_corpus
from data.images.image_corpus import Images
from fields.paths import local_path
from train.config import config_files
from train.config.schema import validate_config
from train.pictures import save
from untrusted.commands import command_parser, refuses_bad_input, run_command
from untrusted.imports import add_allow_import

_TITLES = ("image", "what is seen", "reconstruction")


def draw_reconstructions(
    workdir: Path, out: Path, *, num_images: int, allow_import: Sequence[str] = ()
) -> None:
    """Draw the first validation images, one per row: image, visible patches, reconstruction.

    Args:
        workdir: workdir of a run; its newest intact checkpoint is used.
        num_images: number of rows; fewer if there are fewer images.

    Raises:
        ValueError: there is no such run, its model does not reconstruct images, or `out` cannot be
            written as an image.
    """
    rows = _rows(workdir, num_images, allow_import)
    size = (1.2 * len(_TITLES), 1.2 * len(rows) + 0.3)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots(len(rows), len(_TITLES), squeeze=False)
    for row, images in zip(axes, rows, strict=True):
        for axis, image in zip(row, images, strict=True):
            is_grey = image.shape[-1] == 1
            axis.imshow(image[..., 0] if is_grey else image, cmap="gray", vmin=0, vmax=1)
            axis.set_axis_off()
    for axis, title in zip(axes[0], _TITLES, strict=True):
        axis.set_title(title, fontsize=8)
    save(figure, out)


def _rows(
    workdir: Path, num_images: int, allow_import: Sequence[str]
) -> list[tuple[np.ndarray, ...]]:
    """Return (image, visible patches, reconstruction) of each image, floats from 0 to 1."""
    step = newest_checkpoint(workdir)
    file = config_of(step)
    config = validate_config(config_files.load(str(file), allow_import=allow_import))
    if not hasattr(config.model_class, "reconstructions"):
        raise ValueError(
            f"{file} has model.name={config.model.name!r}, which does not reconstruct images; give "
            "the workdir of an MAE run"
        )
    if num_images < 1:
        raise ValueError(f"--num_images={num_images} must be at least 1")
    validation = load_corpus(config.data, config.images).validation
    assert isinstance(validation, Images)
    if not len(validation):
        raise ValueError(f"{file}: the data has no validation images to draw")
    images = validation.evaluation_rows(range(min(num_images, len(validation))))["images"]
    seen, reconstructed = load(step, allow_import=allow_import).reconstructions(images)
    return list(zip(images / 255, np.asarray(seen), np.asarray(reconstructed), strict=True))


@refuses_bad_input()
def main(argv: list[str] | None = None) -> None:
    """Run the command; return the exit code, which is 2 if a run cannot be drawn."""
    parser = command_parser("train.reconstructions", description=__doc__)
    parser.add_argument("workdir", type=run_path, help="workdir of an MAE run")
    parser.add_argument(
        "--out", type=local_path, default=Path("reconstructions.png"), help="image file to write"
    )
    parser.add_argument("--num_images", type=int, default=8, help="number of rows")
    add_allow_import(parser)
    args = parser.parse_args(argv)
    draw_reconstructions(
        args.workdir, args.out, num_images=args.num_images, allow_import=args.allow_import
    )
    print(f"wrote {args.out}")


if __name__ == "__main__":
    run_command(main)
