"""Runs whose batch size grows: `data.rampup_batch_size`."""

import dataclasses
import functools
import itertools
import json
import shutil
from contextlib import closing

import jax
import numpy as np
import pytest

from data.batches import epoch_elements, train_batches
from data.corpus import load_corpus
from pipeline.schedule import main as schedule_main
from tests.runs import CONFIG, FLOAT64, TINY, arguments, make_run
from tests.train.refusals import refusal
from train.config.config_files import load
from train.config.run_length import with_num_steps
from train.config.schema import validate_config
from train.main import main
from train.reporting.metrics import read_metrics
from train.run.assemble import with_batch_size

#: Batches of 4, 4, 8 and 12 examples, then of 16.
SIZES = (4, 4, 8, 12, 16, 16)
RAMPUP = ("model.num_layers=2", "data.rampup_batch_size=4,4,24", "train.num_microbatches=4")
CUBE = ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")
MESHES = {
    "data=4": ("mesh.data=4",),
    "fsdp=2, ZeRO 3": ("mesh.fsdp=2", "mesh.data=2", "memory.zero_stage=3"),
    "2x2x2": (*CUBE, "memory.zero_stage=2"),
    "zero_bubble": ("mesh.pipeline=2", "pipeline.schedule=zero_bubble"),
    "one microbatch": ("mesh.data=4", "train.num_microbatches=1"),
}


def trained(overrides) -> tuple[list[float], list[int]]:
    """Return the losses, and the number of examples, of the first steps."""
    run, corpus = make_run(overrides)
    state = run.state_layout.initial()
    batches = train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed)
    losses = []
    sizes = []
    for step, batch in enumerate(itertools.islice(batches, len(SIZES))):
        smaller = with_batch_size(run, run.config.data.batch_sizes.of_step(step))
        state, metrics = smaller.compile_train_step()(state, smaller.place_batch(batch))
        losses.append(float(metrics["loss"]))
        sizes.append(len(batch["index"]))
    return losses, sizes


