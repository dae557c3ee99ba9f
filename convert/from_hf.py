"""Imports Hugging Face models: `load` in Python, or `python -m convert.from_hf SRC DST`.

Checkpoints of Megatron-LM, LiBai and MaxText are read as if they were Hugging Face models.
docs/convert.md explains the options.
"""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from flax import nnx
from jax.sharding import SingleDeviceSharding

from checkpoint.config import CheckpointConfig
from checkpoint.layout import CHECKPOINTS
from checkpoint.manager import Checkpoints
from checkpoint.paths import check_path
from convert.adapters.peft_format import CONFIG_FILE as ADAPTER_CONFIG_FILE
from convert.command import run
from convert.files import preprocessor
from convert.keys import plain
from convert.model_on_disk import Source, shapes_of
from convert.options import DEFAULTS, ReadOptions, add_read_options, read_options
from convert.reference import listing
from convert.runs import CONFIG_FILE, DTYPES_FILE, HF_FILES
from convert.source import load_params, read_source
from data.text.chat.template import TEMPLATES
from data.text.tokenization.file_tokenizer import MAX_FILE_BYTES
from fields.paths import local_path
from models.stack import logical_axes
from sharding.mesh import AXES, MESH_AXES, MeshConfig, check_automatic
from sharding.rules import partition_specs, rules_on, shardings
from untrusted.commands import command_parser, run_command
from untrusted.files import copy_file, new_directory, write_text

#: Files of a Hugging Face model that are kept in addition to its config.json.
KEPT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

#: Dtypes that a model can be loaded in.
DTYPES = ("float32", "bfloat16", "float64")

_log = logging.getLogger("convert")  # Not __name__, which is "__main__" if the module is run.


def load(path: str | Path, *, dtype: str = "float32", **options: Any) -> Any:
    """Load a model from disk onto the current mesh, ready to be called.

    The mesh is the one set by `jax.set_mesh`; parameters are sharded over it as in training. If no
    mesh is set, they are placed on the first device. Each device's shard is read from the files
    separately.

    Args:
        path: Hugging Face model, on this machine or on the hub as `org/name@revision`, a
            checkpoint of Megatron-LM, LiBai or MaxText, the directory of a run, whose newest intact
            checkpoint is loaded, or one checkpoint.
        dtype: dtype of the parameters and the computation: float32, bfloat16 or float64.
        **options: fields of `convert.options.ReadOptions`, such as `harmless`.

    Raises:
        ValueError: See `convert.source.read_source`; or the model cannot be sharded over the mesh,
            or the mesh has explicit axes.
    """
    return load_model(read_source(path, ReadOptions(**options)), dtype=dtype)


