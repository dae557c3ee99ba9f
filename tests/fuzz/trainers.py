"""The parsers of other trainers' checkpoints."""

from pathlib import Path
from typing import Any

from convert.options import ReadOptions
from convert.source import read_source
from tests.convert.trainers import models
from tests.convert.trainers.dist_layout import write_dist
from tests.convert.trainers.libai_layout import write_libai
from tests.convert.trainers.maxtext_layout import write_maxtext
from tests.convert.trainers.megatron_layout import Layout, write
from tests.fuzz.mutations import damaged_bytes, damaged_json, damaged_yaml
from tests.fuzz.parser import Parser

_LAYOUT = Layout(tensor=1, pipeline=1)


def _read(directory: Path) -> None:
    source = read_source(directory, ReadOptions(allow_pickle_weights=True))
    for array in source.open(source.shapes()).values():
        array.read(tuple(slice(0, size) for size in array.shape))


def _checkpoint(file: str, prepare: Any, damaged: Any) -> Parser:
    return Parser(file=file, prepare=prepare, parse=_read, damaged=damaged, share=0.3)


def _write_megatron(directory: Path) -> None:
    write(models.make("gpt2"), directory, _LAYOUT)


def _write_dist(directory: Path) -> None:
    write_dist(models.make("llama"), directory)


def _write_libai(directory: Path) -> None:
    write_libai(models.make("gpt2"), directory)


def _write_maxtext(directory: Path) -> None:
    write_maxtext(models.make("llama"), directory)


_RANK = "iter_0000010/mp_rank_00/model_optim_rng.pt"
_MODEL = "model_0000099/model"
PARSERS: dict[str, Parser] = {
    "rank of Megatron-LM": _checkpoint(_RANK, _write_megatron, damaged_bytes),
    "metadata of Megatron-LM": _checkpoint("iter_0000010/.metadata", _write_dist, damaged_bytes),
    "arguments of Megatron-LM": _checkpoint("iter_0000010/common.pt", _write_dist, damaged_bytes),
    "names of LiBai": _checkpoint(f"{_MODEL}/pickled_data", _write_libai, damaged_bytes),
    "shape of LiBai": _checkpoint(f"{_MODEL}/global_tensor_2/meta", _write_libai, damaged_bytes),
    "config.yaml of LiBai": _checkpoint("config.yaml", _write_libai, damaged_yaml),
    "list of MaxText": _checkpoint("checkpoints/5/items/_METADATA", _write_maxtext, damaged_json),
    "config.json of MaxText": _checkpoint("config.json", _write_maxtext, damaged_json),
}
