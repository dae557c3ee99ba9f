"""Tests of `checkpoint.manager`: save and restore on any mesh, damage, kills, several processes."""

import dataclasses
import functools
import logging
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from checkpoint.checksums import write_checksums
from checkpoint.manager import CheckpointConfig, Checkpoints, SaveError

KEEP = CheckpointConfig(every_steps=1, max_to_keep=3)
ROOT = Path(__file__).parents[2]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state"], meta_fields=[]
)
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: Any


def make_mesh(pipeline: int, data: int, model: int) -> jax.sharding.Mesh:
    sizes = (pipeline, data, model)
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(
        sizes, ("pipeline", "data", "model"), axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def shardings(mesh: jax.sharding.Mesh, tree):
    """Shard blocks over pipeline and model, the embedding over data and model; replicate others."""

    def one(x):
        spec = {3: P("pipeline", None, "model"), 2: P("data", "model")}.get(x.ndim, P())
        return NamedSharding(mesh, spec)

    return jax.tree.map(one, tree)


def make_state(seed: int, mesh: jax.sharding.Mesh | None = None) -> State:
    rng = np.random.default_rng(seed)
    params = {
        "embed": {"table": jnp.asarray(rng.normal(size=(32, 8)), jnp.float32)},
        "blocks": {"kernel": jnp.asarray(rng.normal(size=(4, 8, 16)), jnp.bfloat16)},
        "norm": {"scale": jnp.asarray(rng.normal(size=8), jnp.float32)},
    }
    state = State(jnp.int32(seed), params, optax.adamw(1e-3).init(params))
    return jax.device_put(state, shardings(mesh or make_mesh(1, 1, 1), state))


def abstract(state: State, mesh: jax.sharding.Mesh | None = None) -> State:
    wanted = shardings(mesh or make_mesh(1, 1, 1), state)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, wanted
    )


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def open_checkpoints():
    """A function that opens `Checkpoints`, which are closed after the test."""
    opened = []

    def open_(directory, config=KEEP):
        opened.append(Checkpoints(directory, config))
        return opened[-1]

    yield open_
    for checkpoints in opened:
        checkpoints.close()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Checkpoints 1 and 2, saved on a 2×2×2 mesh. Tests that change them must work on a copy."""
    directory = tmp_path_factory.mktemp("two_steps") / "checkpoints"
    checkpoints = Checkpoints(directory, KEEP)
    for step in (1, 2):
        checkpoints.save(step, make_state(step, make_mesh(2, 2, 2)), {"position": step})
    checkpoints.close()
    return directory


@pytest.fixture
def damaged_copy(two_steps, tmp_path):
    def copy(name="copy"):
        return Path(shutil.copytree(two_steps, tmp_path / name))

    return copy


@pytest.mark.parametrize(
    "key, value",
    [
        ("every_steps", -1),
        ("every_minutes", 0.0),
        ("every_minutes", float("nan")),
        ("max_to_keep", 0),
        ("keep_best", -1),
    ],
)
def test_config_names_the_key_that_is_wrong(key, value):
    with pytest.raises(ValueError, match=rf"checkpoint\.{key}={value} .*choose"):
        fields: dict[str, Any] = {"every_steps": 10, "max_to_keep": 2, key: value}
        CheckpointConfig(**fields)


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

    monkeypatch.setattr("checkpoint.manager.write_checksums", write_when_told)
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


def test_only_the_newest_stay_and_none_is_saved_twice(tmp_path, open_checkpoints):
    checkpoints = open_checkpoints(tmp_path)
    assert [checkpoints.save(step, make_state(step), {}) for step in (10, 20, 30, 40)] == [True] * 4
    assert not checkpoints.save(40, make_state(0), {})
    checkpoints.wait()
    assert checkpoints.all_steps() == [20, 30, 40] and checkpoints.latest_step() == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["20", "30", "40"]
    assert open_checkpoints(tmp_path).restore(abstract(make_state(0)))[1].step == 40


def flip_a_bit(path: Path):
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "flipped bit": flip_a_bit,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": Path.unlink,
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_restore_passes_over_a_damaged_file_whichever_it_is(
    two_steps, tmp_path, open_checkpoints, caplog, damage
):
    wanted = abstract(make_state(0))
    contents = {step: make_state(step) for step in (1, 2)}
    files = sorted(p.relative_to(two_steps) for p in (two_steps / "2").rglob("*") if p.is_file())
    assert len(files) > 6  # the exact number depends on how Orbax groups array data into files
    for index, name in enumerate(files):
        directory = Path(shutil.copytree(two_steps, tmp_path / str(index)))
        DAMAGES[damage](directory / name)
        caplog.clear()
        step, state, data_state = open_checkpoints(directory).restore(wanted)
        assert_same_bits(state, contents[step])
        assert data_state == {"position": step}
        assert step == 1, f"{damage} {name} went unnoticed"
        (warning,) = [r for r in caplog.records if r.name == "checkpoint.manager"]
        assert warning.levelno == logging.WARNING
        assert str(directory / "2") in warning.getMessage()
        # A flipped bit in the checksum list may change a file's name; then the warning names it.
        if damage != "flipped bit" or name.name != "checksums.sha256":
            assert name.relative_to("2").as_posix() in warning.getMessage()


def test_restore_notices_a_checksum_list_cut_between_two_lines(damaged_copy, open_checkpoints):
    directory = damaged_copy()
    sums = directory / "2" / "checksums.sha256"
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(lines[:3]))
    assert open_checkpoints(directory).restore(abstract(make_state(0)))[0] == 1


@pytest.mark.parametrize("unfinished", ["", "state", "checksums.sha256"])
def test_restore_passes_over_a_checkpoint_that_was_never_finished(
    damaged_copy, open_checkpoints, caplog, unfinished
):
    """Other tools may leave an empty directory, a state without checksums, or only checksums."""
    directory = damaged_copy()
    (directory / "3").mkdir()
    if unfinished == "state":
        shutil.copytree(directory / "2" / "state", directory / "3" / "state")
    elif unfinished:
        shutil.copy(directory / "2" / unfinished, directory / "3")
    assert open_checkpoints(directory).restore(abstract(make_state(0)))[0] == 2
    assert str(directory / "3") in caplog.text and "missing" in caplog.text


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_checksums_can_be_checked_by_coreutils(two_steps):
    command = ["sha256sum", "--check", "--strict", "checksums.sha256"]
    subprocess.run(command, cwd=two_steps / "2", check=True, capture_output=True)


def test_restore_with_all_damaged_is_an_error_that_names_the_directory(
    damaged_copy, open_checkpoints
):
    directory = damaged_copy()
    for path in directory.glob("*/state/_METADATA"):
        flip_a_bit(path)
    checkpoints = open_checkpoints(directory)
    for _ in range(2):  # the second call must not treat the directory as empty
        with pytest.raises(ValueError, match=rf"all checkpoints in {directory} .*steps 1, 2"):
            checkpoints.restore(abstract(make_state(0)))


def test_a_damaged_checkpoint_goes_when_another_is_complete(
    damaged_copy, open_checkpoints, monkeypatch
):
    """It is kept until then, because a file that cannot be read now may be readable later."""
    directory = damaged_copy()
    flip_a_bit(directory / "2" / "data_state" / "metadata")
    checkpoints = open_checkpoints(directory)
    assert checkpoints.restore(abstract(make_state(0)))[0] == 1

    def fail(_):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr("checkpoint.manager.write_checksums", fail)
        checkpoints.save(3, make_state(3), {})
        with pytest.raises(SaveError):
            checkpoints.wait()
    assert (directory / "2").exists()
    assert checkpoints.all_steps() == [1]
    checkpoints.save(3, make_state(3), {})
    checkpoints.wait()
    assert checkpoints.all_steps() == [1, 3]
    assert sorted(path.name for path in directory.iterdir()) == ["1", "3"]


def test_tidy_removes_what_a_killed_process_left(damaged_copy, open_checkpoints):
    directory = damaged_copy()
    for name in ("3.orbax-checkpoint-tmp-1", "1.orbax-checkpoint-tmp-deleted-4"):
        shutil.copytree(directory / "1", directory / name)
    open_checkpoints(directory).tidy()
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]


def test_save_replaces_a_damaged_checkpoint_that_was_passed_over(damaged_copy, open_checkpoints):
    directory = damaged_copy()
    flip_a_bit(directory / "2" / "data_state" / "metadata")
    checkpoints = open_checkpoints(directory)
    assert checkpoints.restore(abstract(make_state(0)))[0] == 1
    assert checkpoints.all_steps() == [1]
    assert (directory / "2").exists(), "restore must not delete anything"
    assert checkpoints.save(2, make_state(7), {"position": 7})
    checkpoints.wait()
    step, state, data_state = open_checkpoints(directory).restore(abstract(make_state(0)))
    assert (step, data_state) == (2, {"position": 7})
    assert_same_bits(state, make_state(7))


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
def test_restore_into_another_model_is_an_error(
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


# Saves one step after another without a pause, so that a save is in progress at any moment.
SAVER = """
import sys
import jax.numpy as jnp
import numpy as np
from checkpoint.checksums import write_checksums
from checkpoint.manager import CheckpointConfig, Checkpoints, SaveError