def load_model(source: Source, *, dtype: str = "float32") -> Any:
    """Load a model that has been opened; see `load`.

    Raises:
        ValueError: The model cannot be sharded over the mesh, or the mesh has explicit axes; or the
            dtype is another, or float64 without `jax_enable_x64`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    if dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            "dtype='float64' needs jax.config.update('jax_enable_x64', True) before the model is "
            "loaded"
        )
    mesh = jax.sharding.get_mesh()
    check_automatic(mesh)
    model = source.abstract()
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    shardings = _shardings(model, params, mesh)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, jnp.dtype(dtype), sharding=sharding
        ),
        params,
        shardings,
    )
    return nnx.merge(graph, load_params(source, abstract))


def convert(
    src: Path,
    dst: Path,
    *,
    mesh: MeshConfig | None = None,
    options: ReadOptions = DEFAULTS,
) -> None:
    """Write a Hugging Face model as the directory of a run, with its parameters as step 0.

    It may have adapters of PEFT. The directory contains `checkpoints/0/`, `config.yaml` with the
    section `model` (and `lora`, with adapters), and `hf/` with the files that `python -m
    convert.to_hf` needs to restore the original model.

    Args:
        src: directory of the model, or `org/name@revision` on the Hugging Face hub, whose commit
            is written as `init_from`.
        mesh: mesh to check: the model must be shardable over it. The mesh does not affect the
            files.

    Raises:
        ValueError: See `convert.source.read_source`; or the model cannot be sharded over the mesh,
            or `dst` already exists and is not empty, or cannot contain a checkpoint.
    """
    check_path(dst)
    with new_directory(dst) as directory:
        source = read_source(src, options)
        is_of_hub = source.path != src
        if not is_of_hub and source.hf_files != src and not (src / ADAPTER_CONFIG_FILE).exists():
            raise ValueError(f"{src} is a run of Taibai; use the directory of a Hugging Face model")
        model = source.abstract()
        params = nnx.to_pure_dict(nnx.split(model)[1])
        if mesh is not None:
            abstract_mesh = jax.sharding.AbstractMesh(tuple(mesh.axis_sizes().values()), MESH_AXES)
            _shardings(model, params, abstract_mesh)
        arrays = source.open(shapes_of(params))
        tree = nnx.traversals.unflatten_mapping({tuple(k.split(".")): v for k, v in arrays.items()})
        config = CheckpointConfig(every_steps=0, max_to_keep=1)
        with contextlib.closing(Checkpoints(directory / CHECKPOINTS, config)) as checkpoints:
            checkpoints.save(0, {"params": tree}, {})
            checkpoints.wait()
        fields = dataclasses.asdict(source.config)
        for name in preprocessor.FIELDS - source.fields.keys():
            fields.pop(name, None)  # Left out, so that the config of a run decides.
        section = {"name": source.model, **plain(fields)}
        sections: dict[str, Any] = {"model": section}
        if is_of_hub:
            sections["init_from"] = str(source.path)  # which commit the parameters are from
        if source.lora.rank is not None:
            lora = plain(dataclasses.asdict(source.lora))
            sections |= {"lora": lora, "init_from": source.init_from}
        write_text(directory / CONFIG_FILE, yaml.safe_dump(sections, sort_keys=False))
        keep_hf_files(source, directory)
        num_params = sum(array.size for array in arrays.values())
    _log.info("%s: %s parameters of a %s", dst, f"{num_params:,}", source.model_class.__name__)


def keep_hf_files(source: Source, workdir: Path) -> None:
    """Copy config.json, tensor dtypes and tokenizer files to `workdir/hf/`, for `convert.to_hf`.

    Args:
        source: model; nothing is copied if it does not come from Hugging Face.
    """
    if source.hf_files is None:
        return
    target = workdir / HF_FILES
    target.mkdir(parents=True, exist_ok=True)
    if source.hf_config is not None:
        write_text(target / "config.json", json.dumps(source.hf_config, indent=2) + "\n")
        write_text(target / DTYPES_FILE, json.dumps(dict(source.dtypes), indent=1) + "\n")
    copy_hf_files(source.hf_files, target, (*KEPT_FILES, preprocessor.FILE))
    if source.adapter_files is not None:
        copy_hf_files(source.adapter_files, target)


def copy_hf_files(directory: Path, target: Path, names: Sequence[str] = KEPT_FILES) -> None:
    """Copy files of a Hugging Face model that are next to its weights, and its chat templates.

    Args:
        directory: directory of the model; a file in it must not be a link that leads outside.
        names: files to copy, some of which may be absent.

    Raises:
        ValueError: A file is too large, not a regular file, or a link that leads outside of
            `directory`.
    """
    templates = sorted(path.name for path in (directory / TEMPLATES).glob("*.jinja"))
    if templates:
        (target / TEMPLATES).mkdir(exist_ok=True)
    for name in (*names, *(f"{TEMPLATES}/{template}" for template in templates)):
        if (directory / name).is_symlink() or (directory / name).exists():
            original = directory / name
            copy_file(original, target / name, within=directory, max_bytes=MAX_FILE_BYTES)


def _shardings(model: nnx.Module, params: Any, mesh: Any) -> Any:
    """Return the sharding of each parameter on a mesh, which may have only some of our axes.

    An empty mesh stands for the first device.
    """
    if mesh.empty:
        device = SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda _: device, params)
    specs = partition_specs(params, logical_axes(model), rules_on(mesh), mesh)
    return shardings(mesh, specs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("convert.from_hf")
    parser.add_argument(
        "src",
        type=local_path,
        nargs="?",
        help="a Hugging Face model: its directory, or OWNER/NAME[@REVISION] on the hub; or a "
        "checkpoint of Megatron-LM, LiBai or MaxText",
    )
    parser.add_argument("dst", type=local_path, nargs="?", help="directory to write")
    parser.add_argument("--list", action="store_true", help="instead, list the supported models")
    add_read_options(parser)
    for axis in AXES:
        parser.add_argument(
            f"--config.mesh.{axis}",
            type=int,
            default=None,
            dest=axis,
            help="check that the model can be sharded over a mesh of this size",
        )
    args = parser.parse_args(argv)
    if args.list:
        print(listing())
        return 0
    if args.dst is None:
        parser.error("the following arguments are required: src, dst")
    sizes = {axis: getattr(args, axis) for axis in AXES if getattr(args, axis) is not None}
    return run(
        lambda: convert(
            args.src,
            args.dst,
            mesh=MeshConfig(**sizes) if sizes else None,
            options=read_options(args),
        )
    )


if __name__ == "__main__":
    run_command(main)
