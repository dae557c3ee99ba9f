"""Samples of evaluations: the texts of `python -m generate`, on any mesh, and refusals."""

import json
from pathlib import Path

import jax
import pytest

from generate import Sampling, load_generator
from tests.runs import ROOT, TINY, arguments, make_run
from tests.train.refusals import refusal
from train import samples
from train.lifecycle.phases import Phases
from train.main import main
from train.samples import Samples, check_prompts

PROMPTS = ("def scan(", "import ")
SAMPLING = (
    *TINY,
    "data.sequence_length=64",
    "train.num_steps=6",
    "eval.every_steps=3",
    "eval.num_batches=1",
    "eval.max_new_tokens=6",
    "checkpoint.every_steps=3",
)
MESHES = {
    "pipeline": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
    "uneven": ("mesh.pipeline=2", "pipeline.layers_per_stage=1,3", "pipeline.share_vocab=True"),
    "chunks": ("mesh.pipeline=2", "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"),
    "context": ("mesh.context=2", "mesh.model=2"),
    "fsdp": ("mesh.fsdp=2", "mesh.data=2"),
    "zero3": ("mesh.data=4", "memory.zero_stage=3"),
    "host": (
        "mesh.data=2",
        "memory.placement=host",
        "memory.zero_stage=1",
        "memory.offload_parameters_fraction=0.5",
    ),
}


def with_prompts(corpus_overrides, *changes: str) -> tuple[str, ...]:
    return (*SAMPLING, *corpus_overrides, f"eval.prompts={','.join(PROMPTS)}", *changes)


def lines_of(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_samples_are_the_greedy_continuations_of_each_checkpoint(corpus_overrides, tmp_path):
    assert main(arguments(tmp_path, with_prompts(corpus_overrides))) == 0
    lines = lines_of(tmp_path)
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (3, 6) for prompt in PROMPTS
    ]
    for step in (3, 6):
        generator = load_generator(tmp_path / "checkpoints" / str(step))
        sampling = Sampling(temperature=0.0)
        texts = generator.generate_texts(PROMPTS, max_new_tokens=6, sampling=sampling)
        assert [line["text"] for line in lines if line["step"] == step] == texts


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES)
def test_samples_do_not_depend_on_the_mesh(mesh, corpus_overrides, tmp_path):
    texts = []
    for name in ("one", mesh):
        run, corpus = make_run(with_prompts(corpus_overrides, *MESHES.get(name, ())))
        writer = Samples(run, corpus, tmp_path / name, Phases())
        (tmp_path / name).mkdir()
        state = run.state_layout.initial()
        writer.write(1, state)
        texts.append(lines_of(tmp_path / name))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert texts[0] == texts[1] and len(texts[0]) == 2


@pytest.mark.thorough
def test_samples_of_a_sequence_to_sequence_model_answer_the_prompt(corpus_overrides, tmp_path):
    overrides = (
        *corpus_overrides,
        "data.name=text",
        "data.sequence_length=32",
        "data.vocab_size=400",
        "eval.prompts=def scan(",
        "eval.max_new_tokens=5",
        "mesh.data=2",
    )
    run, corpus = make_run(overrides, str(ROOT / "configs" / "t5.py"))
    check_prompts(run, corpus)
    Samples(run, corpus, tmp_path, Phases()).write(1, run.state_layout.initial())
    (line,) = lines_of(tmp_path)
    assert line["step"] == 1 and line["prompt"] == "def scan(" and isinstance(line["text"], str)


@pytest.mark.thorough
def test_samples_fail_once_and_the_run_goes_on(corpus_overrides, tmp_path, monkeypatch, capsys):
    def fail(self, state):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(samples._Sampler, "continuations", fail)
    assert main(arguments(tmp_path, with_prompts(corpus_overrides))) == 0
    log = capsys.readouterr().err
    assert log.count("eval.prompts could not be continued at step 3; the run continues") == 1
    assert "RuntimeError: out of memory" in log and not (tmp_path / "samples.jsonl").exists()


@pytest.mark.thorough
def test_samples_that_take_longer_than_the_watchdog_allows_are_the_last(
    corpus_overrides, tmp_path, caplog
):
    changes = with_prompts(corpus_overrides, "train.failure_timeout_s=1.0", "eval.max_new_tokens=3")
    run, corpus = make_run(changes)
    writer = Samples(run, corpus, tmp_path, Phases())
    state = run.state_layout.initial()
    for step in (1, 2):
        writer.write(step, state)
    assert {line["step"] for line in lines_of(tmp_path)} == {1}
    assert caplog.text.count("more than half of train.failure_timeout_s; the run continues") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("eval.max_new_tokens=60",), "prompt 0 has 9 tokens; with max_new_tokens=60, they are"),
        (("data.validation_fraction=0",), "eval.prompts are continued after evaluations, but"),
        (("eval.prompts=" + ",".join("abcdefghijklmnopq"),), "eval.prompts has 17 texts"),
        (
            (
                "model.name=bert",
                "model.mlp_dim=32",
                "model.head=masked_lm",
                "data.objective=masked_lm",
                "data.tokenizer=bpe",
                "data.vocab_size=400",
            ),
            "cannot generate text: it has no method `logits`",
        ),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(
    changes, message, corpus_overrides, tmp_path, capsys
):
    assert message in refusal(tmp_path, with_prompts(corpus_overrides, *changes), capsys)
