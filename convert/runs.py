"""Open the checkpoint of a run: a directory with `config.yaml`, `checkpoints/` and maybe `hf/`.

The model of a checkpoint is named by the config in the checkpoint, which its checksums cover. The
`config.yaml` of the run, which anyone can edit, names it only if the checkpoint has no config.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoint.checksums import find_damage
from checkpoint.errors import read_patiently
from checkpoint.layout import CHECKPOINTS, CONFIG, STATE, steps_in
from checkpoint.lazy import Index, LazyArray, StoredArray, stored_arrays
from convert.hub_commits import base_commits
from convert.model_on_disk import Shapes, Source, check_known, read_config
from convert.registry import find
from data.text.tokenization.file_tokenizer import find_tokenizer
from fields.keys import check_keys
from fields.types import check_types
from models.layers.lora import LoraConfig
from models.registry import find_model
from models.section import split_model_keys
from models.stack import logical_axes
from untrusted.documents import read_json, read_yaml
from untrusted.files import check_link, check_tree
from untrusted.imports import allow_imports, check_imports, record_received
from untrusted.schema import check, check_fields

CONFIG_FILE = "config.yaml"
HF_FILES = "hf"
#: The file in `hf/` with the dtype of each tensor of the original model.
DTYPES_FILE = "dtypes.json"

#: The name of the average of a parameter in a checkpoint; see train/optim/ema.py.
_AVERAGE = re.compile(r"opt_state\.\d+\.average\.(.+)")

_log = logging.getLogger(__name__)

T = TypeVar("T")


def newest_checkpoint(path: Path) -> Path:
    """Find the newest intact checkpoint.

    Args:
        path: directory of a run, or one of its checkpoints, which is then the only candidate.

    Raises:
        ValueError: There is no intact checkpoint, or a link in it leads out of the run.
        ReadError: A checkpoint cannot be read, though it may be intact.
    """
    if path.name.isdigit() and (path / STATE).is_dir():
        candidates = [path]
    else:
        directory = path / CHECKPOINTS
        candidates = [directory / str(step) for step in reversed(steps_in(directory))]
    for step in candidates:
        run = step.parent.parent
        check_link(step.parent, run)
        check_tree(step, run)
        damage = find_damage(step)
        if damage is None:
            return step
        _log.warning("Checkpoint %s is skipped: %s.", step, damage)
    if not path.exists():
        raise ValueError(f"{path} does not exist; correct the path of the model")
    what = "only damaged checkpoints" if candidates else "neither a config.json nor a checkpoint"
    raise ValueError(
        f"{path} contains {what}; use the directory of a Hugging Face model, of a run, or of a "
        "checkpoint of a run"
    )


def config_of(step: Path) -> Path:
    """Return the path of the config that names the model of a checkpoint.

    Args:
        step: directory of a checkpoint that `newest_checkpoint` has found intact.

    Returns:
        The checkpoint's own config. Converted checkpoints and checkpoints of older versions have
        none; for them, it is the config of the run.

    Raises:
        ValueError: There is neither.
    """
    if (step / CONFIG).exists():
        return step / CONFIG
    file = step.parent.parent / CONFIG_FILE
    if not file.exists():
        raise ValueError(
            f"{file} is missing, but it names the model of {step}; put it back, or choose another "
            "run"
        )
    return file


def open_run(
    path: Path, step: Path, *, averaged: bool = True, allow_import: Sequence[str] = ()
) -> Source:
    """Open a checkpoint of a run.

    Args:
        path: path that the user gave: the directory of the run or of the checkpoint.
        averaged: whether to use the averages of the parameters, if the run kept such averages.

    Raises:
        ValueError: The checkpoint has no valid config, or its model class may not or cannot be
            imported, or `hf/` is a link that leads out of the run.
        OSError: A file cannot be read.
    """
    workdir = step.parent.parent
    file = config_of(step)
    config = read_patiently(file, lambda: read_yaml(file, within=workdir))
    check_fields(config, {"model": dict[str, Any]}, file)
    fields = config["model"]
    check_fields(fields, {"name": str}, f"{file}: model")
    allow_imports(allow_import)
    record_received(config, file)
    check_imports({"model": fields})
    name = fields["name"]
    model_class = find_model(name)
    fields = split_model_keys(fields, model_class).own
    check_keys(model_class.Config, fields, f"{file}: model")
    check_types(model_class.Config, fields, f"{file}: model")
    files = workdir / HF_FILES
    check_link(files, workdir)
    hf_file = files / "config.json"
    dtypes_file = files / DTYPES_FILE
    hf = _read_optional(hf_file, lambda: read_config(hf_file, within=workdir))
    dtypes = _read_optional(dtypes_file, lambda: read_json(dtypes_file, within=workdir)) or {}
    check(dtypes, dict[str, str], dtypes_file)
    adapters = config.get("lora", {})
    check_fields(adapters, {}, f"{file}: lora")
    check_keys(LoraConfig, adapters, f"{file}: lora")
    init_from = config.get("init_from", "")
    check(init_from, str, f"{file}: init_from")
    source = Source(
        path=path,
        model=name,
        model_class=model_class,
        architecture=None if hf is None else find(hf),
        fields=fields,
        hf_files=files if files.is_dir() else None,
        hf_config=hf,
        tokenizer=find_tokenizer(files),
        open=lambda shapes: _open_checkpoint(source, step, shapes, averaged),
        dtypes=dtypes,
        lora=LoraConfig(**adapters),
        init_from=init_from,
        hub_commits=base_commits(config),
    )
    return source


def _read_optional(file: Path, read: Callable[[], T]) -> T | None:
    """Read a file that may be absent; then the result is None."""
    try:
        return read_patiently(file, read)
    except FileNotFoundError:
        return None


class _PaddedArray(LazyArray):
    """A parameter whose first axis is the vocabulary, padded with zeros to `shape`.

    Args:
        shape: shape with padding; only its first axis differs from the stored one.
    """

    def __init__(self, array: StoredArray, shape: tuple[int, ...]):
        self._array = array
        self.shape = shape
        self.dtype = array.dtype

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of a chunk, the smallest part that is read from disk."""
        return self._array.chunk_shape

    def read(self, index: Index) -> np.ndarray:
        """Read a part of the padded parameter."""
        rows = index[0]
        stored = self._array.shape[0]
        stored_rows = slice(min(rows.start, stored), min(rows.stop, stored))
        missing = rows.stop - rows.start - (stored_rows.stop - stored_rows.start)
        part = self._array.read((stored_rows, *index[1:]))
        return np.pad(part, [(0, missing), *[(0, 0)] * (part.ndim - 1)])


