"""The variables of launchers, their errors, and two processes that really join."""

import os
import socket
import subprocess
import sys

import pytest

from distributed.launchers import LAUNCHERS, DistributedEnv, read_distributed_env
from tests.runs import ROOT

SLURM = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[03-04]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "TAIBAI_COORDINATOR": "n03:6000",
}
TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n03",
    "MASTER_PORT": "29500",
}
#: The variables of an Indexed Job, two of which launch/jobset.yaml sets.
INDEXED_JOB = {
    "TAIBAI_NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "3",
    "TAIBAI_COORDINATOR": "taibai-workers-0-0.taibai:6000",
}


@pytest.mark.parametrize(
    ("changes", "host", "local_device_ids"),
    [
        ({}, "n03", [1]),
        ({"SLURM_STEP_NODELIST": "a7,n[1-3]"}, "a7", [1]),
        ({"SLURM_STEP_NODELIST": "n[001,007-015],x"}, "n001", [1]),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "n03", [1]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "n03", None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, "n03", None),
    ],
)
def test_slurm_says_how_a_process_was_started(changes, host, local_device_ids):
    assert read_distributed_env({**SLURM, **changes}) == DistributedEnv(
        coordinator=f"{host}:{61440 + 802}",
        num_processes=4,
        process_id=3,
        local_device_ids=local_device_ids,
    )


@pytest.mark.parametrize(
    ("env", "coordinator", "local_device_ids"),
    [
        (OPEN_MPI, "n03:6000", [1]),
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "1"}, "n03:6000", None),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "n03:6000", None),
        (TORCHRUN, "n03:29500", [1]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": ""}, "n03:29500", [1]),
        ({**TORCHRUN, "LOCAL_RANK": ""}, "n03:29500", None),
        # torchrun's own store listens on its port.
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "n03:29501", [1]),
        (INDEXED_JOB, "taibai-workers-0-0.taibai:6000", None),
        # Taibai's own variables take precedence over all others.
        ({**SLURM, **OPEN_MPI, **INDEXED_JOB}, "taibai-workers-0-0.taibai:6000", None),
        # mpirun starts one daemon on each host with srun, and they start the processes.
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **OPEN_MPI}, "n03:6000", [1]),
        # A batch script may set torchrun's variables from srun's.
        ({**TORCHRUN, **SLURM, "LOCAL_RANK": ""}, f"n03:{61440 + 802}", [1]),
    ],
)
def test_other_launchers_say_how_a_process_was_started(env, coordinator, local_device_ids):
    assert read_distributed_env(env) == DistributedEnv(
        coordinator=coordinator, num_processes=4, process_id=3, local_device_ids=local_device_ids
    )


