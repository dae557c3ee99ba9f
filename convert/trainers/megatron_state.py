"""Load a file of PyTorch in a Megatron-LM checkpoint, which has more than tensors.

It also has the arguments of the run, and the state of training. PyTorch loads it with
`weights_only`, with two additions: the class of the arguments, which only has attributes, and
classes that stay empty, in place of those that belong to the state of training.
"""

import argparse
import io
import types
from pathlib import Path
from typing import Any

from convert.tensor_files import load_pickle
from untrusted.messages import shortened

_TYPES = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
}
#: Modules whose objects are left empty, because the model does not need them: the states of random
#: numbers, the scales of Transformer Engine, and arguments with values of other types.
_LEFT_EMPTY = ("megatron.", "transformer_engine.", "numpy.", "_io.", "signal.")


class _Empty:
    """Takes the place of an object in a file without keeping anything of it."""

    def __new__(cls, *args: Any, **options: Any):
        return object.__new__(cls)

    def __init__(self, *args: Any, **options: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load_state(file: Path, content: bytes | None = None) -> dict[str, Any]:
    """Load the arguments of a run, and the rest of the file.

    Args:
        content: part of the file to load; None for all of it.

    Returns:
        The content; `args` is a dict, and `file` the file.

    Raises:
        ValueError: The file is damaged, has objects of other types, no arguments, or a version
            that cannot be read.
    """
    state = load_pickle(file, _types_in(file, content), content=content)
    if isinstance(state, list) and len(state) == 1:  # as in the format torch_dist
        state = state[0]
    if not isinstance(state, dict):
        state = {}
    args = state.get("args")
    if not isinstance(args, argparse.Namespace | types.SimpleNamespace):
        raise ValueError(
            f"{file} has no 'args', the arguments of the run; only checkpoints of Megatron-LM's "
            "training can be read"
        )
    version = state.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 2:
        raise ValueError(
            f"{file} has checkpoint_version={shortened(str(version))}, but at least 2.0 is needed, "
            "because earlier versions order query, key and value differently; save it again with "
            "a newer Megatron-LM"
        )
    return {**state, "args": vars(args), "file": file}


def _types_in(file: Path, content: bytes | None) -> list[tuple[type, str]]:
    """Return a type for each name in a file that PyTorch does not allow by itself."""
    import torch

    source: Any = file if content is None else io.BytesIO(content)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except Exception as error:
        raise ValueError(
            f"{file} cannot be read as a file of PyTorch: {shortened(error)}"
        ) from None
    unknown = [name for name in names if name not in _TYPES and not name.startswith(_LEFT_EMPTY)]
    if unknown:
        raise ValueError(
            f"{file} has an object of the type {shortened(unknown[0])}, which is refused, because "
            "a checkpoint of Megatron-LM has only tensors, arguments and states of random numbers"
        )
    # A class of its own for each name, because PyTorch also finds the name by the class.
    return [(_TYPES.get(name) or type("Empty", (_Empty,), {}), name) for name in names]
