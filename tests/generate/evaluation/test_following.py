"""Each checkpoint of a run is evaluated once, as soon as it is complete."""

import argparse
import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpoint.checksums import CHECKSUMS_FILE
from generate import image_eval, lm_eval
from generate.evaluation.following import check_follow, follow
from tests.runs import ROOT, TINY, arguments, write_corpus
from train.main import main as train

_CHANGES = (
    "train.num_steps=4",
    "checkpoint.every_steps=2",
    "checkpoint.max_to_keep=2",
    "log.every_steps=4",
)


def lines_of(file: Path) -> list[dict[str, float]]:
    """Return the lines of a JSONL file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """A run of four steps with the checkpoints 2 and 4."""
    directory = tmp_path_factory.mktemp("run")
    overrides = (*TINY, *write_corpus(directory), *_CHANGES, "data.sequence_length=64")
    assert train(arguments(directory / "run", overrides)) == 0
    return directory / "run"


@contextlib.contextmanager
def later(action, seconds: float) -> Iterator[None]:
    """Run an action some time after the block began."""
    timer = threading.Timer(seconds, action)
    timer.start()
    yield
    timer.join()


def loss_of(step: Path) -> dict[str, float]:
    """Return scores that tell the checkpoints apart."""
    return {"task/score": float(step.name) / 8, "task/none": float("nan")}


def test_checkpoints_are_evaluated_as_they_appear(text_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(text_run, run)
    (run / "checkpoints" / "4").rename(tmp_path / "4")

    def finish() -> None:
        (tmp_path / "4").rename(run / "checkpoints" / "4")

    with later(finish, 0.5):
        follow(run, "mine", loss_of, poll_s=0.05)
    scores = [
        (line["step"], line["task/score"], line["task/none"])
        for line in lines_of(run / "mine.jsonl")
    ]
    assert scores == [(2, 0.25, None), (4, 0.5, None)]
    assert "step 2 task/score 0.25 task/none nan" in capsys.readouterr().out
    events = EventAccumulator(str(run / "tensorboard" / "mine"))
    events.Reload()
    assert "task/score" in events.Tags()["tensors"]
    assert [event.step for event in events.Tensors("task/score")] == [2, 4]

    follow(run, "mine", loss_of, poll_s=0.05)  # has nothing to do
    assert len(lines_of(run / "mine.jsonl")) == 2


def test_another_checkpoint_of_the_same_step_is_evaluated(text_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(text_run, run)
    follow(run, "mine", loss_of, poll_s=0.05)
    checksums = run / "checkpoints" / "4" / CHECKSUMS_FILE
    lines = checksums.read_text().splitlines()
    checksums.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    follow(run, "mine", loss_of, poll_s=0.05)
    assert [line["step"] for line in lines_of(run / "mine.jsonl")] == [2, 4, 4]


def test_damaged_and_deleted_checkpoints_are_passed_over(text_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(text_run, run)
    shutil.copytree(run / "checkpoints" / "2", run / "checkpoints" / "1")
    with (run / "checkpoints" / "1" / CHECKSUMS_FILE).open("a") as file:
        file.write(f"{'0' * 64}  state/none\n")
    shutil.copytree(run / "checkpoints" / "2", run / "checkpoints" / ("3.orbax-checkpoint-tmp-0"))

    def scores_of(step: Path) -> dict[str, float]:
        if step.name == "2":
            shutil.rmtree(step)
            raise FileNotFoundError(step / "state")
        return loss_of(step)

    follow(run, "mine", scores_of, poll_s=0.05)
    assert [line["step"] for line in lines_of(run / "mine.jsonl")] == [4]
    out = capsys.readouterr().out
    assert "step 1 is skipped: " in out
    assert "step 2: the run has deleted this checkpoint" in out


def test_errors_of_an_evaluation_end_the_command(text_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(text_run, run)

    def scores_of(step: Path) -> dict[str, float]:
        raise ValueError("no task 'chose'")

    with pytest.raises(ValueError, match="no task 'chose'"):
        follow(run, "mine", scores_of, poll_s=0.05)
    assert not (run / "mine.jsonl").exists()


def test_unsuitable_requests_end_in_one_sentence(tmp_path, capsys):
    assert image_eval.main([f"--model={tmp_path}/none", "--follow"]) == 2
    assert "none has no config.yaml, so it is not the directory of a run" in capsys.readouterr().err
    args = argparse.Namespace(model=tmp_path, out=tmp_path / "out.json", follow=True)
    with pytest.raises(ValueError, match="is for one evaluation; with --follow, the scores are"):
        check_follow(args)


@pytest.mark.thorough
def test_tasks_of_lm_eval_follow_a_run(text_run, tmp_path, capsys):
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
    assert lm_eval.main([f"--model={text_run}", "--follow", *options]) == 0
    *_, last = lines_of(text_run / "lm_eval.jsonl")
    assert lm_eval.main([f"--model={text_run}", f"--out={tmp_path}/out.json", *options]) == 0
    alone = json.loads((tmp_path / "out.json").read_text())["results"]["choose"]
    assert last["step"] == 4 and last["choose/acc"] == alone["acc,none"]


@pytest.mark.thorough
def test_scores_of_images_are_those_of_training_at_each_step(tmp_path, capsys):
    config = [f"--config={ROOT}/configs/vit.py", f"--workdir={tmp_path}/run"]
    changes = (*_CHANGES, "eval.every_steps=2")
    assert train([*config, *(f"--config.{change}" for change in changes)]) == 0
    assert image_eval.main([f"--model={tmp_path}/run", "--follow", "--mesh=data=4"]) == 0
    logged = {
        line["step"]: line
        for line in lines_of(tmp_path / "run" / "metrics.jsonl")
        if "eval_loss" in line
    }
    found = lines_of(tmp_path / "run" / "image_eval.jsonl")
    assert [line["step"] for line in found] == [2, 4]
    for line in found:
        expected = logged[line["step"]]["eval_accuracy"]
        assert line["accuracy"] == pytest.approx(expected, abs=1e-6)
    capsys.readouterr()
