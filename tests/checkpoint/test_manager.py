"""Tests of `checkpoint.manager`: save and restore on any mesh."""

import pickle
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from checkpoint.checksums import write_checksums
from tests.checkpoint.states import State, abstract, assert_same_bits, make_mesh, make_state


def test_restore_without_checkpoints_is_none(tmp_path, open_checkpoints):
    checkpoints = open_checkpoints(tmp_path / "new")
    assert checkpoints.restore(abstract(make_state(0))) is None
    assert checkpoints.latest_step() is None and checkpoints.all_steps() == []


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 2), (4, 1, 2), (2, 2, 2)])
def test_restore_on_any_mesh_gives_the_same_bits(two_steps, open_checkpoints, sizes):
    mesh = make_mesh(*sizes)
    wanted = abstract(make_state(0), mesh)
    step, state, data_state = open_checkpoints(two_steps).restore(wanted)
    assert (step, data_state) == (2, {"position": 2})
    assert isinstance(state, State) and type(state.opt_state[0]) is optax.ScaleByAdamState
    assert_same_bits(state, make_state(2))
    # Each device holds only its own shard.
    jax.tree.map(lambda x, w: np.testing.assert_equal(x.sharding, w.sharding), state, wanted)
    shard = state.params["blocks"]["kernel"].addressable_shards[0].data
    assert shard.shape == (4 // sizes[0], 8, 16 // sizes[2])


def test_layout_has_no_trace_of_the_mesh(two_steps):
    step = two_steps / "2"
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{step}/state/"}).result()
    texts = {
        f"array index {key!r}": store.read(key).result().value for key in store.list().result()
    }
    assert any(b"zarr.json" in key.encode() for key in texts), "no array metadata was looked at"
    texts = {key: text for key, text in texts.items() if key.endswith("zarr.json'")}
    texts |= {str(path): path.read_bytes() for path in step.rglob("*") if path.is_file()}
    names = {path.name for path in step.rglob("*")}
    assert not names & {"_sharding", "array_metadatas"}
    trace = rb"\b(pipeline|data|model|mesh|NamedSharding|PartitionSpec|device|cpu:\d|TFRT\w+)\b"
    for name, text in texts.items():
        text = text.replace(b'"node_type": "array"', b"")
        if b"\0" not in text:  # skip binary files: Orbax's index and the arrays' data
            assert not re.search(trace, text), f"{name} mentions the mesh: {text[:400]}"


def test_save_is_asynchronous_and_arrays_may_be_donated(tmp_path, open_checkpoints, monkeypatch):
    may_commit = threading.Event()

    def write_when_told(directory):
        assert may_commit.wait(timeout=60)
        write_checksums(directory)

    monkeypatch.setattr("checkpoint.directory.write_checksums", write_when_told)
    sharding = NamedSharding(make_mesh(2, 2, 2), P("pipeline", "model"))
    values = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    state = {name: jax.device_put(values + i, sharding) for i, name in enumerate("abcd")}
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * 0.5 + 1, s), donate_argnums=0)
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    for _ in range(3):
        state = update(state)
    jax.block_until_ready(state)
    assert not (tmp_path / "1").exists(), "the checkpoint is visible before it is complete"
    may_commit.set()
    one_device = SingleDeviceSharding(jax.devices()[0])
    wanted = {
        n: jax.ShapeDtypeStruct(values.shape, np.float32, sharding=one_device) for n in "abcd"
    }
    _, restored, _ = checkpoints.restore(wanted)
    assert_same_bits(restored, {name: values + i for i, name in enumerate("abcd")})


def test_only_the_newest_are_kept_and_none_is_saved_twice(tmp_path, open_checkpoints):
    checkpoints = open_checkpoints(tmp_path)
    assert [checkpoints.save(step, make_state(step), {}) for step in (10, 20, 30, 40)] == [True] * 4
    assert not checkpoints.save(40, make_state(0), {})
    checkpoints.wait()
    assert checkpoints.all_steps() == [20, 30, 40] and checkpoints.latest_step() == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["20", "30", "40"]
    assert open_checkpoints(tmp_path).restore(abstract(make_state(0)))[1].step == 40


def with_kernel(**kwargs) -> State:
    state = abstract(make_state(0))
    kernel = state.params["blocks"]["kernel"]
    options = {"shape": kernel.shape, "dtype": kernel.dtype, "sharding": kernel.sharding} | kwargs
    state.params["blocks"]["kernel"] = jax.ShapeDtypeStruct(**options)
    return state


def with_bias() -> State:
    state = abstract(make_state(0))
    state.params["norm"]["bias"] = state.params["norm"]["scale"]
    return state


@pytest.mark.parametrize(
    "wanted, message",
    [
        (
            lambda: with_kernel(shape=(4, 8, 32)),
            r"kernel is bfloat16\[4, 8, 16\] in the checkpoint",
        ),
        (lambda: with_kernel(dtype=jnp.float32), r"and float32\[4, 8, 16\] in this run"),
        (with_bias, r"params.norm.bias is missing in the checkpoint and float32\[8\] in this run"),
    ],
)
def test_restore_into_another_model_raises_an_error(
    two_steps, open_checkpoints, caplog, wanted, message
):
    with pytest.raises(ValueError, match=message) as error:
        open_checkpoints(two_steps).restore(wanted())
    assert "2 does not match the model" in str(error.value) and "\n" not in str(error.value)
    assert not [r for r in caplog.records if r.name == "checkpoint.manager"]


def test_nothing_is_unpickled(two_steps, open_checkpoints, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, fail)
    assert open_checkpoints(two_steps).restore(abstract(make_state(0))) is not None
