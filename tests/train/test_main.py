"""The command line of train.main: the files of a run, and error messages for bad input."""

import errno
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from tests.runs import CONFIG, TINY, write_corpus
from train.lifecycle.exit_codes import REFUSED
from train.main import main
from train.planning.memory.search import MemorySearch
from train.report.run_records import read_runs
from train.reporting.metrics import read_metrics

pytestmark = [pytest.mark.usefixtures("shared_steps"), pytest.mark.drawn(5, among="thorough")]


def run_main(workdir, overrides, *flags, config=CONFIG) -> int:
    arguments = [f"--config.{override}" for override in overrides]
    return main([f"--config={config}", f"--workdir={workdir}", *arguments, *flags])


def error_line(capsys) -> str:
    """Return the line with the error message, and check that there is no traceback."""
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.fixture(scope="module")
def trained(corpus_overrides, tmp_path_factory):
    """A finished run of 6 steps, with checkpoints of steps 2, 4 and 6."""
    workdir = tmp_path_factory.mktemp("run")
    overrides = (
        *TINY,
        *corpus_overrides,
        "train.num_steps=6",
        "checkpoint.every_steps=2",
        "eval.every_steps=3",
    )
    assert run_main(workdir, overrides) == 0
    return workdir, overrides


def test_run_writes_metrics_config_checkpoints_and_tensorboard(trained):
    workdir, _ = trained
    entries = read_metrics(workdir / "metrics.jsonl")
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 5, 6]
    promised = {"step", "loss", "learning_rate", "grad_norm", "step_time_s", "tokens_per_s"}
    assert all(promised <= entry.keys() for entry in steps)
    evaluations = [entry for entry in entries if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [3, 6]
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["2", "4", "6"]
    assert list((workdir / "tensorboard").iterdir())


def test_run_records_its_machine_and_memory_for_the_report(trained):
    workdir, _ = trained
    (run,) = read_runs([workdir])
    assert run.problems == [] and run.facts is not None
    assert run.facts["software"]["jax"] == jax.__version__
    assert run.facts["units_per_step"] == 16 * 16 and run.facts["unit"] == "token"
    memory = run.facts["memory"]
    rows = [line.split() for line in (workdir / "memory.txt").read_text().splitlines()]
    (planned,) = [float(row[2]) for row in rows if row[:2] == ["in", "all"]]
    assert sum(memory["planned_device"].values()) / 2**20 == pytest.approx(planned, abs=0.05)
    assert memory["compiled_device"] / 2**20 == pytest.approx(planned, rel=0.5)


@pytest.mark.thorough
@pytest.mark.parametrize("overrides, code", [((), 0), (("mesh.data=3",), 2)])
def test_exit_code_does_not_depend_on_a_full_log(overrides, code, corpus_overrides, tmp_path):
    arguments = [
        f"--config.{o}" for o in (*TINY, *corpus_overrides, "train.num_steps=2", *overrides)
    ]
    command = [sys.executable, "-m", "train.main", f"--config={CONFIG}", f"--workdir={tmp_path}"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, *arguments], stdout=full, stderr=full, timeout=200)
    assert done.returncode == code


@pytest.mark.parametrize("kind", ["file", "below a file", "read-only", "full"])
def test_unusable_workdir_is_refused(kind, corpus_overrides, tmp_path, capsys, monkeypatch):
    workdir = tmp_path / "run"
    if kind == "file":
        workdir.write_text("x")
    elif kind == "below a file":
        (tmp_path / "run").write_text("x")
        workdir = tmp_path / "run" / "here"
    else:
        number = errno.EROFS if kind == "read-only" else errno.ENOSPC

        def refuse(path, *_):
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr("train.lifecycle.workdir_lock.open_in_place", refuse)
    assert run_main(workdir, (*TINY, *corpus_overrides)) == REFUSED
    error = error_line(capsys)
    assert str(workdir) in error and "cannot be used" in error and "choose another path" in error


@pytest.mark.thorough
def test_saved_config_replays_the_run(trained, tmp_path):
    workdir, _ = trained
    assert run_main(tmp_path, (), config=workdir / "config.yaml") == 0
    losses = [
        [entry["loss"] for entry in read_metrics(path / "metrics.jsonl") if "loss" in entry]
        for path in (workdir, tmp_path)
    ]
    assert losses[0] == losses[1]
    assert (tmp_path / "config.yaml").read_text() == (workdir / "config.yaml").read_text()


def test_eval_mode_repeats_the_last_evaluation(trained, capsys):
    workdir, overrides = trained
    assert run_main(workdir, overrides, "--mode=eval") == 0
    last = read_metrics(workdir / "metrics.jsonl")[-1]
    printed = capsys.readouterr().out.split()
    assert float(printed[printed.index("eval_loss") + 1]) == pytest.approx(last["eval_loss"], 1e-5)


