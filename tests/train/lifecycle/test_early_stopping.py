"""When early stopping ends a run, also after a restart, and the best checkpoint that it keeps."""

import math
import random
import shutil
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback

from checkpoint.config import CheckpointConfig
from tests.runs import CONFIG, TINY
from train.config.train_config import TrainConfig
from train.lifecycle.decisions import Decisions
from train.lifecycle.early_stopping import EarlyStopping
from train.lifecycle.exit_codes import FINISHED, REFUSED
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("shared_steps")


def stopping(patience=2, min_delta=0.0, is_max=False) -> EarlyStopping:
    train = TrainConfig(
        num_steps=9,
        num_microbatches=1,
        seed=0,
        remat="none",
        early_stopping=patience,
        early_stopping_min_delta=min_delta,
    )
    checkpoint = CheckpointConfig(every_steps=1, max_to_keep=1, best_is_max=is_max)
    return EarlyStopping(train, checkpoint)


def last_step(early_stopping: EarlyStopping, scores) -> int | None:
    """Return the step of the evaluation that ends a run with these scores; None if none does."""
    for step, score in enumerate(scores, 1):
        early_stopping.update(step, {"eval_loss": score})
        if early_stopping.reason is not None:
            return step
    return None


@pytest.mark.parametrize(
    "options, scores, expected",
    [
        ({}, [4, 3, 2, 1], None),
        ({}, [4, 3, 3, 3], 4),
        ({}, [4, 5, 3, 5, 5], 5),
        ({"is_max": True}, [4, 3, 5, 3, 4], 5),
        ({"min_delta": 0.5}, [4, 3.6, 3.4, 3.0, 2.9], 5),
        ({"min_delta": 0.5}, [4, 3.6, 3.5, 3.0], 3),
        ({}, [math.nan, math.nan], 2),
        ({}, [math.nan, 4, math.nan, math.nan], 4),
        ({}, [math.inf, 4, -math.inf, 3], None),
    ],
    ids=["falls", "equal", "restarts", "max", "delta", "at delta", "nan", "nan later", "inf"],
)
def test_run_ends_after_patience_evaluations_without_improvement(options, scores, expected):
    assert last_step(stopping(**options), scores) == expected


def trainer_last_step(patience: int, scores) -> int | None:
    """Return the same as `last_step` for the callback of the Hugging Face Trainer."""
    callback = EarlyStoppingCallback(patience)
    args = SimpleNamespace(greater_is_better=False, metric_for_best_model="eval_loss")
    state = SimpleNamespace(best_metric=None)
    control = SimpleNamespace(should_training_stop=False)
    for step, score in enumerate(scores, 1):
        callback.on_evaluate(args, state, control, {"eval_loss": score})
        if control.should_training_stop:
            return step
        if state.best_metric is None or score < state.best_metric:
            state.best_metric = score
    return None


def test_run_ends_where_the_hugging_face_trainer_ends():
    draw = random.Random(3)
    ends = set()
    for _ in range(200):
        patience = draw.randint(1, 4)
        scores = [draw.choice([1.0, 2.0, 3.0, 4.0]) - 0.1 * i for i in range(12)]
        end = last_step(stopping(patience), scores)
        assert end == trainer_last_step(patience, scores)
        ends.add(end)
    assert len(ends) > 5


def run_main(workdir, overrides) -> int:
    arguments = [f"--config.{override}" for override in overrides]
    return main([f"--config={CONFIG}", f"--workdir={workdir}", *arguments])


#: The loss falls, but the config says that larger values are better: only the first one is.
WORSE = (
    *TINY,
    "train.num_steps=6",
    "eval.every_steps=1",
    "checkpoint.every_steps=3",
    "checkpoint.keep_best=1",
    "checkpoint.max_to_keep=1",
    "checkpoint.best_is_max=True",
    "train.early_stopping=3",
)


@pytest.fixture(scope="module")
def stopped(corpus_overrides, tmp_path_factory):
    """A run that has ended early, and its overrides."""
    workdir = tmp_path_factory.mktemp("stopped")
    overrides = (*WORSE, *corpus_overrides)
    assert run_main(workdir, overrides) == FINISHED
    return workdir, overrides


def evaluations(workdir) -> dict[int, float]:
    """Return step -> eval_loss."""
    entries = read_metrics(workdir / "metrics.jsonl")
    return {entry["step"]: entry["eval_loss"] for entry in entries if "eval_loss" in entry}


@pytest.mark.thorough
def test_run_ends_early_and_keeps_the_best_checkpoint(stopped, capsys):
    workdir, overrides = stopped
    losses = evaluations(workdir)
    assert [*losses] == [1, 2, 3, 4]
    assert max(losses, key=losses.__getitem__) == 1
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"1", "3", "4"}
    assert run_main(workdir, overrides) == FINISHED
    printed = capsys.readouterr().err
    assert "ended after step 4 of train.num_steps=6: eval_loss has not improved in 3" in printed
    assert f"the best checkpoint is {workdir}/checkpoints/1, with eval_loss" in printed
    assert evaluations(workdir) == losses


@pytest.mark.thorough
def test_run_with_more_patience_continues(stopped, tmp_path):
    workdir, overrides = stopped
    longer = shutil.copytree(workdir, tmp_path / "longer")
    assert run_main(longer, (*overrides, "train.early_stopping=4")) == FINISHED
    assert [*evaluations(longer)] == [1, 2, 3, 4, 5]


@pytest.mark.thorough
def test_run_that_is_killed_after_any_evaluation_ends_at_the_same_step(
    stopped, tmp_path, monkeypatch
):
    workdir, overrides = stopped
    expected = evaluations(workdir)
    decide = Decisions.after_evaluation

    class Killed(BaseException):
        pass

    def decide_and_die_once_per_step(self, step, scores):
        is_save_due = decide(self, step, scores)
        if step in alive:
            alive.remove(step)
            raise Killed
        return is_save_due

    alive = {*expected}  # steps after whose evaluation no start has died yet
    monkeypatch.setattr(Decisions, "after_evaluation", decide_and_die_once_per_step)
    for _ in expected:
        with pytest.raises(Killed):
            run_main(tmp_path, overrides)
    assert not alive
    assert run_main(tmp_path, overrides) == FINISHED
    assert evaluations(tmp_path) == expected


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (("checkpoint.keep_best=0",), "set checkpoint.keep_best=1"),
        (("checkpoint.best_metric=eval_lss",), "choose eval_loss, eval_perplexity"),
        (("eval.every_steps=0",), "eval.every_steps=0; set both"),
        (("data.validation_fraction=0",), "has no validation data"),
        (("train.early_stopping=0",), "must be at least 1, or None"),
    ],
    ids=["keep_best", "metric", "never evaluated", "no data", "patience"],
)
def test_early_stopping_that_cannot_work_is_refused(
    overrides, problem, corpus_overrides, tmp_path, capsys
):
    assert run_main(tmp_path, (*WORSE, *corpus_overrides, *overrides)) == REFUSED
    assert problem in capsys.readouterr().err
