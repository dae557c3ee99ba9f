"""The options, and the handling of errors, that all commands that load a model share."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from checkpoint.run_copies import run_path
from convert.from_hf import DTYPES
from convert.hub_models import pinned_model
from convert.model_on_disk import Source
from convert.options import add_read_options, read_options
from convert.source import read_source
from distributed.compilation_cache import use_compilation_cache
from distributed.messages import LONGEST_START_S, Exchange
from distributed.startup import start
from fields.paths import cache_path
from generate.sampling import Sampling
from sharding.mesh import AXES, MeshConfig
from sharding.tensor import MODES, TensorConfig
from untrusted.commands import refuses_bad_input


def add_model_options(parser: argparse.ArgumentParser, *, batch_size: int | None) -> None:
    """Add these options to a parser.

    Args:
        batch_size: default of `--batch_size`; None: there is no such option.
    """
    parser.add_argument(
        "--model",
        type=run_path,
        required=True,
        help="a run, a checkpoint, or a Hugging Face model, also as OWNER/NAME[@REVISION]",
    )
    if batch_size is not None:
        parser.add_argument(
            "--batch_size", type=int, default=batch_size, metavar="N", help="rows at a time"
        )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="dtype of the computation"
    )
    parser.add_argument(
        "--mesh", default="", metavar="AXIS=N,…", help="mesh, such as data=2,model=4"
    )
    parser.add_argument(
        "--tensor_mode",
        choices=MODES,
        default="1d",
        help="how the devices of model are divided further; 2d_stationary is for large models",
    )
    add_read_options(parser)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `Sampling` that differ between the rows of a batch."""
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0 takes the most likely token (greedy)"
    )
    parser.add_argument("--top_k", type=int, metavar="N", help="draw from the N most likely tokens")
    parser.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        help="draw from the most likely tokens whose probabilities add up to this",
    )
    parser.add_argument(
        "--min_p",
        type=float,
        default=0.0,
        help="draw from tokens with this share of the highest probability",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draws")


def sampling_of(args: argparse.Namespace, **others: Any) -> Sampling:
    """Return how tokens are chosen, from the options of `add_sampling_options`.

    Args:
        others: further fields of `Sampling`.

    Raises:
        ValueError: a value is out of range.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    return Sampling(**{name: getattr(args, name) for name in names}, **others)


def read_model(path: Path, args: argparse.Namespace) -> Source:
    """Open the model of a command; call it on all processes after they have joined each other.

    A model of the Hugging Face hub is at the same commit on all of them.

    Args:
        args: command's arguments, including the options from `add_model_options`.

    Raises:
        ValueError: the model cannot be read, or the hub has no such model.
        OSError: a file cannot be read, or the hub cannot be reached.
    """
    exchange = Exchange(LONGEST_START_S)
    pinned = exchange.on_first(lambda: pinned_model(str(path)))
    return exchange.on_all(lambda: read_source(pinned, read_options(args)))


def start_mesh(args: argparse.Namespace) -> jax.sharding.Mesh:
    """Join the other processes, and return the mesh of `--mesh`: one device if it is empty.

    Args:
        args: command's arguments, including the options from `add_model_options`.

    Raises:
        ValueError: the text is not a mesh, or as for `distributed.startup.start`.
        OSError: as for `distributed.startup.start`.
    """
    return start(_mesh_of(args.mesh), TensorConfig(mode=args.tensor_mode))


def _mesh_of(text: str) -> MeshConfig:
    sizes: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdecimal():
            raise ValueError(
                f"--mesh={text}: {part!r} is not one of {', '.join(AXES)} with a size, such as "
                "model=2"
            )
        sizes[axis] = int(size)
    return MeshConfig(**sizes)


@refuses_bad_input()
def run(command: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Run a command; return the exit code: 0, or 2 after an error.

    Args:
        args: command's arguments, including the options from `add_model_options`.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    use_compilation_cache(cache_path() / "xla")  # the one of training
    command(args)
    return 0
