"""The memory check before step 0, and the search for settings that fit."""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import estimates
from predict.program.memory import memory
from sharding.memory import MemoryConfig
from sharding.mesh import MeshConfig, make_mesh
from tests.runs import CONFIG, FLOAT64, TINY, arguments, losses, make_run
from train.config.config_files import load
from train.config.schema import RunConfig, validate_config
from train.main import main
from train.planning.memory.budget import Budget, budget_of, compiled_bytes, host_memory_bytes
from train.planning.memory.fitter import MemoryFitter
from train.planning.memory.search import MemorySearch
from train.reporting.metrics import read_metrics
from train.run.assemble import assemble_run
from train.run.run import Run

pytestmark = [pytest.mark.usefixtures("shared_steps"), pytest.mark.drawn(5, among="thorough")]

#: Cases of the benchmark that CI compiles; `-m slow` adds the others.
CHOSEN = {
    "gpt2",
    "gpt2, nothing kept",
    "gpt2, data=8, ZeRO 3",
    "gpt2, 2×2×2",
    "gpt2, pipeline=4, zero bubble",
    "opt, fsdp=8, dots kept",
    "bert, 2×2×2",
    "llama, fsdp=2, data=2, model=2, ZeRO 2",
    "llama, context=2, data=2, model=2",
    "t5, pipeline=2, data=4, ZeRO 3",
}
#: XLA for CPUs computes bfloat16 in float32, so the estimate does not apply.
OTHERS = {"gpt2, bfloat16"}


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in CHOSEN))
        for name in estimates.CASES
        if name not in OTHERS
    ],
)
def test_estimate_is_close_to_the_compiled_memory(name):
    # The estimate does not include copies for layouts and the effects of scheduling.
    assert estimates.measure(estimates.make_run(name))["ratio"] == pytest.approx(1, abs=0.15)


def base(corpus_overrides) -> tuple[str, ...]:
    return (*TINY, *corpus_overrides, "data.sequence_length=64", "data.global_batch_size=32")


@pytest.fixture(scope="module")
def plain(corpus_overrides) -> Run:
    """The run for which the tests look for plans, on one device; its estimate is made once."""
    run, _ = make_run(base(corpus_overrides))
    return run


def planner(run: Run, budget: Budget) -> MemoryFitter:
    vocab_size = run.model_config.vocab_size
    return MemoryFitter(
        lambda config: assemble_run(config, run.mesh, vocab_size=vocab_size), budget
    )


def with_auto(run: Run) -> RunConfig:
    memory = dataclasses.replace(run.config.memory, placement="auto")
    return dataclasses.replace(run.config, memory=memory)


def of_device(num_bytes: float) -> Budget:
    return Budget(device_bytes=num_bytes, host_bytes=2.0**40, devices_per_host=1, device_kind="cpu")


MESHES = {
    "one device": (),
    # With a smaller batch, the logits of one sequence alone exceed the budget of an eighth.
    "data=4": ("mesh.data=4", "data.global_batch_size=64"),
    "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
}


@pytest.mark.slow(only=["one device"])
@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", ["one device", pytest.param("data=4", marks=pytest.mark.slow), "2x2x2"]
)
def test_auto_fits_an_eighth_of_the_memory_with_equal_losses(mesh, corpus_overrides):
    with jax.enable_x64(True):
        plain, corpus = make_run((*base(corpus_overrides), *FLOAT64, *MESHES[mesh]))
        budget = of_device(plain.estimate_memory().device_bytes / 8)
        run = planner(plain, budget).search(with_auto(plain))
        assert run.estimate_memory().device_bytes <= budget.device_bytes
        # Rounding errors in float64 are about 1e-16 per sum; bugs cause far larger differences.
        np.testing.assert_allclose(
            losses(run, corpus, 4), losses(plain, corpus, 4), rtol=1e-9, atol=0
        )


@pytest.mark.thorough
def test_auto_keeps_a_config_that_fits(plain):
    budget = of_device(4 * plain.estimate_memory().device_bytes)
    run = planner(plain, budget).search(with_auto(plain))
    assert run.config == plain.config


@pytest.mark.thorough
def test_plan_too_large_after_compilation_is_followed_by_a_leaner_one(plain, monkeypatch):
    budget = of_device(0.6 * plain.estimate_memory().device_bytes)
    compiled = []

    def twice_the_estimate(run):
        compiled.append(run.estimate_memory().device_bytes)
        return 2 * run.estimate_memory().device_bytes

    monkeypatch.setattr("train.planning.memory.fitter.compiled_bytes", twice_the_estimate)
    run = planner(plain, budget).search(with_auto(plain))
    assert len(compiled) == 2 and compiled[1] <= budget.device_bytes / 2 < compiled[0]
    assert run.estimate_memory().device_bytes == compiled[1]
    # Saving a little memory costs a little time; host memory is the last resort.
    assert run.config.memory.placement == "device"


@pytest.mark.thorough
def test_error_lists_changes_that_fit(corpus_overrides, plain):
    budget = of_device(plain.estimate_memory().device_bytes / 2)
    with pytest.raises(ValueError, match="a step takes more memory than there is") as raised:
        planner(plain, budget).check_estimate(plain)
    assert "\n" not in str(raised.value)
    ways = re.findall(r"(?:fit: |; )--config\.(.+?): ", str(raised.value))
    assert {way.partition("=")[0] for way in ways} >= {"train.num_microbatches"}
    for way in ways:
        changed, _ = make_run((*base(corpus_overrides), *way.split(" --config.")))
        assert changed.estimate_memory().device_bytes <= budget.device_bytes


