"""Runs whose workdir is in an object store, on a local S3 server."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import checkpoint.__main__ as checkpoint
import generate.__main__ as generate
import train.report.__main__ as report
from checkpoint.layout import steps_in
from convert import to_hf
from tests.launch.launcher import variables
from tests.runs import ROOT, TINY, arguments, write_corpus
from tests.stores import S3Server, running_server, use_server
from train.lifecycle.exit_codes import FAILED, FINISHED, REFUSED
from train.main import main as train
from train.reporting.metrics import read_metrics

pytestmark = [pytest.mark.thorough, pytest.mark.drawn(3, among="thorough")]

URL = "s3://bucket/runs/a"
RUN = "runs/a"
SETTINGS = (
    *TINY,
    "train.num_steps=120",
    "checkpoint.every_steps=20",
    "checkpoint.max_to_keep=2",
    "eval.every_steps=40",
)
_LONGEST_S = 240.0


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(autouse=True)
def empty_bucket(server: S3Server):
    yield
    server.delete("")


@pytest.fixture
def settings(tmp_path) -> tuple[str, ...]:
    return (*SETTINGS, *write_corpus(tmp_path))


def environment(server: S3Server, cache: Path, **changes: str) -> dict[str, str]:
    return variables(**server.variables, XDG_CACHE_HOME=str(cache), **changes)


def start(environment: dict[str, str], log: Path, *command: str) -> subprocess.Popen:
    with open(log, "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
        )


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
    )


def training(settings: Sequence[str]) -> list[str]:
    """Return the command that trains in the store."""
    return ["train.main", *arguments(Path(), settings), f"--workdir={URL}"]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + _LONGEST_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.02)


def losses(lines: Sequence[dict]) -> list[tuple]:
    return [
        (line["step"], key, line[key])
        for line in lines
        for key in ("loss", "eval_loss")
        if key in line
    ]


def test_run_survives_its_kill_and_restarts_of_the_server(server, settings, tmp_path):
    """An undisturbed run in a local folder has bitwise equal losses."""
    on_this_machine = environment(server, tmp_path / "cache")
    local = run(on_this_machine, "train.main", *arguments(tmp_path / "local", settings))
    assert local.returncode == FINISHED, local.stderr

    log = tmp_path / "killed.log"
    killed = start(on_this_machine, log, *training(settings))
    wait_until(lambda: len(server.steps(RUN)) >= 1, killed, log)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    saved = server.steps(RUN)
    (copy,) = (tmp_path / "cache").glob("taibai/stores/*/a")
    assert saved and saved[-1] < 120
    assert read_metrics(copy / "metrics.jsonl")[-1]["step"] > saved[-1], "killed during a save"

    server.stop()
    unreachable = run(on_this_machine, *training(settings))
    assert unreachable.returncode == FAILED, unreachable.stderr
    assert f"{URL}/lock cannot be reached" in unreachable.stderr
    server.start()
    assert server.steps(RUN) == saved

    # Another machine has no copy; the lock of the killed process would be stale after 45 s.
    server.delete(f"{RUN}/lock")
    log = tmp_path / "resumed.log"
    resumed = start(environment(server, tmp_path / "other"), log, *training(settings))
    wait_until(lambda: server.steps(RUN)[-1] > saved[-1], resumed, log)
    server.stop()
    wait_until(lambda: "trying again" in log.read_text(), resumed, log)
    server.start()
    assert resumed.wait(_LONGEST_S) == FINISHED, log.read_text()

    assert (
        f"step {saved[-1]} of train.num_steps=120 is saved; resuming from there" in log.read_text()
    )
    assert losses(server.metrics(RUN)) == losses(read_metrics(tmp_path / "local" / "metrics.jsonl"))
    assert server.steps(RUN) == [100, 120]
    assert not server.keys(f"{RUN}/lock")


@pytest.fixture
def client(server: S3Server, tmp_path, monkeypatch) -> S3Server:
    """The server, which this process uses with an empty cache."""
    use_server(monkeypatch, server, tmp_path / "cache")
    return server


@pytest.mark.usefixtures("shared_steps")
def test_commands_read_a_run_in_the_store(client, tmp_path, capsys):
    """On a machine that has no copy of it, and from its second checkpoint of two."""
    (tmp_path / "texts").mkdir()
    data = write_corpus(tmp_path / "texts")
    client.put("texts/a.txt", (tmp_path / "texts" / "part_0.txt").read_bytes())
    overrides = (*TINY, *data, "data.paths=s3://bucket/texts/*.txt", "checkpoint.every_steps=2")
    overrides += ("train.num_steps=4", "eval.every_steps=2")
    assert train([*arguments(Path(), overrides), f"--workdir={URL}"]) == FINISHED
    assert client.steps(RUN) == [2, 4]
    copies = tmp_path / "cache" / "taibai" / "stores"

    def only_downloads(steps: list[int]) -> None:
        (copy,) = copies.glob("*/a")
        assert steps_in(copy / "checkpoints") == steps
        shutil.rmtree(copies)

    shutil.rmtree(copies)
    capsys.readouterr()
    assert report.main([URL, f"--out={tmp_path}/report.html"]) == 0
    only_downloads([])
    assert checkpoint.main(["verify", URL]) == 0
    assert "step 2: intact" in (output := capsys.readouterr().out) and "step 4: intact" in output
    only_downloads([2, 4])
    assert generate.main([f"--model={URL}", "--prompt=def", "--max_new_tokens=2"]) == 0
    newest = capsys.readouterr().out
    only_downloads([4])
    of_step = [f"--model={URL}/checkpoints/2", "--prompt=def", "--max_new_tokens=2"]
    assert generate.main(of_step) == 0 and newest
    only_downloads([2])
    assert to_hf.main([URL, str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    started = [*arguments(tmp_path / "next", overrides), f"--config.init_from={URL}"]
    assert train([*started, "--config.train.num_steps=1"]) == FINISHED
    assert train([*arguments(Path(), overrides), f"--workdir={URL}", "--mode=eval"]) == FINISHED
    assert "step 4 eval_loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "changes", "message"),
    [
        ("s3://no-bucket/run", {}, "s3://no-bucket/run/lock: the bucket does not exist"),
        (URL, {"AWS_ACCESS_KEY_ID": None}, "no valid credentials"),
        ("gs://bucket/run", {}, "run 'pip install gcsfs'"),
        ("s3://bucket", {}, "only runs, as s3://BUCKET/FOLDER"),
    ],
)
def test_unusable_store_is_refused(url, changes, message, client, tmp_path, monkeypatch, capsys):
    for name in changes:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    (tmp_path / "texts").mkdir()
    overrides = (*TINY, *write_corpus(tmp_path / "texts"))
    assert train([*arguments(Path(), overrides), f"--workdir={url}"]) == REFUSED
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert client.keys() == []
