"""A checkpoint that somebody changed, with new checksums, is refused in one sentence."""

import json
import shutil
from pathlib import Path

import pytest

from checkpoint.checksums import write_checksums
from checkpoint.lazy import stored_arrays
from convert.source import read_source
from tests.checkpoint.faults import edit_list, edit_metadata
from tests.runs import TINY, arguments, write_corpus
from tests.train.refusals import refusal
from train.main import main

pytestmark = pytest.mark.usefixtures("shared_steps")

POSITION = "data_state/metadata"
STRUCTURE = "state/_METADATA"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a checkpoint of step 2, and its overrides."""
    directory = tmp_path_factory.mktemp("trained")
    changes = ("train.num_steps=2", "optimizer.schedule=constant", "checkpoint.every_steps=2")
    overrides = (*TINY, *write_corpus(directory), *changes)
    assert main(arguments(directory / "run", overrides)) == 0
    return directory / "run", (*overrides, "train.num_steps=3")


def position(**changes) -> dict:
    return {"batches": {"next_index": 2}, "corpus": "a", "contents": ""} | changes


@pytest.mark.thorough
@pytest.mark.parametrize(
    "file, content, reason",
    [
        (POSITION, {}, "it has no 'batches'"),
        (POSITION, position(corpus=[]), "corpus is [], but must be of type str"),
        (POSITION, position(batches=3), "batches is 3"),
        (POSITION, position(batches={}), "it has no 'next_index'"),
        (POSITION, position(batches={"next_index": "2"}), "next_index is '2'"),
        (POSITION, position(batches={"next_index": -1}), "next_index must not be -1"),
        (POSITION, position(batches={"next_index": 2**63}), "next_index must not be 92"),
        (POSITION, position(batches={"next_index": 2, "x": 1}), "x must not be 1"),
        (POSITION, [1], "must contain a JSON object"),
        (STRUCTURE, {}, "are damaged (steps 2;"),
        (STRUCTURE, [1], "are damaged (steps 2;"),
        (STRUCTURE, {"tree_metadata": 3}, "are damaged (steps 2;"),
    ],
)
def test_changed_checkpoint_is_refused(file, content, reason, trained, tmp_path, capsys):
    (run, overrides) = trained
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    step = tmp_path / "checkpoints" / "2"
    if isinstance(content, dict) and content.get("corpus") == "a":
        content["corpus"] = json.loads((step / POSITION).read_text())["corpus"]
    Path(step / file).write_text(json.dumps(content))
    write_checksums(step)
    error = refusal(tmp_path, overrides, capsys)
    assert reason in error and str(tmp_path) in error


@pytest.mark.thorough
def test_parameters_of_another_dtype_are_not_converted(trained, tmp_path):
    """Checkpoints of older versions do not list dtypes, so that only the model shows the change."""
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    step = tmp_path / "checkpoints" / "2"
    name = next(name for name in stored_arrays(step) if name.startswith("params."))
    edit_list(step, custom_metadata=None)
    edit_metadata(step, name, data_type="int32", fill_value=0)
    write_checksums(step)
    source = read_source(tmp_path)
    with pytest.raises(ValueError, match=f"{name.removeprefix('params.')} is stored as int32"):
        source.open(source.shapes())
