"""Tests of `benchmarks.step` on a tiny model: its JSON, and the work of its PyTorch peer."""

import functools
import json

import pytest

from benchmarks import step
from benchmarks.harness import timing
from tests.runs import CONFIG, ROOT, TINY

ARGS = [
    f"--config={CONFIG}",
    *(f"--config.{override}" for override in TINY if not override.startswith("data.name")),
    "--config.model.num_layers=2",
    "--steps=2",
    "--rounds=2",
]
SPEED = {"step_time_s", "tokens_per_s", "model_flops_per_s", "mfu", "compile_time_s", "first_loss"}


def run(capsys, *args):
    """Run the benchmark and return the JSON object that it prints."""
    assert step.main([*ARGS, "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.thorough
def test_json_has_the_promised_keys_on_a_2x2x2_mesh(capsys):
    mesh = ("data", "model", "pipeline")
    figures = run(capsys, *(f"--config.mesh.{axis}=2" for axis in mesh))
    assert figures["command"].startswith("python -m benchmarks.step --config=")
    assert figures["hardware"]["num_devices"] == 8 and figures["hardware"]["platform"] == "cpu"
    assert {"python", "jax", "flax"} <= figures["versions"].keys()
    assert figures["work"]["tokens_per_step"] == 16 * 16
    ours = figures["ours"]
    assert ours.keys() == SPEED | {"memory", "collectives"}
    assert ours["mfu"] is None  # a CPU's peak is unknown
    times_s = ours["step_time_s"]
    order = ["min", "quartile_low", "median", "quartile_high", "max"]
    assert [times_s[name] for name in order] == sorted(times_s.values())
    assert ours["tokens_per_s"] == pytest.approx(16 * 16 / times_s["median"])
    assert ours["memory"]["temp_bytes"] > 0 and ours["memory"]["argument_bytes"] > 0
    found = {(row["kind"], *row["axes"]) for row in ours["collectives"]}
    assert {("collective-permute", "pipeline"), ("all-reduce", "model")} <= found
    assert all(row["bytes"] > 0 and row["loop_depth"] >= 0 for row in ours["collectives"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "unit", "others"),
    [
        ("gpt2", "token", ["model.dropout=0.0", "data.tokenizer=bytes", "data.sequence_length=16"]),
        pytest.param(
            "llama",
            "token",
            ["data.tokenizer=bytes", "data.sequence_length=16"],
            marks=pytest.mark.thorough,
        ),
        pytest.param("vit", "image", ["model.drop_path=0.0"], marks=pytest.mark.thorough),
    ],
)
def test_peer_has_the_same_parameters_flops_and_first_loss(capsys, config, unit, others):
    torch = pytest.importorskip("torch")
    num_threads = torch.get_num_threads()
    arguments = [f"--config={ROOT}/configs/{config}.py", "--steps=2", "--rounds=2", "--json"]
    overrides = ["data.global_batch_size=4", "model.num_layers=2", *others]
    arguments += [f"--config.{override}" for override in overrides]
    try:
        assert step.main([*arguments, "--peer=torch", "--no_compile"]) == 0
    finally:
        torch.set_num_threads(num_threads)
    figures = json.loads(capsys.readouterr().out)
    equality = figures["equality"]
    for name in ("num_params", f"forward_flops_per_{unit}"):
        assert equality[name]["ours"] == equality[name]["peer"]
    # Float32 numbers are added in different orders; the loss is about ln(257) ≈ 5.5.
    assert equality["first_loss"]["ours"] == pytest.approx(equality["first_loss"]["peer"], abs=1e-5)
    assert figures["torch_eager"].keys() == {key.replace("token", unit) for key in SPEED}
    assert figures["torch_compiled"]["skipped"]
    ratio = figures["speed_ratios"]["torch_eager"]
    assert len(ratio["rounds"]) == 2 and ratio["min"] <= ratio["median"] <= ratio["max"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config.train.remat=dots", "--peer=torch"], "train.remat=dots"),
        (["--config.model.num_head=2"], "model.num_heads"),
        (["--steps=0"], "--steps=0"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(capsys, args, message):
    assert step.main([*ARGS, *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_interleave_alternates_and_ratio_compares_speeds():
    calls = []

    steps = {name: functools.partial(calls.append, name) for name in "ab"}
    timing.interleave(steps, num_rounds=2, num_steps=2)
    assert "".join(calls) == "aaabbb" * 2  # one untimed and two timed steps per turn
    ours = timing.StepTimes(rounds=((1.0,), (2.0,)))
    peer = timing.StepTimes(rounds=((3.0,), (4.0,)))
    assert timing.ratios(ours, peer)["rounds"] == [3.0, 2.0]
