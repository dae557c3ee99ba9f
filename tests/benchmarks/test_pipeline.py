"""Tests of `benchmarks.pipeline` on a tiny model: its predictions, and the figures it prints."""

import json

import jax
import pytest

from benchmarks import pipeline
from benchmarks.harness import report, schedule_prediction
from benchmarks.harness.stage_parts import StageParts
from pipeline.schedules.simulate import OperationTimes, bubble_fraction, synchronous_time
from tests.runs import CONFIG, ROOT, TINY

OVERRIDES = [
    *(o for o in TINY if not o.startswith(("data.name", "train.num_microbatches"))),
    "model.embed_dim=16",
    "model.dropout=0.0",
]
ARGS = [f"--config={CONFIG}", *(f"--config.{override}" for override in OVERRIDES)]


def make_runs(*schedules, **counts):
    counts = {"num_stages": 4, "num_microbatches": 8} | counts
    return pipeline.make_runs(CONFIG, OVERRIDES, schedules, **counts)


def costs(run, **seconds):
    """Return the time of every part of a run.

    Args:
        seconds: part name -> seconds per layer; for embedding and head, seconds in total. Parts
            that are not named take no time.
    """
    parts = schedule_prediction.parts_of_step(run)
    return {(name, n): seconds.get(name, 0.0) * max(n, 1) for name, n in parts}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_prediction_equals_the_simulated_time_for_equal_stages(schedule):
    run = make_runs(schedule, num_stages=2)[schedule, "none"]
    times = OperationTimes(forward=2.0, backward=5.0, input_gradient=2.5, weight_gradient=1.5)
    alone = costs(run, forward=1.0, backward=2.5, input_gradient=1.25, weight_gradient=0.75)
    prediction = schedule_prediction.predict(run, alone, alone)
    assert prediction.synchronous_s == pytest.approx(synchronous_time(run.schedule, times))
    bubble = bubble_fraction(run.schedule, times, clock=synchronous_time)
    assert prediction.bubble == pytest.approx(bubble)
    # Devices that do not slow each other down: only the table limits the step.
    assert prediction.work_bound_s == pytest.approx(prediction.synchronous_s)
    assert prediction.work_s == pytest.approx((1 - bubble) * prediction.synchronous_s)
    # Two devices that share one core: a step takes as long as the work of both.
    together = {part: 2 * time_s for part, time_s in alone.items()}
    shared = schedule_prediction.predict(run, alone, together)
    work = sum(alone[part] for part in schedule_prediction.parts_of_step(run))
    assert shared.work_bound_s == pytest.approx(work)
    assert shared.synchronous_s == prediction.synchronous_s


def test_prediction_counts_embedding_head_and_update_on_their_stages():
    run = make_runs("1f1b")["1f1b", "none"]
    head = costs(run, head_gradient=1.0)
    assert schedule_prediction.predict(run, head, head).synchronous_s == pytest.approx(8)
    update = costs(run, update=1.0)
    assert schedule_prediction.predict(run, update, update).synchronous_s == pytest.approx(1)
    assert schedule_prediction.predict(run, update, update).bubble == pytest.approx(0)
    # With recomputation, the first stage embeds twice, and the last one runs its forward only as
    # part of the backward.
    parts = schedule_prediction.parts_of_step(make_runs("1f1b")["1f1b", "stage"])
    counts = {name: [n for n, _ in parts].count(name) for name in {n for n, _ in parts}}
    assert counts == {
        "evaluate": 3 * 8,
        "forward": 4 * 8,
        "backward": 4 * 8,
        "embed": 2 * 8,
        "embed_gradient": 8,
        "head_gradient": 8,
        "update": 4,
    }