def test_single_process_joins_nobody():
    assert read_distributed_env({}) is None
    assert read_distributed_env({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert read_distributed_env({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}) is None
    assert read_distributed_env({"WORLD_SIZE": "1"}) is None
    assert read_distributed_env({"JOB_COMPLETION_INDEX": "3"}) is None  # one run for each index
    assert read_distributed_env({**SLURM, "TAIBAI_NUM_PROCESSES": "1"}) is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TAIBAI_NUM_PROCESSES": "two"}, "TAIBAI_NUM_PROCESSES='two' must be an integer from 1"),
        ({"TAIBAI_NUM_PROCESSES": "9" * 5000}, r"TAIBAI_NUM_PROCESSES='9+… must be an integer"),
        (
            {"TAIBAI_NUM_PROCESSES": "2"},
            "TAIBAI_COORDINATOR is missing, but TAIBAI_NUM_PROCESSES='2' announces several "
            "processes; set TAIBAI_COORDINATOR to host:port of process 0 in all of them, or unset",
        ),
        (
            {"TAIBAI_NUM_PROCESSES": "2", "TAIBAI_COORDINATOR": "a:1", "TAIBAI_PROCESS_ID": "2"},
            "TAIBAI_PROCESS_ID='2' must be an integer from 0 to 1; correct it",
        ),
        (
            {"TAIBAI_NUM_PROCESSES": "2", "TAIBAI_COORDINATOR": "a:1"},
            "TAIBAI_PROCESS_ID is missing, but TAIBAI_NUM_PROCESSES='2' announces",
        ),
        (
            {"TAIBAI_COORDINATOR": "a:1", "TAIBAI_PROCESS_ID": "1"},
            "TAIBAI_NUM_PROCESSES is missing, but TAIBAI_PROCESS_ID='1' is set; set it to the",
        ),
        (
            {**INDEXED_JOB, "TAIBAI_COORDINATOR": "taibai-workers-0-0"},
            "TAIBAI_COORDINATOR='taibai-workers-0-0' must be host:port of process 0, such as n1:60",
        ),
        ({**INDEXED_JOB, "TAIBAI_COORDINATOR": "a:99999"}, ".*'a:99999' must be host:port of pro"),
        ({"SLURM_STEP_NUM_TASKS": "-1"}, "SLURM_STEP_NUM_TASKS='-1' must be an integer from 1"),
        (
            {**SLURM, "SLURM_STEP_NODELIST": ""},
            "SLURM_STEP_NODELIST is missing, but SLURM",
        ),
        ({**SLURM, "SLURM_STEP_NODELIST": "[1-2]"}, r"SLURM_STEP_NODELIST='\[1-2\]' names no host"),
        ({**SLURM, "SLURM_JOB_ID": ""}, "SLURM_JOB_ID is missing"),
        ({"WORLD_SIZE": "8"}, "RANK is missing, but WORLD_SIZE='8' announces several processes"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is missing, but WORLD_SIZE='4' announces"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT='70000' must be an integer from 1 to"),
        ({**OPEN_MPI, "TAIBAI_COORDINATOR": ""}, "TAIBAI_COORDINATOR is missing, but OMPI_COMM_WO"),
        (
            {**SLURM, **TORCHRUN, "WORLD_SIZE": "32", "RANK": "30"},
            r"WORLD_SIZE=32 \(torchrun\) says that this is process 30 of 32, but "
            r"SLURM_STEP_NUM_TASKS=4 \(srun\) says that this is process 3 of 4; unset the variable "
            "whose launcher did not start this process$",
        ),
        (
            {**OPEN_MPI, **TORCHRUN, "RANK": "2"},
            r"WORLD_SIZE=4 \(torchrun\) says .* 2 of 4, but",
        ),
    ],
)
def test_variables_of_launchers_are_checked(env, message):
    with pytest.raises(ValueError, match=f"^(the environment variable )?{message}"):
        read_distributed_env(env)


def test_docs_list_the_variables_of_all_launchers():
    text = (ROOT / "docs" / "many_hosts.md").read_text(encoding="utf-8")
    for launcher in LAUNCHERS:
        names = {launcher.num_processes, launcher.process_id, launcher.fallback_process_id}
        lost = [name for name in names | {launcher.local_process_id} if f"`{name}`" not in text]
        assert set(lost) <= {""}


#: Variables of two processes on this machine, with places for numbers that differ.
PAIRS = {
    "srun": {
        **SLURM,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": "{job}",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "{process_id}",
    },
    "open_mpi": {
        **OPEN_MPI,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "{process_id}",
        "TAIBAI_COORDINATOR": "127.0.0.1:{port}",
    },
    "torchrun": {
        **TORCHRUN,
        "WORLD_SIZE": "2",
        "RANK": "{process_id}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "{port}",
    },
    "indexed_job": {
        "TAIBAI_NUM_PROCESSES": "2",
        "JOB_COMPLETION_INDEX": "{process_id}",
        "TAIBAI_COORDINATOR": "localhost:{port}",
    },
}


@pytest.mark.parametrize("launcher", PAIRS)
@pytest.mark.thorough
def test_two_processes_join(launcher):
    prefixes = ("TAIBAI_", "SLURM_", "OMPI_", "XLA_")
    shared = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    shared |= {"JAX_PLATFORMS": "cpu", "TAIBAI_DEVICES_PER_PROCESS": "2", "TAIBAI_SECRET": "a" * 64}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for process_id in range(2):
        # The job's number, from which the port follows, is as unlikely to be taken as the port.
        own = {
            name: value.format(process_id=process_id, port=port, job=port)
            for name, value in PAIRS[launcher].items()
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "docs.examples.shard_a_tensor"],
                cwd=ROOT,
                env=shared | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process_id, output in enumerate(outputs):
        assert f"process {process_id}: global shape (16, 8), local shapes" in output
