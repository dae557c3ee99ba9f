"""A checkpoint whose arrays cannot be restored is damaged, even if its checksums are right."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from checkpoint.__main__ import main
from checkpoint.checksums import CHECKSUMS_FILE, write_checksums
from checkpoint.errors import SaveError
from tests.checkpoint.faults import edit_list, edit_metadata, edit_store
from tests.checkpoint.states import abstract, make_state

ROOT = Path(__file__).parents[2]
TABLE = "params.embed.table"


GRID = {"name": "regular", "configuration": {"chunk_shape": [16, 8]}}
CHANGES = {
    "no manifest": (lambda step: (step / "state/manifest.ocdbt").unlink(), "manifest.ocdbt"),
    "no list": (lambda step: (step / "state/_METADATA").unlink(), "_METADATA"),
    "empty list": (lambda step: edit_list(step, tree_metadata={}), "different names"),
    "list of numbers": (lambda step: edit_list(step, tree_metadata=3), "tree_metadata is 3"),
    "another dtype": (
        lambda step: edit_metadata(step, TABLE, data_type="int32", fill_value=0),
        f"{TABLE} is int32[32, 8], but float32[32, 8] in the list",
    ),
    "another shape": (
        lambda step: edit_metadata(step, TABLE, shape=[31, 8]),
        f"{TABLE} is float32[31, 8]",
    ),
    "another chunk grid": (lambda step: edit_metadata(step, TABLE, chunk_grid=GRID), "chunk"),
    "garbage as metadata": (
        lambda step: edit_store(step, f"{TABLE}/zarr.json", lambda _: b"{"),
        TABLE,
    ),
    "no metadata": (lambda step: edit_store(step, f"{TABLE}/zarr.json", lambda _: None), TABLE),
    "no chunk": (
        lambda step: edit_store(step, f"{TABLE}/c/0/0", lambda _: None),
        f"{TABLE} has 3 of 4 chunks",
    ),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_arrays_are_damage_despite_new_checksums(
    damaged_copy, open_checkpoints, capsys, change
):
    directory = damaged_copy()
    edit, reason = CHANGES[change]
    edit(directory / "2")
    write_checksums(directory / "2")
    assert main(["verify", str(directory)]) == 1
    (first, second) = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1: intact")
    assert second.startswith("step 2: damaged: ") and reason in second
    assert open_checkpoints(directory).restore(abstract(make_state(0)))[0] == 1


@pytest.mark.parametrize("dropped", ["all", "state/_METADATA", "data_state/metadata", "state/d/"])
def test_list_of_checksums_must_be_complete(damaged_copy, open_checkpoints, capsys, dropped):
    directory = damaged_copy()
    file = directory / "2" / CHECKSUMS_FILE
    _, *lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if dropped != "all" and f"  {dropped}" not in line]
    assert len(kept) < len(lines)
    file.write_text("".join([f"# {len(kept)} files\n", *kept]))
    assert main(["verify", str(directory)]) == 1
    assert "step 2: damaged: checksums.sha256 does not list " in capsys.readouterr().out
    assert main(["ls", str(directory)]) == 0
    assert "incomplete: checksums.sha256 does not list" in capsys.readouterr().out
    assert open_checkpoints(directory).restore(abstract(make_state(0)))[0] == 1


def test_checkpoint_of_an_older_version_is_intact(damaged_copy, open_checkpoints, capsys):
    """Its list of arrays has no shapes and dtypes; the state to restore must have the same."""
    directory = damaged_copy()
    edit_list(directory / "2", custom_metadata=None)
    write_checksums(directory / "2")
    assert main(["verify", str(directory)]) == 0
    assert open_checkpoints(directory).restore(abstract(make_state(0)))[0] == 2
    edit_metadata(directory / "2", TABLE, data_type="int32", fill_value=0)
    write_checksums(directory / "2")
    with pytest.raises(ValueError, match=rf"{TABLE} is int32\[32, 8\] in the checkpoint"):
        open_checkpoints(directory).restore(abstract(make_state(0)))


def test_save_that_is_not_merged_fails_and_is_removed(tmp_path, open_checkpoints, monkeypatch):
    checkpoints = open_checkpoints(tmp_path)
    monkeypatch.setattr(
        "orbax.checkpoint.PyTreeCheckpointHandler.finalize", lambda self, directory: None
    )
    assert checkpoints.save(1, {"x": jnp.ones(3)}, {})
    with pytest.raises(SaveError, match="state/manifest.ocdbt is missing"):
        checkpoints.wait()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["verify", "show"])
def test_damaged_metadata_is_reported_in_one_line(two_steps, tmp_path, command):
    """In a process of its own, because the noise to look for comes when Python ends."""
    step = Path(shutil.copytree(two_steps / "2", tmp_path / "2"))
    edit_store(step, f"{TABLE}/zarr.json", lambda _: b"garbage")
    write_checksums(step)
    done = subprocess.run(
        [sys.executable, "-m", "checkpoint", command, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == {"verify": 1, "show": 2}[command]
    (line,) = (done.stdout + done.stderr).splitlines()
    assert TABLE in line
