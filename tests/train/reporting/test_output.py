"""Standard streams that are closed or missing do not affect a run."""

import json
import subprocess
import sys

import pytest

from tests.runs import ROOT, TINY, arguments

#: Prints, opens a file, and lets a library write to the descriptors of the standard streams.
PROGRAM = """
import json, os, sys
from train.reporting.output import protect_output
protect_output()
print("to stdout")
print("to stderr", file=sys.stderr)
sys.stdout.flush()
with open(sys.argv[1], "w") as file:
    for descriptor in (1, 2):
        os.write(descriptor, b"from a library")
    read = sys.stdin.read() if sys.argv[2] == "0" else ""
    child = os.system("test -e /dev/fd/0 && test -e /dev/fd/1 && test -e /dev/fd/2")
    json.dump({"descriptor": file.fileno(), "read": read, "child": child}, file)
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_protect_output_opens_dev_null_in_place_of_closed_streams(closed, tmp_path):
    file = tmp_path / "file"
    command = [sys.executable, "-c", PROGRAM, str(file), str(closed[0])]
    redirections = " ".join(f"{descriptor}>&-" for descriptor in closed)
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirections}', "bash", *command], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["descriptor"] > 2 and found["read"] == "" and found["child"] == 0


@pytest.mark.thorough(but=["<&- >&- 2>&-"])
@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_run_without_standard_streams_trains_and_saves(redirections, corpus_overrides, tmp_path):
    overrides = (*TINY, *corpus_overrides, "train.num_steps=2", "model.num_layers=1")
    command = [sys.executable, "-m", "train.main", *arguments(tmp_path, overrides)]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirections}', "bash", *command],
        cwd=ROOT,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_launcher_without_standard_streams_returns_the_code_of_its_processes(redirections):
    launch = [sys.executable, "-m", "launch.local", "--processes=2", "--"]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirections}', "bash", *launch, "python", "-c", "print(1)"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_report_whose_reader_leaves_ends_without_a_traceback():
    program = "from train.reporting.output import print_report; print_report('line\\n' * 1_000_000)"
    done = subprocess.run(
        ["bash", "-c", '"$@" | head -n 1; exit ${PIPESTATUS[0]}', "bash"]
        + [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "line\n", "")