@pytest.mark.thorough
def test_head_with_several_losses_is_measured():
    """BERT's pretraining has a dict of two losses."""
    overrides = [*OVERRIDES, "model.mlp_dim=16", "data.sequence_length=24"]
    config = str(ROOT / "configs" / "bert.py")
    runs = pipeline.make_runs(config, overrides, ["1f1b"], num_stages=2, num_microbatches=2)
    parts = StageParts(runs["1f1b", "stage"], jax.devices()[:1])
    parts.step_of(("head_gradient", 0))()
    assert parts.flops(("head_gradient", 0))


@pytest.mark.thorough
def test_json_is_complete_and_agrees_with_the_compiled_steps(capsys, monkeypatch):
    # Recomputed stages alone cover every part, and halve the duration of this test.
    monkeypatch.setattr(pipeline, "RECOMPUTES", (True,))
    args = ["--stages=2", "--microbatches=4", "--steps=1", "--rounds=2", "--json"]
    args += ["--schedules=1f1b,zero_bubble", "--config.model.num_layers=2"]
    assert pipeline.main([*ARGS, *args]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["command"].startswith("python -m benchmarks.pipeline --config=")
    assert figures["work"]["num_microbatches"] == 4 and figures["work"]["mesh"]["pipeline"] == 2
    assert figures["cores_are_shared"] and "jax" in figures["versions"]
    runs = {(run["schedule"], run["remat"]): run for run in figures["runs"]}
    assert runs.keys() == {("1f1b", "stage"), ("zero_bubble", "stage")}
    # All schedules do the same work from the same parameters, but add float32 numbers in
    # different orders.
    losses = [run["first_loss"] for run in runs.values()]
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-5)
    for (schedule, _), run in runs.items():
        assert run["bubble_measured"] is None and 0 < run["bubble_predicted"] < 1
        assert 0 < run["work_bound_time_s"] and 0 < run["synchronous_time_s"]
        assert len(run["measured_over_predicted"]["rounds"]) == 2
        assert run["lost"] < 1 and run["compile_time_s"] > 0
        assert run["memory"]["temp_bytes"] > 0
        assert run["in_flight_per_stage"] == {"1f1b": [3, 1], "zero_bubble": [3, 2]}[schedule]

    parts = {part["part"]: part for part in figures["parts"]}
    assert all(part["time_alone_s"] > 0 < part["time_together_s"] for part in parts.values())
    flops = {name: part["matmul_flops"] for name, part in parts.items()}
    # The two halves of a backward do all of its work, and may do some of it twice.
    halves = flops["input_gradient"] + flops["weight_gradient"]
    assert flops["backward"] <= halves <= 1.5 * flops["backward"]
    # 4 microbatches pass both stages. The last stage runs its forward inside its backward. If no
    # stage were ever idle, it would run a forward and a backward in each of the 7 iterations.
    backward = flops["forward"] + flops["backward"]
    head = flops["head_gradient"]
    run = runs["1f1b", "stage"]
    first = 4 * (flops["evaluate"] + backward)
    assert run["matmul_flops_per_stage"] == [first, 4 * (backward + head)]
    # In the compiled step, XLA may share a product between the forward and the backward.
    never_idle = 7 * (flops["evaluate"] + backward + head)
    assert 0.95 * never_idle < run["matmul_flops_if_never_idle"] <= never_idle

    text = report.pipelines_as_text(figures)
    assert "zero_bubble stage" in text and "n/a" in text and "bubble can be measured" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stages=1"], "--stages=1"),
        (["--stages=64"], "64 devices"),
        (["--microbatches=3"], "train.num_microbatches=3"),
        (["--schedules=gpipe,gpip"], "'gpip'"),
        (["--schedules="], "--schedules"),
        (["--rounds=0"], "--rounds=0"),
        (["--config.mesh.model=2"], "mesh.model=2"),
        (["--config.train.remat=stage,full"], "train.remat=stage,full"),
        (["--config.pipeline.share_vocab=True"], "share_vocab"),
        (["--config.model.num_head=2"], "model.num_heads"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(capsys, args, message):
    assert pipeline.main([*ARGS, "--stages=2", "--schedules=1f1b", *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
