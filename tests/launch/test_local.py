"""Tests of `launch.local`, which start small scripts and, once, JAX's distributed runtime."""

import os
import signal
import subprocess
import sys
import time

import pytest

from launch import local
from tests.launch.launcher import REPOSITORY, command, launch, read_pids, variables, wait_until_gone


def test_run_succeeds_and_numbers_the_lines_of_all_but_process_0(tmp_path):
    script = """
    print("out", rank)
    sys.stderr.write(f"10%\\r50%\\r100% of {rank}\\n")
    """
    done = launch(tmp_path, script, "--processes=3")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[1] out 1", "[2] out 2", "out 0"]
    # Each state of process 0's progress bar is forwarded; for process 1 only the last one is. In
    # text mode, Python reads \r as the end of a line.
    errors = sorted(done.stderr.splitlines())
    assert errors == ["10%", "100% of 0", "50%", "[1] 100% of 1", "[2] 100% of 2"]


def test_run_prints_a_last_line_without_a_newline(tmp_path):
    done = launch(tmp_path, 'sys.stdout.write(f"end {rank}")', "--processes=2")
    assert sorted(done.stdout.splitlines()) == ["[1] end 1", "end 0"]


def test_run_gives_the_terminal_only_to_process_0(tmp_path):
    ours, theirs = os.openpty()
    script = "print(rank, sys.stdout.isatty())"
    done = subprocess.run(
        command(tmp_path, script, "--processes=2"),
        cwd=REPOSITORY,
        env=variables(),
        stdout=theirs,
        timeout=60,
    )
    os.close(theirs)
    text = os.read(ours, 4096).decode()
    os.close(ours)
    assert done.returncode == 0
    # A terminal ends lines with \r\n. Process 1's line first clears the bar that process 0 may be
    # drawing.
    first = "0 True\r\n"
    second = "\r\x1b[K[1] 1 False\r\n"
    assert text in (first + second, second + first)


def test_run_sets_each_process_its_variables(tmp_path):
    script = """
    names = sorted(name for name in os.environ if name.startswith("TAIBAI_"))
    print("start", " ".join(f"{name}={os.environ[name]}" for name in names))
    print("XLA", os.environ["XLA_FLAGS"])
    print("python", sys.executable)
    """
    flags = "--xla_cpu_collective_timeout_seconds=7 --xla_dump_to=/tmp/x"
    done = launch(tmp_path, script, "--processes=2", "--devices_per_process=4", XLA_FLAGS=flags)
    lines = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if "python" in line)
    assert lines == {"python": sys.executable, "[1] python": sys.executable}
    first, second = (
        dict(
            item.split("=")
            for line in done.stdout.splitlines()
            if line.startswith(start)
            for item in line.removeprefix(start).split()
        )
        for start in ("start ", "[1] start ")
    )
    assert first["TAIBAI_COORDINATOR"].startswith("unix:/")
    assert len(first["TAIBAI_SECRET"]) == 64
    assert first | {"TAIBAI_PROCESS_ID": "1"} == second
    assert first["TAIBAI_PROCESS_ID"] == "0"
    assert first["TAIBAI_NUM_PROCESSES"] == "2"
    assert first["TAIBAI_DEVICES_PER_PROCESS"] == "4"
    (merged,) = (line for line in done.stdout.splitlines() if line.startswith("XLA "))
    assert merged.endswith(flags)
    assert "--xla_cpu_collective_call_terminate_timeout_seconds=300" in merged
    assert merged.count("xla_cpu_collective_timeout_seconds") == 1


def test_run_stops_the_others_when_one_fails(tmp_path):
    script = f"""
    folder = {str(tmp_path)!r}
    if rank == 1:
        wait_for(folder + "/ready")
        sys.exit(3)
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for name, pid in (("helper", helper.pid), ("leader", os.getpid())):
        with open(f"{{folder}}/{{name}}", "w") as file:
            file.write(f"{{pid}}\\n")
    open(folder + "/ready", "w").close()
    time.sleep(600)
    """
    done = launch(tmp_path, script, "--processes=2")
    assert done.returncode == 3
    assert done.stderr == (
        "launch.local: process 1 exited with code 3; stopping the 1 still running\n"
    )
    wait_until_gone(read_pids(tmp_path, ["helper", "leader"]))


def test_run_reports_the_signal_that_killed_a_process(tmp_path):
    script = "os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(600)"
    done = launch(tmp_path, script, "--processes=2")
    assert done.returncode == 128 + signal.SIGKILL
    assert "process 0 killed by SIGKILL; stopping the 1 still running" in done.stderr


@pytest.mark.thorough
def test_run_kills_processes_that_ignore_sigterm_after_the_grace_time(tmp_path):
    script = f"""
    ready = {str(tmp_path / "ready")!r}
    if rank == 0:
        wait_for(ready)
        sys.exit(5)
    signal.signal(signal.SIGTERM, lambda *_: print("asked to stop"))
    open(ready, "w").close()
    while True:
        time.sleep(1)
    """
    start = time.monotonic()
    done = launch(tmp_path, script, "--processes=2", "--grace_s=1")
    assert done.returncode == 5
    assert done.stdout == "[1] asked to stop\n"
    assert 1 < time.monotonic() - start < 30


