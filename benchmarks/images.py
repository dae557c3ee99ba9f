"""Measures how fast images are read: `python -m benchmarks.images [--workers=0,1,2,4]`.

The benchmark writes JPEG files with the sizes of ImageNet's images, and reads them as the training
of a ViT does: random crops of 224 pixels, mirroring, RandAugment and random erasing. It takes two
measurements for each number of worker processes: first the images per second at full speed, then
the waiting time of simulated steps. A simulated step sleeps for a given time; the time that `next`
takes afterwards is the time that a real step would have waited for its batch.

Only reading is measured. On a machine whose CPU also computes the steps, reading is slower.
"""

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness import report
from benchmarks.harness.timing import time_s
from data.batches import train_batches
from data.config import DataConfig
from data.corpus import load_corpus
from data.examples import Batch, generator
from data.image_config import ImageConfig
from data.images.transforms.augment import augment
from data.images.transforms.crops import open_image
from fields.paths import local_path
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

#: (width, height) of images: the most frequent sizes in ImageNet, and some others.
_SIZES = ((500, 375), (500, 375), (375, 500), (500, 333), (500, 500), (400, 300), (1024, 768))
# JPEG quality with which files are about as large as ImageNet's, 110 KB on average.
_QUALITY = 92
_NUM_ALONE = 200


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.images")
    parser.add_argument(
        "--workers", default="0,1,2,4", help="numbers of worker processes, separated by commas"
    )
    parser.add_argument("--files", type=int, default=700, help="number of images to write")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--batches", type=int, default=16, help="batches per measurement")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements for each number of workers"
    )
    parser.add_argument(
        "--step_ms",
        type=float,
        help="milliseconds of a simulated step; default: 1.25 × the fastest reading of a batch",
    )
    parser.add_argument("--out", type=local_path, help="write the figures to this JSON file")
    args = parser.parse_args(argv)
    workers = [int(number) for number in args.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="taibai_images_") as directory:
        figures = measure(Path(directory), workers, args)
    figures = {"command": command_line("benchmarks.images", argv)} | figures
    print(as_text(figures))
    report.write_json(args.out, figures)
    return 0


def measure(directory: Path, workers: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Write images and measure how fast they are read.

    Args:
        directory: existing directory for the images and caches.
        workers: numbers of worker processes to measure.
        args: arguments of the command line.

    Returns:
        All figures, as plain numbers and strings.
    """
    num_bytes = write_images(directory / "images", args.files)
    data = DataConfig(
        name="image_folder",
        paths=(str(directory / "images"),),
        objective="image_classification",
        global_batch_size=args.batch,
        validation_fraction=0.0,
        cache_dir=str(directory / "cache"),
    )
    images = {n: _recipe(n) for n in workers}
    check_s = [time_s(lambda: load_corpus(data, _recipe(0))) for _ in range(2)]
    speeds: dict[int, list[float]] = {n: [] for n in workers}
    first_s: dict[int, list[float]] = {n: [] for n in workers}
    for _ in range(args.rounds):
        for n in workers:
            speed, first = _full_speed(data, images[n], args.batches)
            speeds[n].append(speed)
            first_s[n].append(first)
    fastest = max(statistics.median(values) for values in speeds.values())
    step_s = args.step_ms / 1000 if args.step_ms else 1.25 * args.batch / fastest
    rows = [
        {
            "num_workers": n,
            "images_per_s": _summary(speeds[n]),
            "first_batch_s": statistics.median(first_s[n]),
            "waits_a_step_s": _waits(data, images[n], args.batches, step_s),
        }
        for n in workers
    ]
    return {
        "versions": report.versions("pillow", "grain"),
        "hardware": {"cpu": report.cpu_name(), "num_cores": report.num_cores()},
        "work": {
            "files": args.files,
            "mean_file_bytes": num_bytes / args.files,
            "global_batch_size": args.batch,
            "recipe": "crop 0.08 to 1, flip, RandAugment 2 of magnitude 9, erasing 0.25; 224 × 224",
            "num_threads": data.num_threads,
            "batches": args.batches,
            "rounds": args.rounds,
        },
        "alone": _alone(directory / "images"),
        "check_s": {"first_start": check_s[0], "later_start": check_s[1]},
        "step_s": step_s,
        "readers": rows,
    }


def write_images(root: Path, count: int) -> int:
    """Write JPEG files that compress like photographs, in ten classes.

    Args:
        root: directory for one subdirectory per class.
        count: number of files.

    Returns:
        The size of all files together, in bytes.
    """
    rng = np.random.default_rng(0)
    total = 0
    for number in range(count):
        path = root / f"class_{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = io.BytesIO()
        _photograph(_SIZES[number % len(_SIZES)], rng).save(stream, "jpeg", quality=_QUALITY)
        total += path.write_bytes(stream.getvalue())
    return total


def _photograph(size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Return noise whose amplitude decreases with frequency, as in photographs."""
    width, height = size
    mixed = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 9):
        small = rng.standard_normal((2**octave, 2**octave, 3)).astype(np.float32)
        levels = np.clip(128 + 40 * small, 0, 255).astype(np.uint8)
        resized = Image.fromarray(levels).resize(size, Image.Resampling.BICUBIC)
        mixed += (np.asarray(resized, np.float32) - 128) / 1.4**octave
    grain = 5 * rng.standard_normal((height, width, 1)).astype(np.float32)
    return Image.fromarray(np.clip(128 + 1.2 * mixed + grain, 0, 255).astype(np.uint8))


