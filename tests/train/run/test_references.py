"""Learning preferences: equal on every mesh, resumable, and refused without its reference."""

import json

import jax
import numpy as np
import pytest

from tests.runs import FLOAT64, TINY, arguments, losses, make_run
from tests.train.refusals import refusal
from train.main import main
from train.references import add_references

pytestmark = pytest.mark.drawn(2, among="thorough")

NUM_STEPS = 5
PREFERENCES = (
    "data.objective=preference",
    "data.chat_template=roles",
    "data.sequence_length=128",
    "model.dropout=0.0",
    "preference.beta=0.5",
)
CUBE = ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")
MESHES = {
    "data=4": ("mesh.data=4",),
    "fsdp=4, ZeRO 3": ("mesh.fsdp=4", "memory.zero_stage=3"),
    "context=2, model=2": ("mesh.context=2", "mesh.model=2"),
    "2x2x2": CUBE,
    "2x2x2, shared vocab": (*CUBE, "pipeline.share_vocab=true"),
    "2x2x2, zero bubble": (*CUBE, "pipeline.schedule=zero_bubble", "memory.zero_stage=2"),
    "2x2x2, from the host": (*CUBE, "memory.zero_stage=3", "memory.placement=host"),
}
ADAPTERS = ("lora.rank=4", "optimizer.learning_rate=0.1")


@pytest.fixture
def pairs(tmp_path) -> tuple[str, ...]:
    lines = [
        {"prompt": f"{i} + 1?", "chosen": f"{i + 1}.", "rejected": "I do not know."[: i % 9 + 1]}
        for i in range(80)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return (*TINY, f"data.paths={path}", f"data.cache_dir={tmp_path}/cache", *PREFERENCES)


def losses_of(overrides: tuple[str, ...], directory) -> list[float]:
    run, corpus = make_run(overrides)
    add_references(run, corpus, run.state_layout.initial().params, 0, directory)
    return losses(run, corpus, NUM_STEPS)


@pytest.mark.thorough
def test_losses_begin_at_the_logarithm_of_2_and_fall(pairs, tmp_path):
    found = losses_of(pairs, tmp_path)
    assert found[0] == pytest.approx(np.log(2), abs=1e-5) and found[-1] < 0.6


@pytest.mark.thorough
@pytest.mark.slow(
    only=[
        "fsdp=4, ZeRO 3-adapters1",
        "2x2x2-adapters3",
        "2x2x2, shared vocab-adapters4",
        "2x2x2, from the host-adapters6",
    ]
)
@pytest.mark.parametrize(
    ("mesh", "adapters"),
    [*((mesh, ()) for mesh in MESHES), ("2x2x2", ADAPTERS)],
)
def test_losses_equal_one_device(mesh, adapters, pairs, tmp_path):
    overrides = (*pairs, *FLOAT64, *adapters)
    with jax.enable_x64(True):
        expected = losses_of(overrides, tmp_path)
        found = losses_of((*overrides, *MESHES[mesh]), tmp_path)
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=1e-9, abs=0)


def metrics(directory) -> dict[int, dict[str, float]]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "loss" in line}


@pytest.mark.thorough
def test_run_continues_with_the_reference_of_its_first_step(pairs, tmp_path, capsys):
    short = (*pairs, "train.num_steps=6", "checkpoint.every_steps=3", "optimizer.schedule=constant")
    whole = tmp_path / "whole"
    assert main(arguments(whole, short)) == 0
    halves = tmp_path / "halves"
    assert main(arguments(halves, (*short, "train.num_steps=3"))) == 0
    assert main(arguments(halves, short)) == 0
    both = metrics(whole), metrics(halves)
    assert [both[1][step]["loss"] for step in range(1, 7)] == [
        both[0][step]["loss"] for step in range(1, 7)
    ]
    assert both[0][6]["reward_margin"] > 0.1

    capsys.readouterr()
    evaluation = [*arguments(whole, short), "--mode=eval"]
    assert main(evaluation) == 0
    margin = float(capsys.readouterr().out.partition("eval_reward_margin ")[2].split()[0])
    assert margin > 0.1
    (whole / "reference_log_probs.bin").write_bytes(b"damaged")
    assert main(evaluation) != 0
    assert "reference_log_probs.bin is missing or damaged" in capsys.readouterr().err


def test_unusable_settings_are_refused(pairs, tmp_path, capsys):
    other_loss = [*pairs, "model.loss=tests.runs:squared_error"]
    assert "model.loss='tests.runs:squared_error' is not used" in refusal(
        tmp_path, other_loss, capsys
    )
    other_objective = [*pairs, "data.objective=chat"]
    assert "the section preference is only for" in refusal(tmp_path, other_objective, capsys)
