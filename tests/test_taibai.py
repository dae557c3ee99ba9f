"""The command `taibai`, and files of the user that have the names of our packages."""

import importlib.util
import os
import signal
import subprocess
import sys
import tomllib

import pytest

import taibai
from tests.runs import ROOT, TINY, arguments
from tests.test_imports import MAY_IMPORT

#: Raises if it is imported.
INTRUDER = "raise RuntimeError('a file of the user was imported')"
MODULES = [*filter(None, taibai.COMMANDS.values()), *taibai.CONVERSIONS.values()]


@pytest.fixture
def folder(tmp_path):
    """The folder of a user whose files have the names of our packages."""
    folder = tmp_path / "mine"
    for name in taibai.PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(INTRUDER)
    (folder / "train").rename(folder / "my_train")
    (folder / "train.py").write_text(INTRUDER)
    return folder


def run(folder, *words, **variables) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with these arguments and environment variables."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.thorough
def test_taibai_trains_next_to_files_with_the_names_of_our_packages(
    folder, tmp_path, corpus_overrides
):
    overrides = (*TINY, *corpus_overrides, "train.num_steps=2", "model.num_layers=1")
    config = (ROOT / "configs" / "gpt2.py").read_text()
    (folder / "my_config.py").write_text(config)
    flags = [*arguments(tmp_path / "run", overrides)[1:], "--config=my_config.py"]
    done = run(folder, ROOT / "taibai.py", "train", *flags)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


@pytest.mark.thorough
def test_taibai_finds_modules_of_the_user_in_the_current_folder(tmp_path, corpus_overrides):
    program = "import optax\n\n\ndef sgd(config, schedule):\n    return optax.sgd(schedule)\n"
    (tmp_path / "my_optimizer.py").write_text(program)
    overrides = (*TINY, *corpus_overrides, "optimizer.name=my_optimizer:sgd")
    flags = arguments(tmp_path / "run", overrides)
    done = run(tmp_path, ROOT / "taibai.py", "train", *flags, "--fast_dev_run")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module, kept",
    [
        ("train.main", "models"),
        ("generate", "train.py"),
        ("checkpoint", "data"),
        ("launch.local", "fields"),
    ],
)
def test_python_m_says_which_file_hides_which_package(module, kept, tmp_path, folder):
    (tmp_path / "alone").mkdir()
    (folder / kept).rename(tmp_path / "alone" / kept)
    done = run(tmp_path / "alone", "-m", module, "--help", PYTHONPATH=str(ROOT))
    (line,) = done.stderr.splitlines()
    package = kept.removesuffix(".py")
    assert line.startswith(f"error: {tmp_path / 'alone' / kept}")
    assert f"hides Taibai's package {package!r}" in line and "`taibai train`" in line
    assert done.returncode == 2


def test_import_that_a_folder_hides_is_an_error_of_one_sentence(tmp_path, folder):
    done = run(folder, "-c", "import data", PYTHONPATH=str(ROOT))
    assert "a file of the user was imported" in done.stderr  # theirs comes first: not ours to say
    (tmp_path / "alone").mkdir()
    (folder / "models").rename(tmp_path / "alone" / "models")
    done = run(tmp_path / "alone", "-c", "import train.loop", PYTHONPATH=str(ROOT))
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert "hides Taibai's package 'models'" in done.stderr


def test_empty_folder_of_data_hides_nothing(tmp_path):
    (tmp_path / "data").mkdir()
    done = run(tmp_path, "-m", "checkpoint", "--help", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [(), ("trian",), ("convert", "hf")])
def test_unknown_command_is_refused_with_the_known_ones(words, tmp_path):
    done = run(tmp_path, ROOT / "taibai.py", *words)
    (line,) = done.stderr.splitlines()
    known = taibai.CONVERSIONS if words[:1] == ("convert",) else taibai.COMMANDS
    assert done.returncode == 2 and line.startswith("error: ")
    assert all(name in line for name in known)


def test_every_command_has_a_name():
    """Only internal commands and benchmarks have none."""
    commands = set()
    for file in (file for folder in MAY_IMPORT for file in (ROOT / folder).rglob("*.py")):
        if 'command_parser(\n        "' in (text := file.read_text()) or 'command_parser("' in text:
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            commands.add(name.removesuffix(".__main__"))
    others = {name for name in commands if name.startswith("benchmarks.")}
    others |= {"launch.environment"}
    compiling = {"train.plan", "train.compile"}  # their parser comes from one function
    assert commands - others | compiling == set(MODULES)
    assert all(importlib.util.find_spec(module) for module in MODULES)


def test_packages_are_those_that_are_installed():
    assert set(taibai.PACKAGES) == set(MAY_IMPORT) - {"benchmarks", "configs"}
    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["scripts"] == {"taibai": "taibai:main"}


def test_errors_of_commands_are_printed_in_one_place():
    """So all commands report bad input in the same way."""
    printing = {
        str(file.relative_to(ROOT))
        for folder in MAY_IMPORT
        for file in (ROOT / folder).rglob("*.py")
        if 'print(f"error' in (text := file.read_text()) or 'exit(f"error' in text
    }
    assert printing == {"untrusted/commands.py", "untrusted/streams.py"}


@pytest.mark.parametrize("module", ["train.compile", "generate"])
def test_ctrl_c_during_imports_ends_in_one_word(module):
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        lines = []
        for line in process.stderr:  # the imports, as they are done
            lines.append(line)
            if line.rpartition("|")[2].strip() == "jax.version":
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert lines[-1] == "interrupted\n" and "Traceback" not in "".join(lines)