@pytest.mark.thorough
def test_fast_dev_run_trains_three_steps_and_does_not_use_the_workdir(trained, capsys):
    workdir, overrides = trained
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    assert run_main(workdir, (*overrides, "model.num_layers=2"), "--fast_dev_run") == 0
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before
    printed = capsys.readouterr().out
    assert [f"step {i}/3" in printed for i in (1, 2, 3, 4)] == [True, True, True, False]


def test_check_prints_the_header_of_a_run_and_writes_no_file(corpus_overrides, tmp_path, capsys):
    overrides = (*TINY, *corpus_overrides)
    assert run_main(tmp_path / "run", overrides, "--check") == 0
    printed = capsys.readouterr()
    assert printed.out == "config is valid\n"
    starts = {line.split()[0] for line in printed.err.splitlines()}
    assert {"workdir", "model", "mesh", "attention", "data", "memory"} <= starts
    assert "a device, as compiled" in printed.err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_check_refuses_what_a_run_refuses(trained, capsys):
    workdir, overrides = trained
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    assert run_main(workdir, overrides, "--check") == 0
    assert run_main(workdir, (*overrides, "data.sequence_length=8"), "--check") == REFUSED
    assert "data.sequence_length: 16 -> 8" in error_line(capsys)
    assert run_main(workdir, (*overrides, "mesh.data=3"), "--check") == REFUSED
    error_line(capsys)
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before


def test_check_refuses_steps_that_do_not_fit_as_compiled(
    corpus_overrides, tmp_path, capsys, monkeypatch
):
    def refuse(*_):
        raise ValueError("too large as compiled")

    monkeypatch.setattr("train.planning.memory.fitter.MemoryFitter.check_compiled", refuse)
    assert run_main(tmp_path, (*TINY, *corpus_overrides), "--check") == REFUSED
    assert "too large as compiled" in error_line(capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mode=eval",), "leave --mode=eval and --fast_dev_run out"),
        (("--fast_dev_run",), "leave --mode=eval and --fast_dev_run out"),
        (("--workdir=s3://bucket/run",), "--workdir=s3://bucket/run is in an object store"),
    ],
)
def test_check_refuses_other_options(flags, message, capsys):
    try:
        code = main([f"--config={CONFIG}", "--check", *flags])
    except SystemExit as error:
        code = error.code
    assert code == REFUSED
    assert message in error_line(capsys)


def test_evaluation_says_which_batches_it_leaves_out(trained, capsys):
    workdir, overrides = trained
    assert run_main(workdir, overrides, "--mode=eval") == 0
    assert "evaluated" not in capsys.readouterr().err
    assert run_main(workdir, (*overrides, "eval.num_batches=2"), "--mode=eval") == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"eval\.num_batches=2: evaluated 2 of \d+ batches of the validation split; "
        r"--config\.eval\.num_batches=None evaluates all",
        last,
    )
    cancelled = (*overrides, "eval.num_batches=2", "eval.num_batches=None")
    assert run_main(workdir, cancelled, "--mode=eval") == 0
    assert "evaluated" not in capsys.readouterr().err


@pytest.mark.thorough
def test_finished_run_reports_it_and_changes_nothing(trained, capsys):
    workdir, overrides = trained
    before = (workdir / "metrics.jsonl").read_text()
    assert run_main(workdir, overrides) == 0
    log = capsys.readouterr().err
    assert "nothing is left to train" in log and "ended   step 6 of 6, goodput" in log
    assert (workdir / "metrics.jsonl").read_text() == before