def test_run_ends_children_of_a_finished_process(tmp_path):
    script = f"""
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open({str(tmp_path / "helper")!r}, "w") as file:
        file.write(f"{{helper.pid}}\\n")
    """
    assert launch(tmp_path, script, "--processes=1").returncode == 0
    wait_until_gone(read_pids(tmp_path, ["helper"]))


def test_processes_end_with_a_launcher_that_is_killed(tmp_path):
    script = f"""
    with open(f"{str(tmp_path)}/leader{{rank}}", "w") as file:
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(600)
    """
    with subprocess.Popen(
        command(tmp_path, script, "--processes=2"), cwd=REPOSITORY, env=variables()
    ) as launcher:
        pids = read_pids(tmp_path, ["leader0", "leader1"])
        launcher.kill()
    since = time.monotonic()
    wait_until_gone(pids)
    assert time.monotonic() - since < 5


def test_run_restarts_all_processes_only_after_a_failure(tmp_path):
    script = f"""
    path = f"{str(tmp_path)}/starts{{rank}}"
    with open(path, "a") as file:
        file.write("x")
    if rank == 0:
        sys.exit([1, 1, 0][os.path.getsize(path) - 1])
    """
    options = ("--processes=2", "--max_restarts=5")
    done = launch(tmp_path, script, *options)
    assert done.returncode == 0
    assert (tmp_path / "starts0").read_text() == "xxx"
    assert "launch.local: restarting (5 left)\n" in done.stderr
    refused = launch(tmp_path, "sys.exit(2)", *options)
    assert refused.returncode == 2 and "restarting" not in refused.stderr


def test_run_stops_all_processes_when_nobody_reads_the_output(tmp_path):
    script = f"""
    with open(f"{str(tmp_path)}/leader{{rank}}", "w") as file:
        file.write(f"{{os.getpid()}}\\n")
    while True:
        print("on and on")
        time.sleep(0.01)
    """
    with subprocess.Popen(
        command(tmp_path, script, "--processes=2"),
        cwd=REPOSITORY,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout and launcher.stderr
        pids = read_pids(tmp_path, ["leader0", "leader1"])
        launcher.stdout.close()
        launcher.stderr.close()
        assert launcher.wait(timeout=60) != 0
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: --processes"),
        (["--processes=0", "--", "true"], "'0' must be a whole number of at least 1"),
        (["--processes=100000000", "--", "true"], "must be a whole number of at least 1 and at mo"),
        (["--processes=" + "9" * 5000, "--", "true"], "9' must be a whole number of at least 1"),
        (["--processes=two", "--", "true"], "'two' must be a whole number of at least 1"),
        (["--processes=2", "--devices_per_process=-1", "--", "true"], "'-1' must be a whole"),
        (["--processes=2", "--grace_s=-1", "--", "true"], "'-1' must be a number of seconds"),
        (["--processes=2"], "no command to start: put one after --"),
        (["--processes=2", "--"], "no command to start: put one after --"),
        (["--processes=2", "python", "a.py"], "unknown option 'python'; the options are"),
        (["--process=2", "--", "true"], "required: --processes"),
        (["--processes=2", "--", "no_such_program"], "cannot start 'no_such_program'"),
    ],
)
def test_main_reports_bad_arguments_in_one_sentence(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        local.main(options)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.thorough
def test_run_joins_jax_processes_into_one_mesh(tmp_path):
    script = f"""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_num_cpu_devices", int(os.environ["TAIBAI_DEVICES_PER_PROCESS"]))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=os.environ["TAIBAI_COORDINATOR"],
        coordinator_bind_address=os.environ["TAIBAI_COORDINATOR"],
        num_processes=int(os.environ["TAIBAI_NUM_PROCESSES"]),
        process_id=rank,
    )
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    split = jax.sharding.NamedSharding(mesh, P("data"))
    x = jax.make_array_from_callback((4,), split, lambda index: jnp.arange(1.0, 5.0)[index])
    add = lambda x: jax.lax.psum(x, "data")
    total = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=P("data"), out_specs=P()))(x)
    sum = float(total.addressable_data(0)[0])
    with open(f"{str(tmp_path)}/result{{rank}}", "w") as file:
        file.write(f"{{jax.local_device_count()}} of {{jax.device_count()}} devices, sum {{sum}}")
    """
    done = launch(tmp_path, script, "--processes=2", "--devices_per_process=2")
    assert done.returncode == 0, done.stderr
    # The results are read from files, because gloo writes partial lines to the output.
    for rank in range(2):
        assert (tmp_path / f"result{rank}").read_text() == "2 of 4 devices, sum 10.0"