@functools.cache
def expected_losses(corpus_overrides: tuple[str, ...]) -> list[float]:
    """Return the losses of steps that runs with fixed batch sizes take one after another."""
    base = (*TINY, *corpus_overrides, *FLOAT64, "model.num_layers=2")
    runs = {
        size: make_run(
            (*base, f"data.global_batch_size={size}", f"train.num_microbatches={size // 4}")
        )
        for size in SIZES
    }
    run, corpus = runs[4]
    state = run.state_layout.initial()
    small = train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed)
    losses = []
    for size in SIZES:
        parts = [next(small) for _ in range(size // 4)]
        batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        other = runs[size][0]
        state, metrics = other.compile_train_step()(state, other.place_batch(batch))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize("is_streamed", [False, True])
def test_iterator_continues_the_stream_at_any_step(is_streamed, corpus_overrides):
    streamed = ("data.streaming=True", "data.validation_fraction=0") if is_streamed else ()
    config = validate_config(load(CONFIG, [*TINY, *corpus_overrides, *RAMPUP, *streamed]))
    plain = dataclasses.replace(config.data, rampup_batch_size=())

    def open_batches(data, rows):
        return closing(train_batches(load_corpus(data, config.images), data, rows, seed=0))

    with open_batches(plain, range(16)) as batches:
        parts = [next(batches)["tokens"] for _ in range(4)]
    wanted = np.split(np.concatenate(parts), np.cumsum(SIZES))[:-1]
    with open_batches(config.data, range(16)) as batches:
        states = []
        for step, tokens in enumerate(wanted):
            states.append(batches.get_state())
            batch = next(batches)
            np.testing.assert_array_equal(batch["tokens"], tokens)
            assert batch["index"][0] == sum(SIZES[:step])
    for step in (1, 3, 5):
        # Two processes, of which each supplies a half of every batch.
        for rows in (range(8), range(8, 16)):
            with open_batches(config.data, rows) as batches:
                batches.set_state(states[step])
                half = np.split(wanted[step], 2)[rows.start // 8]
                np.testing.assert_array_equal(next(batches)["tokens"], half)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", list(MESHES))
def test_steps_equal_those_of_runs_with_these_batch_sizes(mesh, corpus_overrides):
    with jax.enable_x64(True):
        wanted = expected_losses(corpus_overrides)
        found, sizes = trained((*TINY, *corpus_overrides, *FLOAT64, *RAMPUP, *MESHES[mesh]))
    assert tuple(sizes) == SIZES
    # Rounding errors in float64 are about 1e-16 per sum; a wrong batch causes far larger ones.
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=0)


def logged(workdir) -> list[tuple]:
    """Return the logged step, batch size, rate and loss of each step."""
    names = ("step", "global_batch_size", "learning_rate", "loss", "grad_norm")
    lines = read_metrics(workdir / "metrics.jsonl")
    return [tuple(line[name] for name in names) for line in lines if "loss" in line]


@pytest.mark.thorough
def test_stopped_run_continues_to_the_bit_within_the_ramp_up(corpus_overrides, tmp_path, capsys):
    base = (*TINY, *corpus_overrides, "train.num_steps=6", "model.num_layers=1", *RAMPUP)
    saving = (*base, "checkpoint.every_steps=1", "checkpoint.max_to_keep=10")
    assert main(arguments(tmp_path / "whole", saving)) == 0
    printed = capsys.readouterr().err
    assert "batches of 4 in 1 microbatch(es) at first, and of 16 in 4 from step 5 on" in printed
    wanted = logged(tmp_path / "whole")
    assert [entry[1] for entry in wanted] == list(SIZES)
    for step in (1, 3):  # in the middle of a phase, and at its end
        run = tmp_path / f"after_{step}"
        shutil.copytree(tmp_path / "whole", run)
        for later in range(step + 1, 7):
            shutil.rmtree(run / "checkpoints" / str(later))
        assert main(arguments(run, (*saving, "mesh.data=1"))) == 0
        assert logged(run) == wanted
    facts = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert facts["units_per_step"] == 16 * 16


def test_throughput_counts_the_tokens_of_each_size(corpus_overrides):
    run, _ = make_run((*TINY, *corpus_overrides, *RAMPUP))
    smaller = with_batch_size(run, 4)
    assert (run.units_per_step, smaller.units_per_step) == (16 * 16, 4 * 16)
    assert smaller.config.train.num_microbatches == 1
    assert abs(smaller.flops_per_unit - run.flops_per_unit) <= 1
    assert with_batch_size(run, 16) is run


def test_epochs_count_the_examples_of_small_batches(corpus_overrides):
    any_length = [override for override in TINY if "num_steps" not in override]
    run, corpus = make_run((*any_length, *corpus_overrides, *RAMPUP, "train.num_epochs=2"))
    num_elements = epoch_elements(corpus, run.config.data, run.config.images)
    num_steps = with_num_steps(run.config, num_elements).train.num_steps
    sizes = run.config.data.batch_sizes
    assert sizes.first_element(num_steps - 1) < 2 * len(corpus.train)
    assert sizes.first_element(num_steps) >= 2 * len(corpus.train)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("train.num_microbatches=2", "mesh.data=8"),
            "a batch of 4 cannot be divided into 1 microbatch(es) × 8 replica(s) (mesh.data × "
            "mesh.fsdp × mesh.expert); choose START and INCREMENT that are multiples of 8,",
        ),
        (("pipeline.schedule=table.csv", "mesh.pipeline=2"), "begins with batches of 4, which the"),
    ],
)
def test_rampup_that_the_mesh_does_not_divide_is_refused(
    overrides, message, corpus_overrides, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    table = ["--schedule=1f1b", "--stages=2", "--microbatches=4", "--csv=table.csv"]
    schedule_main(table)
    base = (*TINY, *corpus_overrides, *RAMPUP)
    assert message in refusal(tmp_path / "run", (*base, *overrides), capsys)
