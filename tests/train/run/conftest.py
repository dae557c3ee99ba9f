"""Fixtures of the tests of whole runs."""

import logging

import pytest


@pytest.fixture
def warnings(caplog):
    """Return a function that lists the warnings of transformers so far."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("transformers") and record.levelno >= logging.WARNING
    ]
    logger.removeHandler(caplog.handler)