@pytest.mark.thorough
def test_run_trains_with_an_empty_validation_split_and_warnings(corpus_overrides, tmp_path, capsys):
    overrides = (*TINY, *corpus_overrides, "data.validation_fraction=0", "train.num_steps=2")
    assert run_main(tmp_path, overrides) == 0
    log = capsys.readouterr().err
    assert log.count("validation split is empty") == 1
    assert log.count("optimizer.warmup_steps=5 takes all of train.num_steps=2") == 1
    assert [e["step"] for e in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert run_main(tmp_path, overrides, "--mode=eval") == 2
    assert "no validation data" in error_line(capsys)


def test_evaluation_without_a_matching_checkpoint_is_rejected(trained, tmp_path, capsys):
    workdir, overrides = trained
    assert run_main(tmp_path / "nothing", overrides, "--mode=eval") == 2
    assert "has no checkpoint" in error_line(capsys)
    assert not (tmp_path / "nothing").exists()
    assert run_main(workdir, (*overrides, "data.sequence_length=8"), "--mode=eval") == 2
    assert "data.sequence_length: 16 -> 8" in error_line(capsys)


def test_longer_run_resumes_and_another_model_is_rejected(trained, tmp_path, capsys):
    workdir, overrides = trained
    changed = (*overrides, "model.num_layers=2", "data.sequence_length=8")
    assert run_main(workdir, changed) == 2
    message = error_line(capsys)
    assert "model.num_layers: 4 -> 2" in message and "data.sequence_length: 16 -> 8" in message


@pytest.mark.thorough
def test_damaged_checkpoint_is_skipped(corpus_overrides, tmp_path, capsys):
    overrides = (*TINY, *corpus_overrides, "train.num_steps=4", "checkpoint.every_steps=2")
    assert run_main(tmp_path, overrides) == 0
    before = [m["loss"] for m in read_metrics(tmp_path / "metrics.jsonl") if "loss" in m]
    data = max((tmp_path / "checkpoints" / "4").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    capsys.readouterr()
    assert run_main(tmp_path, overrides) == 0
    log = capsys.readouterr().err
    assert f"Skipping checkpoint {tmp_path}/checkpoints/4: " in log
    assert "step 2 of train.num_steps=4" in log
    after = [m["loss"] for m in read_metrics(tmp_path / "metrics.jsonl") if "loss" in m]
    assert after == before


BAD = {
    "unknown key": (("train.num_step=3",), "train.num_steps"),
    "devices that are no square": (
        ("mesh.model=6", "tensor.mode=2d"),
        "mesh.model=6 must be a square; choose for example 4 or 9",
    ),
    "batch and squares": (
        ("mesh.model=8", "tensor.mode=2.5d", "tensor.depth=2", "data.global_batch_size=6"),
        "4 groups of examples in tensor.mode='2.5d' must divide data.global_batch_size=6",
    ),
    "mesh and heads": (("mesh.model=3",), "mesh.model=3 must divide"),
    "more stages than layers": (("mesh.pipeline=8",), "exceeds the model's 4 layers"),
    "layers per stage": (
        ("mesh.pipeline=3", "pipeline.layers_per_stage=1,1,1"),
        "needs 3 numbers that add up to 4, such as (2, 1, 1)",
    ),
    "chunks that a schedule has not": (("pipeline.chunks=2",), "interleaved_1f1b"),
    "table that is not there": (("pipeline.schedule=nowhere.csv",), "nowhere.csv"),
    "shared vocab and another loss": (
        ("pipeline.share_vocab=true", "mesh.pipeline=2", "model.loss=tests.runs:squared_error"),
        "pipeline.share_vocab=False",
    ),
    "shared vocab and a model that cannot": (
        (
            "pipeline.share_vocab=true",
            "mesh.pipeline=2",
            "model.name=tests.runs:NeedsWholeVocab",
        ),
        "can_share_vocab = True",
    ),
    "shared vocab and a head of its own": (
        ("pipeline.share_vocab=true", "mesh.pipeline=2", "model.name=tests.runs:OwnHead"),
        "can_share_vocab = True",
    ),
    "shared vocab where one stage runs alone": (
        ("pipeline.share_vocab=true", "mesh.pipeline=2", "model.name=tests.runs:LooksUpLate"),
        "before_decoder uses the vocab",
    ),
    "optimizer that mixes layers": (
        ("optimizer.name=tests.train.optim.test_per_layer:clipped_by_global_norm",),
        "clip with optimizer.clip_norm instead of optax.clip_by_global_norm",
    ),
    "mesh and batch": (("mesh.data=3",), "mesh.data=3"),
    "mesh axis without use": (("mesh.expert=2",), "mesh.expert=2 divides experts"),
    "missing file": (("data.paths=nowhere/*.txt",), "nowhere/*.txt"),
    "missing tokenizer": (("data.tokenizer=nowhere.json",), "nowhere.json"),
    "weights over data": (("rules.mlp=data", "mesh.data=2"), "split over 'pipeline', and only"),
    "layers over data": (("rules.layers=data", "mesh.data=2"), "'data'"),
    "vocab over pipeline": (
        ("rules.vocab=pipeline", "mesh.pipeline=2"),
        "set pipeline.share_vocab=True",
    ),
    "layers over fsdp": (
        ("rules.layers=['fsdp', 'pipeline']", "rules.embed=none", "mesh.pipeline=2", "mesh.fsdp=2"),
        "layers can be split only over 'pipeline'",
    ),
    "layers not split": (("rules.layers=none", "mesh.pipeline=2"), "rules.layers=pipeline"),
    "two dims on one axis": (("rules.seq=model", "mesh.model=2"), "both split over mesh axis"),
    "batch over model": (
        ("rules.batch=model", "mesh.model=2"),
        "rules.batch='model': a batch is al",
    ),
    "loss that is none": (("model.loss=json:__name__",), "model.loss='json:__name__' is not a f"),
    "schedule": (("pipeline.schedule=2f2b",), "choose from gpipe, 1f1b"),
    "wrong type": (("train.num_steps=many",), "train.num_steps='many'"),
    "model path": (("model.name=nowhere:Model",), "model.name='nowhere:Model'"),
    "small vocabulary": (("model.vocab_size=100",), "tokenizer's 257 tokens"),
    "labels of no checkpoint": (("train.init_labels=new",), "needs config.init_from"),
    "optimizer name": (("optimizer.name=adamm",), "optimizer.name='adamm'"),
    "optimizer path": (("optimizer.name=tests.runs:nowhere",), "tests.runs:nowhere"),
    "LoRA target": (("lora.rank=2", "lora.targets=qvk"), "qvk"),
    "best metric": (
        (
            "checkpoint.keep_best=1",
            "checkpoint.best_metric=eval_los",
            "checkpoint.every_steps=2",
            "eval.every_steps=2",
        ),
        "choose eval_loss, eval_perplexity",
    ),
    "unknown corpus": (("data.name=wikki40b", "data.paths="), "wikki40b"),
}
#: Those whose data must be looked for.
BAD_DATA = ("missing file", "unknown corpus")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_reported_before_data_is_read_in_one_sentence(
    case, corpus_overrides, tmp_path, capsys, monkeypatch
):
    if case not in BAD_DATA:
        monkeypatch.setattr("train.build.load_corpus", lambda *_: pytest.fail("data was read"))
    overrides, expected = BAD[case]
    assert run_main(tmp_path / "run", (*TINY, *corpus_overrides, *overrides)) == 2
    assert expected in error_line(capsys)
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.thorough
def test_run_that_exceeds_the_memory_of_the_machine_is_refused(
    corpus_overrides, tmp_path, capsys, monkeypatch
):
    # The search for settings that would fit traces many steps, and has tests of its own.
    monkeypatch.setattr(MemorySearch, "single", lambda self: [])
    monkeypatch.setattr(MemorySearch, "fitting", lambda self: iter(()))
    huge = ("model.embed_dim=65536", "model.num_layers=64")  # 13 TB of parameters
    assert run_main(tmp_path / "run", (*TINY, *corpus_overrides, *huge)) == REFUSED
    assert "memory" in error_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_run_whose_long_sequences_exceed_the_memory_is_refused(tmp_path, capsys):
    """The parameters take 13 MB, but the activations of 100,000 positions do not fit."""
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text("to be or not to be " * 5_000)
    overrides = (
        *TINY,
        f"data.paths={tmp_path}/*.txt",
        f"data.cache_dir={tmp_path}/cache",
        "data.sequence_length=100000",
        "model.num_layers=1",
        "memory.device_budget=2.0",
    )
    assert run_main(tmp_path / "run", overrides) == REFUSED
    error = error_line(capsys)
    assert re.search(r"takes \d+\.\d+ GiB a device \(budget: 2\.00 GiB\)", error)
    assert re.search(
        r"the largest part is (activations|temporaries); .* data\.sequence_length", error
    )
    assert "compiled" not in error  # refused by the estimate, in a few seconds
    assert not (tmp_path / "run").exists()


def test_broken_files_are_named(corpus_overrides, tmp_path, capsys):
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"model": ')
    base = (*TINY, *corpus_overrides)
    assert run_main(tmp_path / "run", (*base, f"data.tokenizer={broken}")) == 2
    assert str(broken) in error_line(capsys)
    (tmp_path / "empty.txt").write_text("")
    assert run_main(tmp_path / "run", (*base, f"data.paths={tmp_path}/empty.txt")) == 2
    assert "empty.txt" in error_line(capsys)
    assert run_main(tmp_path / "run", base, config=tmp_path / "nowhere.py") == 2
    assert "nowhere.py" in error_line(capsys)


@pytest.mark.thorough
def test_all_checkpoints_damaged_is_reported_in_one_sentence(corpus_overrides, tmp_path, capsys):
    overrides = (*TINY, *corpus_overrides, "train.num_steps=2")
    assert run_main(tmp_path, overrides) == 0
    for path in (tmp_path / "checkpoints").rglob("d/*"):
        path.write_bytes(b"")
    capsys.readouterr()
    assert run_main(tmp_path, (*overrides, "train.num_steps=3")) == 2
    assert "are damaged" in error_line(capsys)


@pytest.mark.thorough
def test_resuming_with_other_text_is_rejected(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    overrides = (*TINY, *write_corpus(text), "train.num_steps=2")
    assert run_main(tmp_path / "run", overrides) == 0
    (text / "part_0.txt").write_text("Something else altogether. " * 50)
    assert run_main(tmp_path / "run", (*overrides, "train.num_steps=3")) == 2
    assert "restore the original data" in error_line(capsys)


def test_metrics_are_valid_json(trained):
    for line in (trained[0] / "metrics.jsonl").read_text().splitlines():
        assert isinstance(json.loads(line), dict)