@pytest.mark.thorough
def test_run_that_no_plan_fits_is_rejected_with_the_leanest_plan(plain):
    budget = of_device(plain.estimate_memory().device_bytes / 1000)
    checked = planner(plain, budget)
    for is_auto in (False, True):
        with pytest.raises(ValueError, match="no plan fits into memory") as raised:
            if is_auto:
                checked.search(with_auto(plain))
            else:
                checked.check_estimate(plain)
        assert "memory.placement=host" in str(raised.value)
        assert "use more devices" in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.thorough
def test_host_memory_has_a_budget_too(corpus_overrides):
    plain, _ = make_run((*base(corpus_overrides), "memory.placement=host"))
    host = plain.estimate_memory().host_bytes
    budget = dataclasses.replace(of_device(math.inf), host_bytes=4.1 * host, devices_per_host=4)
    planner(plain, budget).check_estimate(plain)
    budget = dataclasses.replace(budget, host_bytes=3.9 * host)
    with pytest.raises(ValueError, match="takes more memory than there is") as raised:
        planner(plain, budget).check_estimate(plain)
    assert "--config.memory.placement=device" in str(raised.value)
    budget = dataclasses.replace(budget, device_bytes=2.0 * plain.estimate_memory().device_bytes)
    assert planner(plain, budget).search(with_auto(plain)).estimate_memory().host_bytes < host


@pytest.mark.thorough
def test_run_with_auto_saves_its_plan_and_resumes_with_it(corpus_overrides, plain, tmp_path):
    budget_gib = plain.estimate_memory().device_bytes / 8 / 2**30
    overrides = (
        *base(corpus_overrides),
        "memory.placement=auto",
        f"memory.device_budget={budget_gib}",
        "optimizer.schedule=constant",  # so that all starts share their steps
        "train.num_steps=4",
        "checkpoint.every_steps=2",
    )
    assert main(arguments(tmp_path, overrides)) == 0
    saved: Any = load(str(tmp_path / "config.yaml"))
    assert saved.memory.placement == "host" and saved.train.num_microbatches > 2
    replayed = validate_config(saved)
    assert main(arguments(tmp_path, (*overrides, "train.num_steps=5"))) == 0
    assert validate_config(load(str(tmp_path / "config.yaml"))).memory == replayed.memory
    assert "plan    --config.memory.placement=" in (tmp_path / "memory.txt").read_text()
    again = [f"--config={tmp_path / 'config.yaml'}", f"--workdir={tmp_path}"]
    assert main([*again, "--config.train.num_steps=6"]) == 0
    assert "plan " not in (tmp_path / "memory.txt").read_text()
    assert main([*arguments(tmp_path, overrides), "--mode=eval"]) == 0
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.thorough
def test_run_that_does_not_fit_is_rejected_before_writing(corpus_overrides, tmp_path, capsys):
    overrides = (*base(corpus_overrides), "memory.device_budget=0.000001")
    assert main(arguments(tmp_path / "run", overrides)) == 2
    assert "error: no plan fits into memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_compiled_steps_over_the_budget_are_refused(plain, monkeypatch):
    limit = 1.05 * plain.estimate_memory().device_bytes
    monkeypatch.setattr("train.planning.memory.fitter.compiled_bytes", lambda run: 1.1 * limit)
    with pytest.raises(ValueError, match="as compiled"):
        planner(plain, of_device(limit)).check_compiled(plain)


@pytest.mark.thorough
def test_compiled_bytes_equal_the_larger_step(corpus_overrides, plain):
    train, evaluation = (
        memory(step).in_all for step in (plain.compile_train_step(), plain.compile_eval_step())
    )
    assert train is not None and evaluation is not None
    assert compiled_bytes(plain) == train > evaluation
    hosted, _ = make_run((*base(corpus_overrides), "memory.placement=host"))
    assert compiled_bytes(hosted) is None  # CPUs do not tell device and host memory apart


def test_budget_is_configured_or_nine_tenths_of_the_memory(monkeypatch):
    mesh = make_mesh(MeshConfig(data=2), jax.devices())
    found = budget_of(MemoryConfig(device_budget=2.0, host_budget=0.5), mesh)
    assert (found.device_bytes, found.host_bytes) == (2 * 2**30, 2**29)
    found = budget_of(MemoryConfig(), mesh)
    assert found.host_bytes == 0.9 * host_memory_bytes()
    assert found.device_bytes == found.host_bytes / 2  # both devices share the machine's memory
    assert found.devices_per_host == len(jax.local_devices()[:2])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("memory.device_budget=0.0",),
            "memory.device_budget=0.0 must be more than 0, or None; give GiB",
        ),
        (
            ("memory.host_budget=-1.0",),
            "memory.host_budget=-1.0 must be more than 0, or None; give GiB",
        ),
    ],
)
def test_invalid_budgets_are_rejected(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_config(load(CONFIG, overrides))


def test_search_begins_with_all_activations_if_rematerialization_is_open(corpus_overrides):
    run, _ = make_run(base(corpus_overrides))
    for remat, start in (("auto", "none"), ("dots", "dots")):
        changes = {"train.remat": remat, "memory.placement": "auto"}
        tried = []

        def assemble(config, tried=tried):
            tried.append(config.train.remat)
            return run

        search = MemorySearch(run.config.with_values(changes), assemble, of_device(math.inf))
        assert search.base.run is run and tried == [start]


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "is_offered"), [("sgd", True), ("muon", True), ("lamb", False)])
def test_host_memory_is_offered_only_to_optimizers_that_update_slices(
    name, is_offered, corpus_overrides
):
    run, _ = make_run((*base(corpus_overrides), f"optimizer.name={name}"))
    levers = MemorySearch(run.config, lambda config: run, of_device(math.inf)).levers
    settings = [setting for lever in levers for setting in lever]
    assert any("memory.placement" in setting for setting in settings) == is_offered
