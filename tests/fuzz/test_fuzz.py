"""Damaged input for every parser of outside bytes: it is read, or refused in one sentence.

`python -m pytest -m slow tests/fuzz` is the campaign with 100,000 inputs.
"""

import shutil
import time
from pathlib import Path

import hypothesis
import pytest

from tests.fuzz.parser import Parser
from tests.fuzz.parsers import PARSERS
from tests.fuzz.persistent import persistent_processes
from tests.limits import MAX_SECONDS, limited_memory
from untrusted.messages import sentence_of

#: Inputs of a campaign, over all parsers.
CAMPAIGN_INPUTS = 100_000
#: Inputs of the quick test, for each parser.
QUICK_INPUTS = 10
#: Hypothesis would refuse inputs that are large or slow to draw.
CHECKS = (hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large)


pytestmark = [
    # Hypothesis warns about long inputs, and Orbax leaves a coroutine behind for a damaged file.
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.thorough
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", PARSERS)
def test_damaged_input_is_read_or_refused(name, tmp_path):
    attack(PARSERS[name], tmp_path, QUICK_INPUTS, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARSERS)
def test_campaign(name, tmp_path):
    parser = PARSERS[name]
    shares = sum(each.share for each in PARSERS.values())
    attack(parser, tmp_path, round(CAMPAIGN_INPUTS * parser.share / shares) + 1, derandomize=False)


def attack(parser: Parser, directory: Path, num_inputs: int, *, derandomize: bool) -> None:
    """Give damaged input to a parser, and check its result, its time and its memory.

    Args:
        directory: empty directory for its files.
        num_inputs: number of inputs.
        derandomize: whether every call of this function has the same inputs.
    """
    with persistent_processes():
        _attack(parser, directory, num_inputs, derandomize=derandomize)
    shutil.rmtree(directory)


def _attack(parser: Parser, directory: Path, num_inputs: int, *, derandomize: bool) -> None:
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
        suppress_health_check=CHECKS,
    )
    @hypothesis.given(content=parser.damaged([valid]))
    def try_one(content):
        nonlocal num_tried
        num_tried += 1
        # Another process may have taken the core, so an input is slow if it is slow three times.
        for _ in range(3):
            start = time.perf_counter()
            file.write_bytes(content)
            with limited_memory():
                try:
                    parser.parse(directory)
                except (ValueError, OSError) as error:
                    check_sentence(error)
            seconds = time.perf_counter() - start
            if seconds < MAX_SECONDS:
                break
        assert seconds < MAX_SECONDS

    try_one()
    assert num_tried >= num_inputs


def check_sentence(error: Exception) -> None:
    """Check that an error is a sentence of ours, and that a terminal can show it."""
    assert not isinstance(error, UnicodeError), repr(error)[:300]
    sentence = sentence_of(error)
    assert sentence.isprintable(), sentence[:300]
    assert len(sentence.split()) >= 3, sentence
