"""What `launch/train.sbatch` does with the output of the programs that it starts."""

import os
import re
import subprocess

import pytest

from tests.runs import ROOT

#: A site's wrapper around srun may print anything; here it does so instead of training.
SRUN = """#!/bin/bash
echo 'touch printed'
echo 'export LD_PRELOAD=evil.so; touch printed'
echo '$(touch printed)' '`touch printed`'
echo 'TAIBAI_SECRET=$(touch printed)' >&2
env > environment
printf '%s\\n' "$@" > arguments
"""


def run_script(tmp_path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with programs that record how they were called in place of SLURM's."""
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (tmp_path / "bin" / name).write_text(SRUN)
        (tmp_path / "bin" / name).chmod(0o755)
    variables |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "host"}
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "train.sbatch"), *arguments],
        env=os.environ | variables | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_output_of_srun_is_not_executed(tmp_path):
    done = run_script(tmp_path, "--config=$(touch printed)")
    assert done.returncode == 0, done.stderr
    assert "$(touch printed) `touch printed`" in done.stdout  # It was passed on, to the log.
    assert "--config=$(touch printed)" in (tmp_path / "arguments").read_text().splitlines()
    environment = (tmp_path / "environment").read_text()
    assert "LD_PRELOAD=evil.so" not in environment
    # 64 hexadecimal digits, of 32 random bytes.
    assert re.search(r"^TAIBAI_SECRET=[0-9a-f]{64}$", environment, re.MULTILINE)
    assert not (tmp_path / "printed").exists()


#: The end of every command, on the host and in the container.
TRAIN = ["-m", "launch.environment", "--", "python", "-m", "train.main", "--config=a b"]


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        (
            {},
            [
                "--container-image=taibai.sqsh",
                "--container-mounts={cwd}:{cwd},/shared:/shared",
                "--container-workdir={cwd}",
                "python",
            ],
        ),
        (
            {"TAIBAI_CONTAINER_RUNTIME": "apptainer"},
            ["apptainer", "exec", "--nv", "--bind", "{cwd}:{cwd},/shared:/shared"]
            + ["--pwd", "{cwd}", "taibai.sqsh", "python"],
        ),
    ],
    ids=["pyxis", "apptainer"],
)
def test_container_starts_the_same_command(tmp_path, runtime, expected):
    container = {"TAIBAI_CONTAINER": "taibai.sqsh", "TAIBAI_MOUNTS": "/shared:/shared"}
    done = run_script(tmp_path, "--config=a b", **container, **runtime)
    assert done.returncode == 0, done.stderr
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[0] == "--kill-on-bad-exit=0"
    command = [each.format(cwd=tmp_path) for each in expected] + TRAIN
    assert arguments[-len(command) :] == command


def test_python_of_the_container_can_be_chosen(tmp_path):
    run_script(tmp_path, TAIBAI_CONTAINER="image", TAIBAI_PYTHON="/opt/own/python")
    assert (tmp_path / "arguments").read_text().split().count("/opt/own/python") == 2


def test_without_a_container_the_repository_s_environment_is_used(tmp_path):
    run_script(tmp_path)
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.split().count(".venv/bin/python") == 2 and "container" not in arguments


def test_unknown_container_runtime_is_refused(tmp_path):
    container = {"TAIBAI_CONTAINER": "image", "TAIBAI_CONTAINER_RUNTIME": "docker"}
    done = run_script(tmp_path, **container)
    assert done.returncode == 2 and not (tmp_path / "arguments").exists()
    message = "error: TAIBAI_CONTAINER_RUNTIME=docker must be pyxis or apptainer\n"
    assert done.stderr == message


def test_script_evaluates_no_text():
    lines = (ROOT / "launch" / "train.sbatch").read_text().splitlines()
    code = [line for line in lines if not line.lstrip().startswith("#")]
    assert not [line for line in code if "eval" in line.split() or "source" in line.split()]
    captured = [line for line in code if "$(" in line and ("srun" in line or "{run[" in line)]
    assert not captured


def test_docs_list_the_variables_of_the_script():
    text = (ROOT / "launch" / "train.sbatch").read_text(encoding="utf-8")
    names = {*re.findall(r"\$\{(TAIBAI_\w+|SLURM_WAIT)", text)}
    page = (ROOT / "docs" / "clusters" / "slurm.md").read_text(encoding="utf-8")
    assert names == {*re.findall(r"^\| `(\w+)`", page, re.MULTILINE)}
