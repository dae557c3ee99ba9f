"""The commands of the English and the Chinese pages, and of a page that walks through them, run.

Each command runs as it is printed, in an empty folder, with the fewest steps. Both languages share
a run: a command that two pages have runs once.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import commands_of, read_page
from tests.docs.test_chinese import ALONE, PAIRS
from tests.hugging_face import save_model
from tests.runs import ROOT

#: Commands that do not run here, by a pattern, and the reason.
NOT_RUN = {
    r"make (test|setup)": "installs, or runs these tests",
    r"source ": "changes the shell",
    r"python -m pip": "installs",
    r"sbatch": "needs SLURM: tests/launch/test_slurm.py",
    r".*openai-community/gpt2|.*meta-llama/": "downloads a model: tests/convert/test_hub_models.py",
    r".*to_hf runs/opt |.*to_onnx runs/opt ": "exports the run above",
    r".*to_onnx": "tests/convert/test_to_onnx.py",
    r".*runs/vit|.*runs/chat": "needs a run that no command of the page makes",
    r".*lm_eval": "needs a task of your own: tests/generate",
    r".*(train\.compile|taibai plan)": "needs XLA's compiler for GPUs: tests/gpu",
    r".*(llama\.py:2-7b|gpt2\.py:small)": "needs GPUs",
    r".*(checkpoints/gpt|output/gpt2|llama_maxtext) ": "tests/convert/trainers reads such files",
    r"--config": "options, not a command",
    r"python -c": "several lines: tests/convert compares the tokens",
}
#: Options that make training short.
SHORT = (
    "--config.train.num_steps=2 --config.eval.num_batches=1 --config.optimizer.warmup_steps=1"
    " --config.checkpoint.every_steps=0"
)
#: A llama as small as possible.
LLAMA = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
}
GROUPS = {english: (english, chinese) for chinese, english in PAIRS}
GROUPS |= {page: (page,) for page in (*sorted(ALONE), "docs/classify_texts.md")}


def reason_not_to_run(command: str) -> str | None:
    return next((reason for key, reason in NOT_RUN.items() if re.match(key, command)), None)


def runnable(pages: tuple[str, ...]) -> list[str]:
    """Return the commands of these pages that run here, each once, in the order of the first."""
    commands = [command for page in pages for command in commands_of(read_page(page))]
    return [each for each in dict.fromkeys(commands) if reason_not_to_run(each) is None]


def as_arguments(command: str) -> list[str]:
    """Return a command for this interpreter; `make train` becomes the Makefile's recipe."""
    words = shlex.split(command)
    if words[:2] == ["make", "train"]:
        variables = dict(word.split("=", 1) for word in words[2:])
        config = variables.get("CONFIG", "configs/gpt2_3d.py")
        words = ["python", "-m", "train.main", f"--config={config}"]
        words += [f"--workdir={variables['WORKDIR']}"] if "WORKDIR" in variables else []
        words += shlex.split(variables.get("ARGS", ""))
    if words[0] == "taibai":
        words = ["python", str(ROOT / "taibai.py"), *words[1:]]
    is_training = {"train.main", "train"} & {*words} and "--mode=eval" not in words
    words = [sys.executable, *words[1:]]
    return words + (shlex.split(SHORT) if is_training else [])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder with the files that the pages assume."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "docs" / "pipelines").mkdir(parents=True)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "a.txt").write_text("All work and no play. " * 4000)
    save_model(tmp_path / "path" / "to" / "Llama-3.2-1B", "LlamaForCausalLM", **LLAMA)
    tokens = ["write", "my_tokens", "--data.name=python_stdlib", "--data.tokenizer=bytes"]
    run_in(tmp_path, [sys.executable, "-m", "data.megatron", *tokens])
    return tmp_path


def run_in(folder: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


@pytest.mark.parametrize("pages", GROUPS.values(), ids=list(GROUPS))
def test_every_command_runs_or_has_a_reason(pages):
    commands = {command for page in pages for command in commands_of(read_page(page))}
    assert commands
    for command in runnable(pages):
        assert as_arguments(command)[1] in ("-m", str(ROOT / "taibai.py")), command


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "pages", [pages for pages in GROUPS.values() if runnable(pages)], ids=lambda pages: pages[0]
)
def test_commands_run(pages, folder):
    for command in runnable(pages):
        run_in(folder, as_arguments(command))
