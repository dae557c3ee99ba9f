"""Weights & Biases and MLflow record a run, as their own readers see it."""

import json
import math
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from tests.runs import CONFIG, TINY
from train.lifecycle.exit_codes import FINISHED, REFUSED
from train.main import main
from train.reporting.metrics import read_metrics
from train.reporting.trackers import Trackers, find_trackers

SHORT = (*TINY, "train.num_steps=6", "eval.every_steps=3")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """W&B without a network, and MLflow with a folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    wandb.teardown()  # it reads the environment again
    yield
    wandb.teardown()


def run_main(workdir, overrides) -> int:
    arguments = [f"--config.{override}" for override in overrides]
    return main([f"--config={CONFIG}", f"--workdir={workdir}", *arguments])


def start(name: str, workdir: Path, first_step: int, seed: int = 0) -> Trackers:
    return Trackers(find_trackers([name]), workdir, {"train.seed": seed}, first_step)


def record_id(name: str, workdir: Path) -> str:
    return json.loads((workdir / "trackers.json").read_text())[name]


def records(file: Path) -> Iterator[Any]:
    """Yield the messages of an offline run of W&B.

    The file has blocks of 32 KiB, whose chunks have a header of 7 bytes, like logs of LevelDB.
    """
    content = file.read_bytes()
    message = b""
    position = 7  # after the header of the file
    while position + 7 <= len(content):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        message += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(message)  # type: ignore[attr-defined]
            message = b""


def wandb_history(file: Path) -> dict[int, dict[str, float]]:
    """Return step -> metrics."""
    history = {}
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            history[values.pop("_step")] = {
                name: value for name, value in values.items() if not name.startswith("_")
            }
    return history


def wandb_files(workdir: Path) -> list[Path]:
    """Return the offline runs of W&B, the oldest first."""
    return sorted(workdir.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.thorough
@pytest.mark.usefixtures("offline")
def test_wandb_has_all_values_and_continues_its_record(tmp_path, caplog):
    first = start("wandb", tmp_path, 0)
    for step in range(1, 4):
        first.log(step, {"loss": 1 / step, "rate": math.nan, "mfu": None})
        first.log(step, {"eval_loss": 2 / step})
    first.finish("stopped")
    second = start("wandb", tmp_path, 3, seed=1)
    second.log(4, {"loss": 1 / 4})
    second.finish("finished")
    before, after = wandb_files(tmp_path)
    history = wandb_history(before)
    assert [math.isnan(values.pop("rate")) for values in history.values()] == [True] * 3
    assert history == {step: {"loss": 1 / step, "eval_loss": 2 / step} for step in (1, 2, 3)}
    assert wandb_history(after) == {4: {"loss": 1 / 4}}
    assert before.name == after.name and after.name[4:-6] == record_id("wandb", tmp_path)
    ends = [record.exit.exit_code for record in records(before) if record.HasField("exit")]
    assert ends == [1]
    started = [record.run for record in records(after) if record.HasField("run")]
    assert {item.key: item.value_json for item in started[0].config.update}["train.seed"] == "1"
    assert "Traceback" not in caplog.text


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_steps", "offline")
def test_services_have_all_values_and_the_config_of_a_run(corpus_overrides, tmp_path, caplog):
    workdir = tmp_path / "run"
    assert run_main(workdir, (*SHORT, *corpus_overrides, "log.trackers=wandb,mlflow")) == FINISHED
    expected: dict[int, dict] = {step: {} for step in range(1, 7)}
    for entry in read_metrics(workdir / "metrics.jsonl"):
        expected[entry.pop("step")] |= {k: v for k, v in entry.items() if v is not None}
    (file,) = wandb_files(workdir)
    assert wandb_history(file) == expected
    (started,) = [record.run for record in records(file) if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["data.tokenizer"] == "bytes" and config["optimizer.learning_rate"] == 0.01
    assert started.project == "taibai" and started.display_name == "run"

    client = mlflow.MlflowClient()
    run = client.get_run(record_id("mlflow", workdir))
    recorded: dict[int, dict] = {step: {} for step in range(1, 7)}
    for name in run.data.metrics:
        for each in client.get_metric_history(run.info.run_id, name):
            recorded[each.step][name] = each.value
    assert recorded == expected
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["data.tokenizer"] == "bytes"
    assert run.data.params["optimizer.learning_rate"] == "0.01"
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("store", ["folder", pytest.param("database", marks=pytest.mark.thorough)])
def test_mlflow_continues_its_record_and_has_every_step_once(
    store, offline, tmp_path, monkeypatch, caplog
):
    if store == "database":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        killed = start("mlflow", tmp_path, 0)
        for step in range(1, 5):
            killed.log(step, {"loss": 1 / step, "rate": math.nan})
        killed.finish("stopped")
        resumed = start("mlflow", tmp_path, 2, seed=1)
        for step in range(3, 7):
            resumed.log(step, {"loss": 1 / step, "eval_loss": 2 / step})
        resumed.finish("failed")
    client = mlflow.MlflowClient()
    run = client.get_run(record_id("mlflow", tmp_path))
    points = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert [len(points[name]) for name in ("loss", "eval_loss", "rate")] == [6, 4, 4]
    histories = {name: {each.step: each.value for each in points[name]} for name in points}
    assert histories["loss"] == {step: 1 / step for step in range(1, 7)}
    assert histories["eval_loss"] == {step: 2 / step for step in range(3, 7)}
    assert [*histories["rate"]] == [1, 2, 3, 4] and math.isnan(histories["rate"][1])
    assert run.info.status == "FAILED"
    assert run.data.params == {"train.seed": "0"}
    assert run.data.tags["train.seed after step 2"] == "1"
    assert "Traceback" not in caplog.text


def test_wandb_without_a_key_is_refused(offline, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    wandb.teardown()
    overrides = (*SHORT, "data.paths=/nowhere/*.txt", "log.trackers=wandb")
    assert run_main(tmp_path, overrides) == REFUSED
    printed = capsys.readouterr().err
    assert "log.trackers=wandb has no API key; run `wandb login`" in printed
