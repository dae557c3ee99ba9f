"""Text of tokens that arrive one after another."""

import pytest

from data.text.tokenization.byte_tokenizer import ByteTokenizer
from data.text.tokenization.file_tokenizer import FileTokenizer
from generate.prompts import TextCodec
from generate.text_stream import TextStream

CODEC = TextCodec(FileTokenizer(ByteTokenizer().content, "bytes"))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_are_whole_characters_and_make_the_text(size):
    text = "naïve 日本語 🙂!"
    tokens = list(text.encode())
    stream = TextStream(CODEC)
    pieces = [
        stream.add(tokens[i : i + size], is_last=i + size >= len(tokens))
        for i in range(0, len(tokens), size)
    ]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_text_that_may_be_a_stop_is_held_back():
    stream = TextStream(CODEC, ["HALT", "\n\n"])
    assert stream.add(list(b"one HA")) == "one "
    assert stream.add(list(b"Lo\n")) == "HALo"
    assert stream.add(list(b"x HA")) == "\nx "
    assert stream.add(list(b"LT more")) == ""
    assert stream.is_stopped and stream.add(list(b"more"), is_last=True) == ""


def test_nothing_is_held_back_in_the_end():
    stream = TextStream(CODEC, ["HALT"])
    assert stream.add(list(b"one HAL"), is_last=True) == "one HAL"
    assert not stream.is_stopped