def _recipe(num_workers: int) -> ImageConfig:
    return ImageConfig(
        size=224,
        channels=3,
        crop_scale=(0.08, 1.0),
        flip=True,
        randaugment_num=2,
        erasing=0.25,
        num_workers=num_workers,
    )


def _alone(root: Path) -> dict[str, float]:
    """Return the seconds per image in a single thread, by part of the work."""
    contents = [path.read_bytes() for path in sorted(root.rglob("*.jpg"))[:_NUM_ALONE]]
    plain = ImageConfig(size=224, channels=3, crop_scale=(0.08, 1.0), flip=True)

    def decode() -> None:
        for content in contents:
            open_image(content).load()

    def read(config: ImageConfig) -> None:
        for number, content in enumerate(contents):
            augment(open_image(content), config, generator((number,)))

    parts = {
        "decode": decode,
        "decode_and_crop": lambda: read(plain),
        "all": lambda: read(_recipe(0)),
    }
    return {
        name: min(time_s(part) for _ in range(3)) / len(contents) for name, part in parts.items()
    }


def _full_speed(data: DataConfig, images: ImageConfig, num_batches: int) -> tuple[float, float]:
    """Return images per second after the start, and the seconds until the first batch."""
    begin_s = time.perf_counter()
    batches = _open(data, images)
    next(batches)
    first_s = time.perf_counter() - begin_s
    for _ in range(8):  # Use up the batches that were read ahead.
        next(batches)
    seconds = time_s(lambda: [next(batches) for _ in range(num_batches)])
    return num_batches * data.global_batch_size / seconds, first_s


def _waits(
    data: DataConfig, images: ImageConfig, num_batches: int, step_s: float
) -> dict[str, float]:
    """Return the seconds that simulated steps of `step_s` seconds wait for their batches."""
    batches = _open(data, images)
    next(batches)
    waits = []
    for _ in range(num_batches):
        time.sleep(step_s)
        waits.append(time_s(lambda: next(batches)))
    half = waits[num_batches // 2 :]  # The first batches were read ahead.
    return {"median": statistics.median(half), "max": max(half)}


def _open(data: DataConfig, images: ImageConfig) -> Iterator[Batch]:
    return train_batches(load_corpus(data, images), data, range(data.global_batch_size), seed=0)


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def as_text(figures: dict[str, Any]) -> str:
    """Return the figures as a readable text."""
    work = figures["work"]
    machine = figures["hardware"]
    alone = figures["alone"]
    lines = [
        f"{machine['cpu']}, {machine['num_cores']} cores; "
        + ", ".join(f"{name} {version}" for name, version in figures["versions"].items()),
        f"JPEG files of {work['mean_file_bytes'] / 1000:,.0f} KB; {work['recipe']}; batches of "
        f"{work['global_batch_size']}",
        "ms an image in one thread: "
        + ", ".join(f"{name.replace('_', ' ')} {s * 1e3:.2f}" for name, s in alone.items()),
        "",
        f"{'workers':>8}{'images/s':>10}{'rounds':>14}{'first batch s':>15}"
        f"{'wait ms':>9}{'most':>7}   (steps of {figures['step_s'] * 1e3:.0f} ms)",
    ]
    for row in figures["readers"]:
        speed = row["images_per_s"]
        waits = row["waits_a_step_s"]
        rounds = f"{speed['min']:.0f}–{speed['max']:.0f}"
        threads = " (threads)" if not row["num_workers"] else ""
        lines.append(
            f"{row['num_workers']:>8}{speed['median']:>10,.0f}{rounds:>14}"
            f"{row['first_batch_s']:>15.1f}{waits['median'] * 1e3:>9.0f}{waits['max'] * 1e3:>7.0f}"
            f"{threads}"
        )
    check = figures["check_s"]
    lines += [
        "",
        f"finding and checking {work['files']} files: {check['first_start']:.2f} s at the first "
        f"start, {check['later_start']:.2f} s later",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no device is used
    run_command(main)
