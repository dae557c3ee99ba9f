"""The description of a model on disk, whose parameters are read lazily."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from checkpoint.lazy import LazyArray
from convert.architecture import Architecture
from models.adapters import add_adapters
from models.layers.lora import LoraConfig
from untrusted.documents import read_json
from untrusted.imports import record_received
from untrusted.messages import shortened
from untrusted.schema import check_fields

Tree = Any
Shapes = Mapping[str, tuple[int, ...]]
#: The file in `hf_files` with the names of a classifier's labels, in order.
LABELS_FILE = "labels.json"


#: Types of the keys of config.json that every architecture may have.
_CONFIG_TYPES = {
    "architectures": list[str] | None,
    "model_type": str | None,
    "id2label": dict[str, Any] | None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model on disk: a Hugging Face model, or a checkpoint of a run.

    Attributes:
        path: directory of the model.
        model: `model.name` in the config of a run.
        architecture: Hugging Face architecture, if the model comes from there; otherwise None.
        fields: fields of the model class's Config.
        hf_files: directory of config.json and the files of the tokenizer, some of which may be
            absent; None if there is no such directory.
        adapter_files: directory of an adapter, whose files of the tokenizer and for generation
            go before those in `hf_files`; None without one.
        hf_config: content of config.json; None if there is none.
        tokenizer: path of tokenizer.json, or of a directory with vocab.json and merges.txt;
            None if there is neither.
        open: function {path of a parameter: shape} -> {path of a parameter: array that is read
            lazily}. The vocabulary is padded to the given shapes.
        dtypes: name of a Hugging Face tensor -> its original dtype, for tensors where it is known.
        lora: adapters of the model.
        init_from: checkpoint that a run started from; empty for none.
        hub_commits: base of the adapter that a run started from, as adapter_config.json names it on
            the hub -> its commit; empty for none.
    """

    path: Path
    model: str
    model_class: type
    architecture: Architecture | None
    fields: dict[str, Any]
    hf_files: Path | None
    hf_config: dict[str, Any] | None
    tokenizer: Path | None
    open: Callable[[Shapes], Mapping[str, LazyArray]]
    dtypes: Mapping[str, str]
    lora: LoraConfig = LoraConfig()
    init_from: str = ""
    adapter_files: Path | None = None
    hub_commits: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def hf_file(self, name: str) -> Path | None:
        """Return the path of a file of the tokenizer or for generation; None if it is absent."""
        for directory in (self.adapter_files, self.hf_files):
            if directory is not None and (directory / name).is_file():
                return directory / name
        return None

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's labels, in order; empty if the labels have no names."""
        file = None if self.hf_files is None else self.hf_files / LABELS_FILE
        if file is not None and file.exists():
            names = [str(label) for label in read_json(file, list, within=file.parent)]
        else:
            by_id = (self.hf_config or {}).get("id2label") or {}
            names = [str(by_id[i]) for i in sorted(by_id, key=int)]
        has_names = [name for i, name in enumerate(names) if name != f"LABEL_{i}"]
        wanted = getattr(self.config, "num_labels", None)
        return tuple(names) if has_names and len(names) == wanted else ()

    @property
    def config(self) -> Any:
        """An instance of the model class's Config."""
        return self.model_class.Config(**self.fields)

    def abstract(self) -> nnx.Module:
        """Return the model with abstract parameters (shapes and dtypes without values)."""
        # On a mesh, nnx would mistake the names of logical axes for mesh axes.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return nnx.eval_shape(self._build)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {path of a parameter: shape}, including the adapters' parameters."""
        return shapes_of(nnx.to_pure_dict(nnx.split(self.abstract())[1]))

    def _build(self) -> nnx.Module:
        model = self.model_class(self.config, rngs=nnx.Rngs(0))
        add_adapters(model, self.lora, seed=0)
        return model


def read_config(file: Path, *, within: Path) -> dict[str, Any]:
    """Read a config.json, and check the types of the keys that every architecture may have.

    Args:
        within: directory that it must be in, even if it is a link.

    Raises:
        ValueError: The file is damaged, or a value has the wrong type.
        OSError: The file cannot be read.
    """
    hf = read_json(file, within=within)
    record_received(hf, file)
    check_fields(hf, _CONFIG_TYPES, file)
    for label in hf.get("id2label") or ():
        if not label.isdecimal() or len(label) > 9:
            raise ValueError(
                f"{file}: id2label has the key {shortened(label)!r}, which must be a number of at "
                "most 9 digits"
            )
    return hf


def shapes_of(params: Tree) -> dict[str, tuple[int, ...]]:
    """Return {path of a parameter: shape} for a tree of parameters."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves}


def check_known(path: Path, shapes: Shapes, known: Shapes) -> None:
    """Raise a ValueError if a model on disk lacks some of the wanted parameters."""
    unknown = sorted(shapes.keys() - known.keys())
    if unknown:
        raise ValueError(
            f"{path} contains a different model: it has no {', '.join(unknown)}; use a config that "
            "matches it"
        )
