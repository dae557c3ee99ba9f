"""Text of tokens that arrive one after another."""

import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import WordLevel

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
    stream = TextStream(CODEC, stop=["HALT", "\n\n"])
    assert stream.add(list(b"one HA")) == "one "
    assert stream.add(list(b"Lo\n")) == "HALo"
    assert stream.add(list(b"x HA")) == "\nx "
    assert stream.add(list(b"LT more")) == ""
    assert stream.is_stopped and stream.add(list(b"more"), is_last=True) == ""


def test_a_space_at_the_beginning_is_kept_after_a_prompt():
    """Tokenizers such as that of LLaMA 2 strip it from a whole text."""
    known = tokenizers.Tokenizer(WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    known.add_special_tokens(["</s>"])
    strip = decoders.Strip(" ", 1, 0)
    known.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])  # pyright: ignore[reportAttributeAccessIssue]
    codec = TextCodec(FileTokenizer(known.to_str(), "words"))
    tokens = [1, 3, 3, 2, 1]
    stream = TextStream(codec, [0])
    assert [stream.add([token]) for token in tokens] == [" cat", "", "", "s", " cat"]
    assert codec.decode_after([0], tokens) == " cats cat"
    assert codec.decode_after([], tokens) == "cats cat"


def test_a_prompt_may_be_cut_within_a_character():
    """LLaMA 2's tokenizer decodes no byte of a row that has half a character."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    known = tokenizers.Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=""))
    known.add_special_tokens(["</s>"])
    known.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # pyright: ignore[reportAttributeAccessIssue]
    codec = TextCodec(FileTokenizer(known.to_str(), "bytes"))
    prompt = list("한국어".encode())
    tokens = list("말 ok".encode())
    assert codec.decode_after(prompt, tokens) == "말 ok"
    stream = TextStream(codec, prompt)
    assert "".join(stream.add([token]) for token in tokens) == "말 ok"
    # A prompt that is no text at all has some context, too.
    assert codec.decode_after([0xFF] * 20, list(b"ok")) == "ok"


def test_nothing_is_held_back_in_the_end():
    stream = TextStream(CODEC, stop=["HALT"])
    assert stream.add(list(b"one HAL"), is_last=True) == "one HAL"
    assert not stream.is_stopped