def _open_checkpoint(
    source: Source, step: Path, shapes: Shapes, averaged: bool
) -> Mapping[str, LazyArray]:
    state_arrays = stored_arrays(step)
    stored = {
        name.removeprefix("params."): array
        for name, array in state_arrays.items()
        if name.startswith("params.")
    }
    matches = {name: _AVERAGE.fullmatch(name) for name in state_arrays}
    averages = {match[1]: state_arrays[name] for name, match in matches.items() if match}
    # In a model with a teacher (MoCo), the average is the teacher and not the result of training.
    if averaged and averages and not hasattr(source.model_class, "teach"):
        _log.info("%s: parameters are their averages (train.ema_decay)", step)
        stored |= averages
    check_known(step, shapes, {name: array.shape for name, array in stored.items()})
    arrays: dict[str, LazyArray] = {}
    for name, shape in shapes.items():
        array = arrays[name] = stored[name]
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"checkpoint {step} is damaged: the parameter {name} is stored as "
                f"{array.dtype.name}, but parameters are floating-point numbers; use another "
                "checkpoint"
            )
        if array.shape == shape:
            continue
        holds_vocab = name in _vocab_params(source) and shape[0] >= source.config.vocab_size
        if not holds_vocab or array.shape[1:] != shape[1:]:
            raise ValueError(
                f"checkpoint {step} is of another model: {name} has the shape "
                f"{list(array.shape)} in the checkpoint but {list(shape)} in this model"
            )
        arrays[name] = _PaddedArray(array, shape)
    return arrays


def _vocab_params(source: Source) -> set[str]:
    """Return the paths of the parameters whose first axis is the vocabulary."""
    axes = nnx.traversals.flatten_mapping(logical_axes(source.abstract()))
    return {".".join(map(str, path)) for path, names in axes.items() if names[:1] == ("vocab",)}
