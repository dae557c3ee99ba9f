"""The template of a user's own project runs elsewhere, and docs/my_project.md prints it."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.runs import ROOT
from train.reporting.metrics import read_metrics

TEMPLATE = ROOT / "docs" / "examples" / "my_project"


@pytest.fixture
def project(tmp_path):
    """A copy of the template, as a user makes it."""
    return shutil.copytree(TEMPLATE, tmp_path / "mine", ignore=shutil.ignore_patterns("_*", ".*"))


def run(folder, *words, **variables) -> str:
    """Run Python in a folder with these arguments and environment variables; return its output."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["my_config", "my_model", "test_my_model"])
def test_page_prints_the_files_of_the_template(name):
    page = (ROOT / "docs" / "my_project.md").read_text(encoding="utf-8")
    code = (TEMPLATE / f"{name}.py").read_text(encoding="utf-8").replace("  # noqa: E402", "")
    assert f"```python\n{code}```" in page


@pytest.mark.thorough
def test_project_trains_and_generates_in_its_folder_and_trains_in_another(project, tmp_path):
    taibai = ROOT / "taibai.py"
    short = ("--config.train.num_steps=2", "--config.eval.num_batches=1")
    run(project, taibai, "train", "--config=my_config.py", "--workdir=runs/first", *short)
    options = ("--model=runs/first", "--allow_import=my_model", "--prompt=After")
    assert run(project, taibai, "generate", *options, "--max_new_tokens=2")
    (tmp_path / "elsewhere").mkdir()
    config = f"--config={project / 'my_config.py'}"
    arguments = [taibai, "train", config, "--workdir=runs/first", *short]
    run(tmp_path / "elsewhere", *arguments, PYTHONPATH=str(project))
    losses = [
        [
            line["loss"]
            for line in read_metrics(folder / "runs/first/metrics.jsonl")
            if "loss" in line
        ]
        for folder in (project, tmp_path / "elsewhere")
    ]
    assert losses[0] == losses[1] != []


@pytest.mark.thorough
def test_tests_of_the_project_pass(project):
    run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", PYTHONPATH=str(ROOT))
