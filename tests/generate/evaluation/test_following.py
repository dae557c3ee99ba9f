"""Each checkpoint of a run is evaluated once, as soon as it is complete."""

import argparse
import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpoint.checksums import CHECKSUMS_FILE
from generate import image_eval, lm_eval
from generate.evaluation.following import check_follow, follow
from tests.runs import ROOT, TINY, arguments, write_corpus
from train.main import main as train
from untrusted.documents import read_json_lines

_CHANGES = (
    "train.num_steps=4",
    "checkpoint.every_steps=2",
    "checkpoint.max_to_keep=2",
    "log.every_steps=4",
)
SETTINGS = {"tasks": "task", "limit": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps with the checkpoints 2 and 4."""
    directory = tmp_path_factory.mktemp("run")
    overrides = (*TINY, *write_corpus(directory), *_CHANGES, "data.sequence_length=64")
    assert train(arguments(directory / "run", overrides)) == 0
    return directory / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@contextlib.contextmanager
def later(action: Callable[[], object], seconds: float = 0.5) -> Iterator[None]:
    """Run an action some time after the block began."""
    timer = threading.Timer(seconds, action)
    timer.start()
    yield
    timer.join()


def score_of(step: Path) -> dict[str, float]:
    """Return scores that tell the checkpoints apart."""
    return {"task/score": float(step.name) / 8, "task/none": float("nan")}


def followed(
    run: Path,
    settings: dict[str, Any] = SETTINGS,
    scores_of: Callable[[Path], dict[str, float]] = score_of,
) -> list[dict[str, Any]]:
    """Follow a run to its end; return the intact lines of the file of scores."""
    follow(run, "mine", settings, scores_of, poll_s=0.05)
    return read_json_lines(run / "mine.jsonl")


@pytest.mark.thorough
def test_checkpoints_are_evaluated_as_they_appear(run, tmp_path, capsys):
    shutil.rmtree(run / "goodput")  # it says that the run has finished
    (run / "checkpoints" / "4").rename(tmp_path / "4")
    with later(lambda: (tmp_path / "4").rename(run / "checkpoints" / "4")):
        lines = followed(run)
    assert [line["step"] for line in lines] == [2, 4]
    assert [line["scores"] for line in lines] == [
        {"task/score": 0.25, "task/none": "NaN"},
        {"task/score": 0.5, "task/none": "NaN"},
    ]
    assert all(line["settings"] == SETTINGS for line in lines)
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == [f"following {run} to step 4", "step 2 task/score 0.25 task/none nan"]
    events = EventAccumulator(str(run / "tensorboard" / "mine"))
    events.Reload()
    assert [event.step for event in events.Scalars("task/score")] == [2, 4]
    assert len(followed(run)) == 2  # had nothing to do


@pytest.mark.thorough
def test_other_settings_are_another_evaluation(run):
    for settings in (SETTINGS, {"tasks": "other"}, SETTINGS):
        lines = followed(run, settings)
    assert [line["settings"]["tasks"] for line in lines] == ["task", "task", "other", "other"]


@pytest.mark.thorough
def test_another_checkpoint_of_the_same_step_is_evaluated(run):
    followed(run)
    checksums = run / "checkpoints" / "4" / CHECKSUMS_FILE
    head, *others = checksums.read_text().splitlines()
    checksums.write_text("\n".join([head, *reversed(others)]) + "\n")
    assert [line["step"] for line in followed(run)] == [2, 4, 4]


@pytest.mark.thorough
def test_a_run_with_more_steps_is_followed_further(run, tmp_path):
    assert [line["step"] for line in followed(run)] == [2, 4]
    config = (run / "config.yaml").read_text()
    assert config.count("num_steps: 4") == 1
    (run / "config.yaml").write_text(config.replace("num_steps: 4", "num_steps: 6"))
    shutil.copytree(run / "checkpoints" / "4", tmp_path / "6")
    checksums = tmp_path / "6" / CHECKSUMS_FILE
    head, *others = checksums.read_text().splitlines()
    checksums.write_text("\n".join([head, *reversed(others)]) + "\n")
    with later(lambda: (tmp_path / "6").rename(run / "checkpoints" / "6")):
        assert [line["step"] for line in followed(run)] == [2, 4, 6]


@pytest.mark.thorough
def test_a_run_that_ends_before_its_last_step_is_followed_to_its_end(run):
    config = run / "config.yaml"
    times = (config.stat().st_atime, config.stat().st_mtime)
    config.write_text(config.read_text().replace("num_steps: 4", "num_steps: 6"))
    os.utime(config, times)
    assert [line["step"] for line in followed(run)] == [2, 4]


@pytest.mark.thorough
def test_a_torn_line_does_not_spoil_the_next(run):
    (run / "mine.jsonl").write_text('{"step": 2, "chec')
    assert [line["step"] for line in followed(run)] == [2, 4]


@pytest.mark.thorough
def test_damaged_and_deleted_checkpoints_are_passed_over(run, capsys):
    checkpoints = run / "checkpoints"
    for name in ("1", "3", "3.orbax-checkpoint-tmp-0"):
        shutil.copytree(checkpoints / "2", checkpoints / name)
    (checkpoints / "1" / "config.yaml").write_text("")
    (checkpoints / "4" / CHECKSUMS_FILE).unlink()

    def scores_of(step: Path) -> dict[str, float]:
        if step.name == "2":
            shutil.rmtree(step)
            raise FileNotFoundError(step / "state")
        return score_of(step)

    # The checkpoint 3 is the same as 2 was, but 2 has no scores.
    assert [line["step"] for line in followed(run, scores_of=scores_of)] == [3]
    out = capsys.readouterr().out
    assert "step 1 is skipped: config.yaml " in out
    assert "step 2: the run has deleted this checkpoint" in out
    assert "step 4 is skipped: checksums.sha256 " in out


@pytest.mark.thorough
def test_errors_of_an_evaluation_end_the_command(run):
    def scores_of(step: Path) -> dict[str, float]:
        raise ValueError("no task 'chose'")

    with pytest.raises(ValueError, match="no task 'chose'"):
        followed(run, scores_of=scores_of)
    assert not (run / "mine.jsonl").exists()


@pytest.mark.thorough
def test_links_that_lead_out_of_the_run_are_refused(run, tmp_path):
    shutil.rmtree(run / "tensorboard")
    (tmp_path / "outside").mkdir()
    (run / "tensorboard").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=r"tensorboard is a link to .*outside"):
        followed(run)
    assert not [*(tmp_path / "outside").iterdir()]


@pytest.mark.thorough
def test_unsuitable_requests_end_in_one_sentence(trained, tmp_path, capsys):
    def error(*options: str) -> str:
        assert image_eval.main([*options, "--follow"]) == 2
        return capsys.readouterr().err

    for path in (tmp_path / "none", trained / "checkpoints" / "4"):
        assert f"--model={path} is not the directory of a run" in error(f"--model={path}")
    (tmp_path / "config.yaml").write_text("model: {name: gpt2}")
    assert "is a converted model, not a run" in error(f"--model={tmp_path}")
    found = error(f"--model={trained}", f"--out={tmp_path}/out")
    assert "is for one evaluation; with --follow, the scores are written into the run" in found
    assert "none is not a directory" in error(f"--model={trained}", f"--images={tmp_path}/none")


@pytest.mark.thorough
def test_tasks_of_lm_eval_follow_a_run(run, tmp_path, capsys):
    questions = [
        {"question": f"def f{i}", "choices": ["(", "self"], "answer": i % 2} for i in range(9)
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
    (tmp_path / "choose.yaml").write_text(
        f"""task: choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
"""
    )
    options = ["--tasks=choose", f"--include_path={tmp_path}"]
    assert lm_eval.main([f"--model={run}", "--follow", *options]) == 0
    *_, last = read_json_lines(run / "lm_eval.jsonl")
    assert lm_eval.main([f"--model={run}", f"--out={tmp_path}/out.json", *options]) == 0
    alone = json.loads((tmp_path / "out.json").read_text())["results"]["choose"]
    assert last["step"] == 4 and last["scores"]["choose/acc"] == alone["acc,none"]
    capsys.readouterr()


@pytest.mark.thorough
def test_scores_of_images_are_those_of_training_at_each_step(tmp_path, capsys):
    config = [f"--config={ROOT}/configs/vit.py", f"--workdir={tmp_path}/run"]
    changes = (*_CHANGES, "eval.every_steps=2")
    assert train([*config, *(f"--config.{change}" for change in changes)]) == 0
    assert image_eval.main([f"--model={tmp_path}/run", "--follow", "--mesh=data=4"]) == 0
    logged = {
        line["step"]: line["eval_accuracy"]
        for line in read_json_lines(tmp_path / "run" / "metrics.jsonl")
        if "eval_loss" in line
    }
    found = read_json_lines(tmp_path / "run" / "image_eval.jsonl")
    assert [line["step"] for line in found] == [2, 4]
    for line in found:
        assert line["scores"]["accuracy"] == pytest.approx(logged[line["step"]], abs=1e-6)
    capsys.readouterr()


def test_run_in_a_store_is_not_followed(tmp_path, monkeypatch):
    """Its copy does not change while the run trains on another machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = argparse.Namespace(out=None, model=tmp_path / "taibai" / "stores" / "4f1d" / "run")
    with pytest.raises(ValueError, match="--follow needs the directory of a run, but --model is"):
        check_follow(args)
