"""The Dockerfile copies files that exist, and installs the requirements of the repository."""

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from taibai import COMMANDS, PACKAGES
from tests.runs import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
#: (name, arguments) of each instruction, whose lines are joined.
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n", "", re.sub(r"(?m)^#.*\n", "", TEXT)).splitlines()
    if line
]
IGNORED = [
    line
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def arguments(name: str) -> list[str]:
    return [text for instruction, text in INSTRUCTIONS if instruction == name]


def is_ignored(path: str) -> bool:
    patterns = [pattern.removeprefix("**/") for pattern in IGNORED]
    return any(fnmatch.fnmatch(part, each) for each in patterns for part in Path(path).parts)


def test_base_image_is_pinned_to_a_version():
    (base,) = arguments("FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d\d\.04", base)


def test_copied_files_exist_and_reach_the_build():
    sources = [path for text in arguments("COPY") for path in text.split()[:-1]]
    assert "." in sources
    for path in sources:
        assert (ROOT / path).exists() and not is_ignored(path), path
    for name in (*PACKAGES, "configs", "pyproject.toml", "README.md", "LICENSE", "taibai.py"):
        assert not is_ignored(name), name
    assert is_ignored(".git") and is_ignored(".venv/bin/python") and is_ignored("runs/gpt2")


def test_installs_the_requirements_of_the_repository():
    commands = " && ".join(arguments("RUN"))
    installed = re.findall(r"--requirement (\S+)", commands)
    assert installed == ["requirements.txt"]
    needed = re.findall(r"^-r (\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    first_copy = arguments("COPY")[0].split()
    assert {*installed, *needed} == {*first_copy[:-1]}
    # Everything else that it installs is this project, without dependencies.
    others = [text for text in re.findall(r"pip install ([^&]*)", commands) if "--req" not in text]
    assert [text.split()[-2:] for text in others] == [["--editable", "."]]
    assert "--no-deps" in others[0]


def test_command_is_the_project_s_and_runs_without_root():
    (entry_point,) = arguments("ENTRYPOINT")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry_point == '["taibai"]' and "taibai" in scripts
    names = [name for name, _ in INSTRUCTIONS]
    (user,) = arguments("USER")
    assert user.isdecimal() and int(user) > 0
    assert "RUN" not in names[names.index("USER") :]
    assert "taibai train --config=gpt2" in TEXT and "train" in COMMANDS


@pytest.mark.parametrize(
    ("program", "file"), [("hadolint", "Dockerfile"), ("shellcheck", "launch/train.sbatch")]
)
def test_linter_finds_nothing(program, file):
    path = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed (make setup-test)")
    done = subprocess.run([path, file], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
