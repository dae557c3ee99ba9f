"""Damaged input for every parser of outside bytes: it is read, or refused in one sentence.

`python -m pytest -m slow tests/fuzz` is the campaign with 100,000 inputs.
"""

import resource
import shutil
import time
from pathlib import Path

import hypothesis
import pytest

from tests.fuzz.parsers import PARSERS, Parser

#: Inputs of a campaign, over all parsers.
CAMPAIGN_INPUTS = 100_000
QUICK_INPUTS = 25
MAX_SECONDS = 5.0
MAX_BYTES = 2**30
MAX_MESSAGE_CHARACTERS = 2000


@pytest.fixture(scope="module")
def limited_memory():
    """Let this process allocate at most MAX_BYTES more than it has now."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    (allocated,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (int(allocated) * 1024 + MAX_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


@pytest.mark.parametrize("name", PARSERS)
def test_damaged_input_is_read_or_refused(name, tmp_path, limited_memory):
    attack(PARSERS[name], tmp_path, QUICK_INPUTS, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARSERS)
def test_campaign(name, tmp_path, limited_memory):
    parser = PARSERS[name]
    shares = sum(each.share for each in PARSERS.values())
    attack(parser, tmp_path, round(CAMPAIGN_INPUTS * parser.share / shares) + 1, derandomize=False)


def attack(parser: Parser, directory: Path, num_inputs: int, *, derandomize: bool) -> None:
    """Give damaged input to a parser, and check how it ends, how long it takes and what it needs.

    Args:
        parser: The parser.
        directory: An empty directory for its files.
        num_inputs: The number of inputs.
        derandomize: Whether every call of this function has the same inputs.
    """
    parser.prepare(directory)
    file = directory / parser.file
    valid = file.read_bytes()
    parser.parse(directory)  # The valid input is read.
    num_tried = 0

    @hypothesis.settings(
        max_examples=num_inputs,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(content=parser.damaged([valid]))
    def try_one(content):
        nonlocal num_tried
        num_tried += 1
        file.write_bytes(content)
        start = time.perf_counter()
        try:
            parser.parse(directory)
        except (ValueError, OSError) as error:
            check_sentence(error)
        assert time.perf_counter() - start < MAX_SECONDS

    try_one()
    assert num_tried >= num_inputs
    shutil.rmtree(directory)


def check_sentence(error: Exception) -> None:
    """Check that an error is a sentence of ours, and not one of the library that raised it."""
    message = str(error)
    assert not isinstance(error, UnicodeError), repr(error)
    assert message and "\n" not in message, message[:300]
    assert len(message) <= MAX_MESSAGE_CHARACTERS, f"{len(message)} characters: {message[:300]}"
