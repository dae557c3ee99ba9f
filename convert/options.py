"""The options of reading a model that comes from somebody else, which all commands share."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from untrusted.imports import add_allow_import


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Decisions of the user about a model on disk.

    Attributes:
        harmless: unknown keys of config.json to ignore.
        allow_pickle_weights: whether to open `.bin` files, and checkpoints that are pickles.
        allow_import: import paths, packages and modules that a run's `config.yaml` may import from.
        hub_commits: repository of the hub, as it is named -> commit to read. A run has resolved
            them earlier.
        harmless_option: option of the current command that sets `harmless`, for messages.
    """

    harmless: Sequence[str] = ()
    allow_pickle_weights: bool = False
    allow_import: Sequence[str] = ()
    hub_commits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    harmless_option: str = "--harmless"

    def remedy_for(self, key: str) -> str:
        """Return the rest of a message about an unknown key: how to ignore it."""
        return f"if it does not, set {self.harmless_option}={','.join([*self.harmless, key])}"


#: Nothing is ignored, opened or imported.
DEFAULTS = ReadOptions()


def add_permissions(parser: argparse.ArgumentParser) -> None:
    """Add the options that only a command line may set, because they decide which code runs."""
    add_allow_import(parser)
    parser.add_argument(
        "--allow_pickle_weights",
        action="store_true",
        help="open files of weights that are pickles: .bin, and checkpoints of other trainers",
    )


def add_read_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that reads a model."""
    add_permissions(parser)
    parser.add_argument(
        "--harmless",
        type=lambda text: tuple(name for name in text.split(",") if name),
        default=(),
        metavar="A,B",
        help="unknown keys of config.json to ignore, because they do not change the computation",
    )


def read_options(args: argparse.Namespace) -> ReadOptions:
    """Return the options of a command line, from `add_read_options` or `add_permissions`."""
    names = ("harmless", "allow_pickle_weights", "allow_import")
    return ReadOptions(**{name: getattr(args, name) for name in names if hasattr(args, name)})
