"""Standard streams that are closed or missing, or whose reader leaves."""

import json
import subprocess
import sys

import pytest

from tests.runs import ROOT, TINY, arguments
from tests.test_imports import MAY_IMPORT

#: Prints, opens a file, and lets a library write to the descriptors of the standard streams.
PROGRAM = """
import json, os, sys
from untrusted.streams import protect_output
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


@pytest.mark.thorough
@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-", "2>&1 | true"])
def test_run_without_standard_streams_trains_and_saves(redirections, corpus_overrides, tmp_path):
    overrides = (*TINY, *corpus_overrides, "train.num_steps=2", "model.num_layers=1")
    command = [sys.executable, "-m", "train.main", *arguments(tmp_path, overrides)]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirections}; exit ${{PIPESTATUS[0]}}', "bash", *command],
        cwd=ROOT,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.drawn(1)
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


#: Prints endlessly, with an error of another file in between.
ENDLESS = """
from untrusted.commands import run_command

def main():
    while True:
        try:
            print("line", flush=True)
        except OSError:
            return 2

run_command(main)
"""


def piped(command: list[str], reader: str) -> subprocess.CompletedProcess:
    """Run a command whose output a reader in the shell gets; return the code of the command."""
    return subprocess.run(
        ["bash", "-c", f'"$@" | {reader}; exit ${{PIPESTATUS[0]}}', "bash", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("program", "output"),
    [
        (ENDLESS, "line\n"),
        # Without flush=True, the output reaches the pipe when the interpreter shuts down.
        ("from untrusted.commands import run_command; run_command(lambda: print('line'))", ""),
        (
            "import argparse; from untrusted.commands import run_command; "
            "run_command(lambda: argparse.ArgumentParser().parse_args(['--help']))",
            "",
        ),
    ],
)
def test_command_whose_reader_leaves_ends_without_a_message(program, output):
    reader = "head -n 1" if output else "true"
    # The reader of a short output has left before the program starts.
    program = program if output else f"import time; time.sleep(0.5); {program}"
    done = piped([sys.executable, "-c", program], reader)
    assert (done.returncode, done.stdout, done.stderr) == (141, output, "")


def test_command_whose_output_is_on_a_full_disk_ends_with_one_sentence():
    program = "from untrusted.commands import run_command; run_command(lambda: print('line'))"
    done = piped(["bash", "-c", '"$@" > /dev/full', "bash", sys.executable, "-c", program], "cat")
    error = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, error)


def test_command_that_is_interrupted_ends_with_one_line_after_cleaning_up():
    program = """
import contextlib, os, signal
from untrusted.commands import run_command
def main():
    with contextlib.ExitStack() as stack:
        stack.callback(print, "cleaned up")
        os.kill(os.getpid(), signal.SIGINT)
run_command(main)
"""
    done = piped([sys.executable, "-c", program], "cat")
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "interrupted\n")


@pytest.mark.parametrize("code", [0, 2, None])
def test_command_ends_with_the_code_of_its_main_function(code):
    program = f"from untrusted.commands import run_command; run_command(lambda: {code})"
    assert piped([sys.executable, "-c", program], "cat").returncode == (code or 0)


def test_reader_that_leaves_is_no_error_of_the_input_of_a_command():
    options = ["--stages=64", "--microbatches=512"]  # more output than a pipe holds
    done = piped([sys.executable, "-m", "pipeline.schedule", *options], "head -n 1")
    assert (done.returncode, done.stderr) == (141, "")


def test_launcher_whose_reader_leaves_returns_the_code_of_its_processes():
    launch = [sys.executable, "-m", "launch.local", "--processes=2", "--"]
    done = piped([*launch, "python", "-c", "import time; time.sleep(1); print(1)"], "true")
    assert (done.returncode, done.stderr) == (0, "")


#: Runs, the server and the launcher, which no reader may stop, and an internal command.
OTHERS = (
    "train/main.py",
    "launch/local.py",
    "generate/serve/__main__.py",
    "data/images/workers.py",
)


def test_every_command_ends_when_its_reader_leaves():
    found = set()
    for file in (file for folder in MAY_IMPORT for file in (ROOT / folder).rglob("*.py")):
        _, mark, end = file.read_text(encoding="utf-8").partition('\nif __name__ == "__main__":\n')
        if mark and "run_command(" not in end:
            found.add(str(file.relative_to(ROOT)))
    assert found == {*OTHERS}, "use run_command of untrusted/commands.py"
