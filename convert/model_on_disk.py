"""A model on disk: what it is, and its parameters, which are read as they are asked for."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from checkpoint.lazy import LazyArray
from convert.architecture import Architecture

Tree = Any
Shapes = Mapping[str, tuple[int, ...]]


#: Among `hf_files`: the names of a classifier's labels, in order.
LABELS_FILE = "labels.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model on disk.

    Attributes:
      path: its directory.
      model: `model.name` of a run's config.
      model_class: the class.
      architecture: what it is among Hugging Face's, if it comes from there.
      fields: of the class's Config.
      hf_files: the directory of config.json and the tokenizer's files, of which some may be absent.
      hf_config: config.json, or None if there is none.
      tokenizer: tokenizer.json, or None if there is none.
      open: (path of a parameter -> its shape) -> these parameters, which are read as they are
        asked for; the vocab is padded as the shapes say.
      dtypes: name of each Hugging Face tensor -> its dtype, where that is known.
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

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's labels, in order; empty if they have none."""
        file = None if self.hf_files is None else self.hf_files / LABELS_FILE
        if file is not None and file.exists():
            names = [str(label) for label in json.loads(file.read_text())]
        else:
            by_id = (self.hf_config or {}).get("id2label") or {}
            names = [str(by_id[i]) for i in sorted(by_id, key=int)]
        has_names = [name for i, name in enumerate(names) if name != f"LABEL_{i}"]
        wanted = getattr(self.config, "num_labels", None)
        return tuple(names) if has_names and len(names) == wanted else ()

    @property
    def config(self) -> Any:
        """The class's Config."""
        return self.model_class.Config(**self.fields)

    def abstract(self) -> nnx.Module:
        """Returns the model without values."""
        # On a mesh, nnx would take the names of our logical axes for those of the mesh.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return nnx.eval_shape(lambda: self.model_class(self.config, rngs=nnx.Rngs(0)))


def shapes_of(params: Tree) -> dict[str, tuple[int, ...]]:
    """Returns {path: shape} of a tree of parameters."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves}


def check_known(path: Path, shapes: Shapes, known: Shapes) -> None:
    unknown = sorted(shapes.keys() - known.keys())
    if unknown:
        raise ValueError(
            f"{path} holds another model: it has no {', '.join(unknown)}; take a config for it"
        )
