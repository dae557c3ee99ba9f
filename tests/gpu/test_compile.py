"""Tests of the command `python -m train.compile`."""

import json

import pytest

from tests.runs import ROOT
from train.compile import main

pytestmark = pytest.mark.gpu_compiler


def run(capsys, *arguments: str):
    code = main([f"--config={ROOT}/configs/gpt2_3d.py", *arguments])
    return code, capsys.readouterr()


def test_compile_reports_a_step_and_writes_its_files(capsys, tmp_path):
    code, printed = run(
        capsys,
        "--target=h100:1x8",
        "--config.precision.compute=bfloat16",
        "--json",
        f"--out={tmp_path}",
    )
    assert code == 0
    found = json.loads(printed.out)
    assert found["mesh"] == {"pipeline": 2, "data": 2, "model": 2}
    assert [selected["kernel"] for selected in found["attention"]] == ["cudnn"]
    memory = found["memory"]
    assert memory["fits"] and memory["compiled_bytes"] > 0 and memory["host_bytes"] == 0
    assert memory["ratio"] == memory["estimated_bytes"] / memory["compiled_bytes"]
    predicted = found["predicted"]
    assert 0 < predicted["exposed_communication_s"] <= predicted["communication_s"]
    assert 0 < predicted["bubble_s"] < predicted["step_time_s"]
    assert predicted["tokens_per_s"] == pytest.approx(16 * 128 / predicted["step_time_s"])
    assert 0 < predicted["mfu"] < 1
    kinds = {(row["kind"], tuple(row["axes"])) for row in found["collectives"]}
    assert ("all-reduce", ("model",)) in kinds and ("collective-permute", ("pipeline",)) in kinds
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "predicted" in (tmp_path / "step.svg").read_text()
    assert (tmp_path / "step.hlo.txt").read_text().startswith("HloModule")


def test_compile_takes_4096_gpus(capsys):
    """On 512 hosts, all-reduces of single numbers cross hosts, and small ones run in loops."""
    code, printed = run(
        capsys,
        "--target=h100:512x8",
        "--json",
        "--config.mesh.data=1024",
        "--config.data.global_batch_size=4096",
        "--config.precision.compute=bfloat16",
    )
    assert code == 0
    found = json.loads(printed.out)
    assert found["num_devices"] == 4096
    rows = {(row["kind"], tuple(row["axes"]), row["loop"]) for row in found["collectives"]}
    assert ("all-reduce", ("model",), "layers") in rows
    assert {axes for kind, axes, _ in rows if kind == "all-reduce"} >= {("data",), ("pipeline",)}


def test_compile_needs_no_data(capsys):
    code, printed = run(
        capsys,
        "--target=h100:1x1",
        "--config.data.name=text",
        "--config.precision.compute=bfloat16",
        "--config.mesh.pipeline=1",
        "--config.mesh.data=1",
        "--config.mesh.model=1",
        "--config.model.num_layers=1",
        "--config.train.num_microbatches=1",
    )
    assert (code, printed.err) == (0, "")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["h200", "b200", "a100", "v100"])
def test_compile_takes_every_target(capsys, kind):
    code, printed = run(
        capsys,
        f"--target={kind}:1x1",
        "--config.mesh.pipeline=1",
        "--config.mesh.data=1",
        "--config.mesh.model=1",
        "--config.model.num_layers=1",
        "--config.train.num_microbatches=1",
        f"--config.precision.compute={'float16' if kind == 'v100' else 'bfloat16'}",
    )
    assert code == 0
    assert ("attention  cudnn" in printed.out) == (kind != "v100")
    assert "predicted:" in printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target=h100",), "'h100' must be KIND:HOSTSxGPUS"),
        (("--target=h900:1x8",), "'h900' is none of a100, b200, h100, h200, v100"),
        (("--target=h100:8x1024",), "has 8,192 GPUs; choose at most 4,096"),
        (("--target=h100:1x4",), "needs 8 devices but 4 are available"),
        (("--target=h100:2x8",), "has 8 devices, but --target=h100:2x8 has 16"),
        (("--target=h100:1x8", "--config.model.heads=4"), "unknown key"),
    ],
)
def test_compile_refuses_in_one_sentence(capsys, arguments, message):
    code, printed = run(capsys, *arguments)
    assert code == 2
    assert message in printed.err
    assert printed.out == ""


def test_step_that_does_not_fit_is_reported_with_settings_that_would(capsys):
    arguments = ["--target=h100:1x8", "--config.precision.compute=bfloat16", "--json"]
    arguments += ["--config.train.remat=none", "--config.data.global_batch_size=128"]
    arguments += ["--config.model.num_layers=8"]

    def memory(*others: str):
        code, printed = run(capsys, *arguments, *others)
        assert code == 0
        return json.loads(printed.out)["memory"]

    whole = memory()
    assert whole["fits"] and whole["remedies"] == []
    budget = f"--config.memory.device_budget={0.7 * whole['compiled_bytes'] / 2**30}"
    small = memory(budget)
    assert not small["fits"] and small["remedies"]
    settings, _, costs = small["remedies"][0].partition(": ")
    assert "a device, " in costs and " × the step time" in costs
    assert memory(budget, *settings.split())["fits"]


@pytest.mark.parametrize(("budget", "length", "disables"), [(70, 64, True), (0.001, 96, False)])
def test_xla_recomputes_only_if_the_step_does_not_fit(capsys, budget, length, disables):
    code, printed = run(
        capsys,
        "--target=h100:1x8",
        "--verbose",
        f"--config.memory.device_budget={budget}",
        f"--config.data.sequence_length={length}",  # no other test compiles this step
        "--config.precision.compute=bfloat16",
    )
    assert code == 0
    assert ("xla_disable_hlo_passes=rematerialization" in printed.out) == disables
    assert "xla_gpu_enable_triton_gemm=False: autotuning" in printed.out
