"""Models of transformers that are saved once for each file of tests."""

import pytest

from tests.generate.references import MODELS, saved, theirs


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in ("gpt2", "mistral") else [pytest.mark.thorough])
        for name in MODELS
    ],
)
def model(request, tmp_path_factory):
    """A model of transformers, and the directory that it is saved in."""
    directory = tmp_path_factory.mktemp(request.param)
    return saved(request.param, directory), directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model of transformers, and the directory that it is saved in."""
    directory = tmp_path_factory.mktemp("llama")
    return saved("llama", directory), directory


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A model of transformers, and the directory that it is saved in."""
    directory = tmp_path_factory.mktemp("t5")
    return saved("t5", directory), directory


@pytest.fixture(scope="module")
def greedy(llama):
    """The greedy continuations of the LLaMA in transformers."""
    return theirs(llama[0])
