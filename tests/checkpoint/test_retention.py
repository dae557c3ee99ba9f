"""Tests of which checkpoints are kept: the newest by step, and the best by a metric."""

import math
import os

import jax.numpy as jnp
import pytest

from checkpoint.config import CheckpointConfig
from checkpoint.layout import best_steps, read_metrics
from checkpoint.manager import Checkpoints

NAN = math.nan


@pytest.mark.parametrize(
    "scores, num_best, best_is_max, best",
    [
        ({1: 3.0, 2: 1.0, 3: 2.0}, 1, False, {2}),
        ({1: 3.0, 2: 1.0, 3: 2.0}, 2, True, {1, 3}),
        ({1: 1.0, 2: None, 3: 1.0}, 1, False, {3}),
        ({1: None, 2: None}, 2, False, set()),
        ({1: NAN, 2: math.inf, 3: 7.0}, 2, False, {2, 3}),
        ({1: NAN, 2: -math.inf, 3: 7.0}, 2, True, {2, 3}),
        ({1: NAN, 2: None}, 2, True, {1}),
        ({1: 1.0}, 0, True, set()),
    ],
)
def test_best_steps(scores, num_best, best_is_max, best):
    assert best_steps(scores, num_best=num_best, best_is_max=best_is_max) == best


def save_all(checkpoints: Checkpoints, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        metrics = None if loss is None else {"eval_loss": loss, "eval_accuracy": -loss}
        assert checkpoints.save(step, {"x": jnp.ones(3)}, {"position": step}, metrics)
    checkpoints.close()


LOSSES = {10: 3.0, 20: 1.0, 30: None, 40: NAN, 50: 2.0, 60: 2.5, 70: None}


@pytest.mark.parametrize(
    "options, steps",
    [
        ({}, [60, 70]),
        ({"keep_best": 1}, [20, 60, 70]),
        ({"keep_best": 2}, [20, 50, 60, 70]),
        ({"keep_best": 9, "max_to_keep": 1}, [10, 20, 40, 50, 60, 70]),
        ({"keep_best": 1, "best_metric": "eval_accuracy", "best_is_max": True}, [20, 60, 70]),
        ({"keep_best": 1, "best_is_max": True}, [10, 60, 70]),
    ],
)
def test_best_checkpoints_are_kept_in_addition_to_the_newest(tmp_path, options, steps):
    config = CheckpointConfig(**({"every_steps": 1, "max_to_keep": 2} | options))
    checkpoints = Checkpoints(tmp_path, config)
    save_all(checkpoints, LOSSES)
    assert checkpoints.all_steps() == steps
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == steps


def test_best_checkpoints_are_known_after_a_restart(tmp_path):
    config = CheckpointConfig(every_steps=1, max_to_keep=1, keep_best=1)
    losses = {10: 2.0, 20: 1.0, 30: 3.0, 40: 4.0}
    for step, loss in losses.items():
        save_all(Checkpoints(tmp_path, config), {step: loss})
    assert Checkpoints(tmp_path, config).all_steps() == [20, 40]
    assert read_metrics(tmp_path / "20") == {"eval_loss": 1.0, "eval_accuracy": -1.0}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"eval_loss": "x"}', '{"eval_loss": null}'])
def test_damaged_metrics_are_none(tmp_path, text):
    config = CheckpointConfig(every_steps=1, max_to_keep=1, keep_best=1)
    save_all(Checkpoints(tmp_path, config), {10: 1.0, 20: 2.0})
    (tmp_path / "10" / "metrics" / "metrics").write_text(text)
    checkpoints = Checkpoints(tmp_path, config)
    save_all(checkpoints, {30: 3.0})
    assert checkpoints.all_steps() == [20, 30]


def test_unknown_best_metric_raises_an_error_with_the_known_ones(tmp_path):
    def config(keep_best):
        return CheckpointConfig(
            every_steps=1, max_to_keep=2, keep_best=keep_best, best_metric="eval_los"
        )

    checkpoints = Checkpoints(tmp_path, config(1))
    with pytest.raises(
        ValueError, match=r"best_metric='eval_los' .* choose one of eval_acc.*, eval_loss"
    ):
        save_all(checkpoints, {10: 1.0})
    assert checkpoints.all_steps() == []
    save_all(Checkpoints(tmp_path, config(0)), {10: 1.0})


def test_newest_checkpoints_are_determined_by_step_not_by_time(tmp_path):
    config = CheckpointConfig(every_steps=1, max_to_keep=2)
    save_all(Checkpoints(tmp_path, config), {9: None, 10: None})
    for step, age in (("9", 0), ("10", 10**9)):
        for path in [tmp_path / step, *(tmp_path / step).rglob("*")]:
            os.utime(path, (1.9e9 - age, 1.9e9 - age))
    checkpoints = Checkpoints(tmp_path, config)
    assert checkpoints.latest_step() == 10
    save_all(checkpoints, {100: None})
    assert checkpoints.all_steps() == [10, 100]
