"""Runs that must be refused, for the tests here."""

from collections.abc import Sequence
from pathlib import Path

from tests.runs import arguments
from train.lifecycle.exit_codes import REFUSED
from train.main import main


def refusal(workdir: str | Path, overrides: Sequence[str], capsys) -> str:
    """Start a run, check that it is refused in one sentence, and return that sentence."""
    capsys.readouterr()
    assert main(arguments(Path(workdir), overrides)) == REFUSED
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return line