checkpoints = Checkpoints(sys.argv[1], CheckpointConfig(every_steps=1, max_to_keep=2))
step = checkpoints.latest_step() or 0
while True:
    step += 1
    state = {f"w{i}": jnp.full((512, 1024), step, jnp.float32) for i in range(4)}
    checkpoints.save(step, state, {"position": step})
    print(step, flush=True)
"""


def start_python(program: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_kill_in_the_middle_of_a_save_leaves_an_intact_checkpoint(tmp_path, open_checkpoints):
    one_device = SingleDeviceSharding(jax.devices()[0])
    wanted = {
        f"w{i}": jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=one_device)
        for i in range(4)
    }
    moments = random.Random(time.time_ns())
    for _ in range(3):
        with start_python(SAVER, str(tmp_path)) as process:
            assert process.stdout is not None
            # The program prints n + 1 only after it has committed step n.
            first = int(process.stdout.readline())
            last = int(process.stdout.readline())
            assert last == first + 1
            time.sleep(moments.uniform(0, 0.4))
            process.send_signal(signal.SIGKILL)
            process.wait()
            last = max([last, *map(int, process.stdout.read().split())])
        step, state, data_state = open_checkpoints(tmp_path).restore(wanted)
        assert step in (last - 1, last, last + 1), "a committed checkpoint was lost"
        assert data_state == {"position": step}
        assert all(np.all(np.asarray(leaf) == step) for leaf in state.values())
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(last + 2, state, {})
    checkpoints.wait()
    assert not list(tmp_path.glob("*tmp*")), "half-written checkpoints were left behind"


# Two processes with two devices each save checkpoints, damage a file that the second process
# verifies, and restore.
TWO_PROCESSES = """
import sys
import jax
directory, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pathlib import Path
from checkpoint.checksums import write_checksums
from checkpoint.manager import CheckpointConfig, Checkpoints, SaveError

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, P("data", "model"))
values = np.arange(64, dtype=np.float32).reshape(8, 8)
config = CheckpointConfig(every_steps=1, max_to_keep=3)
checkpoints = Checkpoints(directory, config)
for step in (1, 2):
    state = {"w": jax.make_array_from_callback((8, 8), sharding, lambda i: values[i] + step)}
    checkpoints.save(step, state, {"position": step})
checkpoints.wait()
if process == 0:
    names = sorted(p for p in Path(directory, "2").rglob("*") if p.parent.name != "2")
    names = [p for p in names if p.is_file()]
    names[1].write_bytes(b"garbage")
multihost_utils.sync_global_devices("damaged")
wanted = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)}
step, state, data_state = checkpoints.restore(wanted)
assert (step, data_state) == (1, {"position": 1}), (step, data_state)
for shard in state["w"].addressable_shards:
    assert np.array_equal(shard.data, values[shard.index] + 1)
assert checkpoints.save(2, state, {"position": 2})
checkpoints.close()
print("restored")
"""


def test_two_processes_agree_on_what_is_damaged(tmp_path, open_checkpoints):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [start_python(TWO_PROCESSES, str(tmp_path), port, str(i)) for i in range(2)]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and "restored" in output, errors
        assert re.search(r"Skipping checkpoint \S+/2: ", errors)
    wanted = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=make_state(0).step.sharding)}
    step, state, _ = open_checkpoints(tmp_path).restore(wanted)
    assert step == 2
    assert np.array_equal(state["w"], np.arange(64).reshape(8, 8) + 1)
