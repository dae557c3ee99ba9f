"""Checkpoints in directories whose names are patterns or URLs to Orbax, TensorStore or etils."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from checkpoint.__main__ import main
from checkpoint.config import CheckpointConfig
from checkpoint.lazy import stored_arrays
from checkpoint.manager import Checkpoints
from convert import from_hf
from tests.checkpoint.states import KEEP

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def check_round_trip(directory: Path) -> None:
    checkpoints = Checkpoints(directory, KEEP)
    state = {"x": jnp.asarray(VALUES)}
    assert checkpoints.save(1, state, {"position": 1})
    checkpoints.wait()
    wanted = {"x": jax.ShapeDtypeStruct(VALUES.shape, np.float32, sharding=state["x"].sharding)}
    restored = checkpoints.restore(wanted)
    checkpoints.close()
    assert restored is not None
    np.testing.assert_array_equal(restored[1]["x"], VALUES)
    read = stored_arrays(directory / "1")["x"].read((slice(0, 2), slice(0, 3)))
    np.testing.assert_array_equal(read, VALUES)
    assert main(["verify", str(directory)]) == 0


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "name", ["v[1]", "[!a]", "**", "v*", "?{a,b} ~%41%zz#:|$X", "ü\n'\"", "s3:"]
)
def test_directory_may_have_any_usual_name(tmp_path, name):
    check_round_trip(tmp_path / name / "run")


@pytest.mark.parametrize("to", ["link", "link/../v[1]"])
def test_directory_may_be_reached_by_a_link(tmp_path, to):
    """A path with `..` after a link is not the same without them."""
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    check_round_trip(tmp_path / to)
    assert [
        path.name for path in tmp_path.iterdir() if path.name not in ("link", "elsewhere")
    ] == []


def test_save_into_a_name_with_a_star_takes_no_arrays_of_other_runs(tmp_path):
    other = tmp_path / "v2" / "1.orbax-checkpoint-tmp-1" / "state" / "ocdbt.process_0"
    base = {"driver": "file", "path": f"{other}/"}
    ts.KvStore.open({"driver": "ocdbt", "base": base}).result().write("y/c", b"1").result()
    check_round_trip(tmp_path / "v*")
    base = {"driver": "file", "path": f"{tmp_path}/v*/1/state/"}
    keys = ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
    assert sorted(keys) == [b"x/c/0/0", b"x/zarr.json"]


@pytest.mark.parametrize("name", ["a\\b", "gs:", "x.__lock", os.fsdecode(b"\xff")])
def test_unusable_directory_is_refused_before_anything_is_written(tmp_path, name, capsys):
    directory = tmp_path / name / "run"
    with pytest.raises(ValueError, match="checkpoints cannot be stored in .*; choose another"):
        Checkpoints(directory, CheckpointConfig(every_steps=1, max_to_keep=2))
    assert from_hf.main([str(tmp_path / "source"), str(directory)]) == 2
    assert "checkpoints cannot be stored in" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_link_in_a_circle_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="it is a link in a circle .*; remove the link"):
        Checkpoints(
            tmp_path / "loop" / "checkpoints", CheckpointConfig(every_steps=1, max_to_keep=2)
        )
