"""The command `taibai`, which runs every command of the project from any folder.

    taibai train --config=configs/gpt2_3d.py

is `python -m train.main --config=configs/gpt2_3d.py`, except that the files of the current folder
hide nothing of the project: a user may have a `train.py`, or a folder `data/` or `models/`.
`python -m` looks into the current folder first. `refuse_hidden_packages` detects that a package is
hidden there.
"""

import functools
import importlib.util
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent
#: Name of a command -> its module.
COMMANDS = {
    "train": "train.main",
    "plan": "train.plan",
    "compile": "train.compile",
    "report": "train.report",
    "goodput": "train.goodput",
    "reconstructions": "train.reconstructions",
    "config": "train.config.reference",
    "generate": "generate",
    "chat": "generate.chat",
    "serve": "generate.serve",
    "lm_eval": "generate.lm_eval",
    "image_eval": "generate.image_eval",
    "classify": "generate.classify",
    "convert": "",
    "checkpoint": "checkpoint",
    "tokens": "data.megatron",
    "schedule": "pipeline.schedule",
    "launch": "launch.local",
}
#: Name of a conversion -> its module.
CONVERSIONS = {
    "from_hf": "convert.from_hf",
    "to_hf": "convert.to_hf",
    "to_onnx": "convert.to_onnx",
    "families": "convert.reference",
}
#: The project's packages that commands import. A test compares them with its folders.
PACKAGES = (
    "checkpoint",
    "convert",
    "data",
    "distributed",
    "fields",
    "generate",
    "launch",
    "models",
    "pipeline",
    "predict",
    "sharding",
    "train",
    "untrusted",
)
_REFUSED = 2


def main() -> None:
    """Run the command that the command line names, with the arguments after its name."""
    words = sys.argv[1:]
    known = COMMANDS
    name = "taibai"
    if words[:1] == ["convert"]:
        words, known, name = words[1:], CONVERSIONS, "taibai convert"
    usage = f"usage: {name} {{{','.join(known)}}} ARGUMENTS\n{name} COMMAND --help explains each"
    if words[:1] in (["-h"], ["--help"]):
        print(usage)
        return
    if not words or words[0] not in known:
        problem = f"there is no command {words[0][:60]!r}" if words else "no command was given"
        _refuse(f"{problem}; choose from {', '.join(known)}")
    _watch_interrupt()
    put_project_first()
    sys.argv = [f"{name} {words[0]}", *words[1:]]
    runpy.run_module(known[words[0]], run_name="__main__")


def put_project_first() -> None:
    """Search for modules first in the project, and last in the current folder, for own parts."""
    here = os.getcwd()
    sys.path[:] = [path for path in sys.path if path not in ("", here)]
    if (ROOT / "pyproject.toml").exists():  # a checkout, not a folder with all installed packages
        sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT))]
    sys.path += [] if here in sys.path else [here]


@functools.cache
def refuse_hidden_packages() -> None:
    """Check that no file or folder of the user hides a package of the project.

    Raises:
        ImportError: a package is hidden. A command that is just starting ends with one sentence
            instead.
    """
    if sys.argv[0] == "-m":  # Python is still looking for the module of `python -m`
        _watch_interrupt()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
        paths = [Path(place) for place in places if place is not None]
        if spec is None or any(ROOT / name in (place, place.parent) for place in paths):
            continue  # an absent package is the error of the import that needs it
        message = (
            f"{paths[0] if paths else name} hides Taibai's package {name!r}; start the command as "
            "`taibai`, such as `taibai train`, from another folder, or rename yours"
        )
        if sys.argv[0] == "-m":
            _refuse(message)
        raise ImportError(message)


def _watch_interrupt() -> None:
    """Let Ctrl-C end the command with one word while its imports take seconds.

    Later, the command installs the handler that it needs; see `code_of` in untrusted/commands.py.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_import)


def end_import(*_: object) -> NoReturn:
    """Handle Ctrl-C while a command is imported."""
    os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)


def _refuse(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(_REFUSED)


if __name__ == "__main__":
    main()
