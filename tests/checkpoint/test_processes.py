"""Checkpoints of processes that are killed, and of several processes that share a directory."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.checkpoint.states import make_state

ROOT = Path(__file__).parents[2]

# Saves one step after another without a pause, so that a save is in progress at any moment.
SAVER = """
import sys
import jax.numpy as jnp
import numpy as np
from checkpoint.checksums import write_checksums
from checkpoint.config import CheckpointConfig
from checkpoint.manager import Checkpoints
from checkpoint.errors import SaveError

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


@pytest.mark.thorough
def test_kill_during_a_save_leaves_an_intact_checkpoint(tmp_path, open_checkpoints):
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


# Two processes with two devices each save checkpoints. The second one cannot read its part for a
# while, and then a file is damaged that it verifies.
TWO_PROCESSES = """
import errno
import sys
import jax
directory, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pathlib import Path
from checkpoint import errors
from checkpoint.config import CheckpointConfig
from checkpoint.manager import Checkpoints
from distributed.messages import may_pass
from tests.checkpoint.faults import fail_to_read

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, P("data", "model"))
values = np.arange(64, dtype=np.float32).reshape(8, 8)
config = CheckpointConfig(every_steps=1, max_to_keep=3)
checkpoints = Checkpoints(directory, config)
for step in (1, 2):
    state = {"w": jax.make_array_from_callback((8, 8), sharding, lambda i: values[i] + step)}
    checkpoints.save(step, state, {"position": step})
checkpoints.wait()
wanted = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)}

# One process cannot read its part for a while: no process skips the checkpoint.
errors.DELAYS_S = (0.0,)
with pytest.MonkeyPatch.context() as patch:
    if process == 1:
        fail_to_read(patch, Path(directory), errno.EIO)
    try:
        checkpoints.restore(wanted)
        raise AssertionError("a checkpoint was restored that process 1 could not read")
    except OSError as error:
        assert may_pass(error) and "cannot be read (Input/output error)" in str(error), error
assert checkpoints.restore(wanted)[0] == 2

if process == 0:
    names = sorted(p for p in Path(directory, "2").rglob("*") if p.parent.name != "2")
    names = [p for p in names if p.is_file()]
    names[1].write_bytes(b"garbage")
multihost_utils.sync_global_devices("damaged")
step, state, data_state = checkpoints.restore(wanted)
assert (step, data_state) == (1, {"position": 1}), (step, data_state)
for shard in state["w"].addressable_shards:
    assert np.array_equal(shard.data, values[shard.index] + 1)
assert checkpoints.save(2, state, {"position": 2})
checkpoints.close()
print("restored")
"""


@pytest.mark.thorough
def test_two_processes_agree_on_unreadable_and_damaged_checkpoints(tmp_path, open_checkpoints):
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
