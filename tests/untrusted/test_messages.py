"""Messages that quote values from a stranger's file."""

import errno

from untrusted.messages import sentence_of, shortened


def test_a_message_is_one_line_that_does_not_control_the_terminal():
    error = ValueError("config.json has\n  \x1b[2Jname='\u202ex\ud800'; correct it")
    assert sentence_of(error) == r"config.json has \x1b[2Jname='\u202ex\ud800'; correct it"
    assert sentence_of(ValueError()) == "ValueError"


def test_a_long_message_keeps_its_beginning_and_its_remedy():
    sentence = sentence_of(ValueError("key=" + "[" * 100_000 + " is unknown; correct it"))
    assert sentence.startswith("key=[[[") and sentence.endswith("is unknown; correct it")
    assert len(sentence) < 5000


def test_an_error_of_the_file_system_names_the_file_and_the_remedy():
    error = OSError(errno.ENOSPC, "No space left on device", "/runs/a")
    assert sentence_of(error) == (
        "/runs/a cannot be used: the disk is full (No space left on device); make it usable, or "
        "choose another path"
    )


def test_long_values_are_cut():
    assert shortened("x" * 300) == "x" * 200 + "…"
    assert shortened(KeyError()) == "KeyError"
