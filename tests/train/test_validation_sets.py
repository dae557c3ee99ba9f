"""Runs with validation sets of their own: metrics of each, and evaluation on unseen files."""

import json
from pathlib import Path

import jax
import pytest

from tests.runs import FLOAT64, TINY, arguments, make_run
from tests.train.refusals import refusal
from train.evaluation import evaluate
from train.lifecycle.phases import Phases
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("shared_steps")

SETS = {"a": "def f(x): return x\n" * 9, "b": "import os, sys\n" * 7, "unseen": "for i in r:\n" * 5}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("sets")
    for name, text in SETS.items():
        (directory / f"{name}.txt").write_text(text)
    (directory / "train.txt").write_text("".join(SETS.values()) * 20)
    return {path.stem: path for path in directory.glob("*.txt")}


def overrides(files, *changes: str) -> tuple[str, ...]:
    cache = files["a"].parent / "cache"
    return (*TINY, f"data.paths={files['train']}", f"data.cache_dir={cache}", *changes)


def scores(capsys) -> dict[str, float]:
    """Return the scores that an evaluation has printed."""
    words = capsys.readouterr().out.split()
    return dict(zip(words[2::2], map(float, words[3::2]), strict=True))


@pytest.mark.thorough
def test_scores_of_named_sets_do_not_depend_on_mesh_and_batch(files):
    both = f"data.validation_paths=a={files['a']},b={files['b']}"
    found = []
    with jax.enable_x64(True):
        for changes in (
            (both,),
            (both, "mesh.data=2", "data.global_batch_size=4", "train.num_microbatches=1"),
            (f"data.validation_paths={files['a']}",),
        ):
            run, corpus = make_run(overrides(files, *FLOAT64, *changes))
            state = run.state_layout.initial()
            found.append(evaluate(run, corpus, state, Phases()))
    names = [f"eval_{name}_{metric}" for name in "ab" for metric in ("loss", "perplexity")]
    assert list(found[0]) == names and list(found[2]) == ["eval_loss", "eval_perplexity"]
    assert found[1] == pytest.approx(found[0], rel=1e-11, abs=0)
    alone = {f"eval_a_{name.removeprefix('eval_')}": value for name, value in found[2].items()}
    assert {name: found[0][name] for name in alone} == pytest.approx(alone, rel=1e-11, abs=0)
    assert found[0]["eval_a_loss"] != pytest.approx(found[0]["eval_b_loss"], rel=1e-3)


@pytest.mark.thorough
def test_run_logs_named_sets_and_evaluates_on_an_unseen_file(files, tmp_path, capsys):
    """Its tokenizer is one that it has trained, and its training data is gone."""
    changes = ("data.tokenizer=bpe", "data.vocab_size=300", "train.num_steps=4")
    best = (
        "eval.every_steps=1",
        "checkpoint.every_steps=1",
        "checkpoint.max_to_keep=1",
        "checkpoint.keep_best=1",
        "checkpoint.best_metric=eval_b_loss",
        "checkpoint.best_is_max=True",
    )
    both = f"data.validation_paths=a={files['a']},b={files['b']}"
    train = overrides(files, *changes, *best, both)
    assert main(arguments(tmp_path, train)) == 0
    log = capsys.readouterr().err
    assert "validation (" in log and " a, " in log
    logged = [each for each in read_metrics(tmp_path / "metrics.jsonl") if "eval_a_loss" in each]
    assert len(logged) == 4 and all("eval_b_perplexity" in each for each in logged)
    worst = max(logged, key=lambda each: each["eval_b_loss"])["step"]
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert worst in kept and 4 in kept and len(kept) < 4

    config = f"--config={tmp_path}/config.yaml"
    files["train"].rename(files["train"].with_suffix(".gone"))
    try:
        evaluation = [config, f"--workdir={tmp_path}", "--mode=eval"]
        assert main(evaluation) == 0
        last = logged[-1]
        assert scores(capsys)["eval_a_loss"] == pytest.approx(last["eval_a_loss"], rel=1e-5)
        unseen = f"--config.data.validation_paths={files['unseen']}"
        assert main([*evaluation, unseen]) == 0
        whole = scores(capsys)
        assert main([*evaluation, unseen, "--config.mesh.data=2"]) == 0
        assert scores(capsys) == pytest.approx(whole, rel=1e-5) and list(whole)[0] == "eval_loss"
    finally:
        files["train"].with_suffix(".gone").rename(files["train"])


@pytest.mark.thorough
def test_preferences_are_evaluated_on_unseen_lines(tmp_path, capsys):
    lines = [
        {"prompt": f"{i} + 1?", "chosen": f"{i + 1}.", "rejected": "no"[: i % 2 + 1]}
        for i in range(60)
    ]
    paths = [tmp_path / "pairs.jsonl", tmp_path / "more.jsonl"]
    paths[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths[1].write_text("".join(json.dumps(line) + "\n" for line in lines[:9]))
    train = (
        *TINY,
        f"data.paths={paths[0]}",
        f"data.cache_dir={tmp_path}/cache",
        "data.objective=preference",
        "data.chat_template=roles",
        "data.sequence_length=128",
        "model.dropout=0.0",
        "train.num_steps=3",
    )
    named = (*train, f"data.validation_paths=more={paths[1]}")
    assert main(arguments(tmp_path / "named", named)) == 0
    logged = read_metrics(tmp_path / "named" / "metrics.jsonl")[-1]
    assert logged["eval_more_reward_margin"] > 0
    assert main(arguments(tmp_path / "plain", (*train, "data.validation_fraction=0"))) == 0
    capsys.readouterr()
    unseen = [*arguments(tmp_path / "plain", (*train, "data.validation_fraction=0"))]
    unseen += ["--mode=eval", f"--config.data.validation_paths={paths[1]}"]
    assert main(unseen) == 0
    expected = [logged[f"eval_more_{name}"] for name in ("loss", "reward_margin")]
    found = scores(capsys)
    assert [found["eval_loss"], found["eval_reward_margin"]] == pytest.approx(expected, rel=1e-4)


def test_bad_sets_are_refused_before_the_training_data_is_read(
    files, tmp_path, capsys, monkeypatch
):
    (tmp_path / "empty.txt").write_text("")
    two = f"data.validation_paths=x={files['a']},x_y={files['b']}"
    best = ("checkpoint.keep_best=1", "eval.every_steps=2", "checkpoint.every_steps=2")
    for changes, message in (
        ((f"data.validation_paths=b={tmp_path}/empty.txt",), "there is no text in"),
        ((f"data.validation_paths={tmp_path}/none.txt",), "data.validation_paths: no file matches"),
        ((two, *best), "choose eval_x_loss, eval_x_perplexity, eval_x_y_loss"),
    ):
        error = refusal(tmp_path / "run", overrides(files, *changes), capsys)
        assert message in error and not (tmp_path / "run").exists()
