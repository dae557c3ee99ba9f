"""Token files of Megatron and fairseq, compared with bytes written by hand from the format."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from data import megatron
from data.config import DataConfig
from data.text.documents import open_documents
from data.text.text_corpus import load_text
from data.text.token_files import open_token_file, write_token_file
from tests.data.corpora import jsonl_config, tokens_of
from tests.limits import limited_resources

# Three sequences in two documents: [[5, 6, 7], [8]] and [[9, 300]].
BIN = struct.pack("<6H", 5, 6, 7, 8, 9, 300)
HEADER = b"MMIDIDX\x00\x00" + b"\x01\0\0\0\0\0\0\0" + b"\x08" + b"\x03\0\0\0\0\0\0\0"
NUM_BOUNDS = b"\x03\0\0\0\0\0\0\0"
SIZES = b"\x03\0\0\0" + b"\x01\0\0\0" + b"\x02\0\0\0"
POINTERS = struct.pack("<3q", 0, 6, 8)
BOUNDS = struct.pack("<3q", 0, 2, 3)
IDX = HEADER + NUM_BOUNDS + SIZES + POINTERS + BOUNDS


def write(directory, idx=IDX, content=BIN):
    (directory / "t.idx").write_bytes(idx)
    (directory / "t.bin").write_bytes(content)
    return str(directory / "t")


def lists(file):
    return [file[i].tolist() for i in range(len(file))]


def test_megatron_file_written_by_hand_is_read(tmp_path):
    path = write(tmp_path)
    for name in (path, path + ".bin", path + ".idx"):
        file = open_token_file(name)
        assert lists(file) == [[5, 6, 7, 8], [9, 300]]
        assert (file.kind, file.num_sequences, file.tokens.dtype) == ("Megatron", 3, np.uint16)
        assert isinstance(file.tokens, np.memmap)
    with pytest.raises(IndexError):
        file[2]


def test_fairseq_file_written_by_hand_is_read(tmp_path):
    file = open_token_file(write(tmp_path, HEADER + SIZES + POINTERS))
    assert lists(file) == [[5, 6, 7], [8], [9, 300]] and file.kind == "fairseq"


@pytest.mark.parametrize(
    ("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (9, "I"), (10, "Q")]
)
def test_every_dtype_is_read(code, letter, tmp_path):
    size = struct.calcsize(letter)
    idx = HEADER[:17] + bytes([code]) + HEADER[18:] + NUM_BOUNDS + SIZES
    idx += struct.pack("<3q", 0, 3 * size, 4 * size) + BOUNDS
    file = open_token_file(write(tmp_path, idx, struct.pack("<6" + letter, 5, 6, 7, 8, 9, 100)))
    assert lists(file) == [[5, 6, 7, 8], [9, 100]]


@pytest.mark.parametrize(
    ("idx", "content", "message"),
    [
        (b"MMIDIDX", BIN, r"t\.idx ends within its header of 26 bytes: it is not an intact"),
        (b"X" + IDX[1:], BIN, r"begins with b'XMIDIDX\\x00\\x00' instead of b'MMIDIDX"),
        (IDX[:9] + b"\x02" + IDX[10:], BIN, r"has version 2, but only 1 can be read"),
        (IDX[:17] + b"\x06" + IDX[18:], BIN, r"has dtype code 6, which must be one of \[1, 2, 3"),
        (IDX[:18] + b"\xff" + IDX[19:], BIN, r"too few for 255 sequences"),
        (IDX[:-8], BIN, r"has 86 bytes, which does not match 3 sequences and 3 document bounds"),
        (IDX, BIN[:-2], r"t\.bin has 10 bytes, but in t\.idx the last sequence ends at byte 12"),
        (IDX, BIN + b"\0", r"t\.bin has 13 bytes, but in t\.idx the last sequence ends at byte 12"),
        (
            HEADER + NUM_BOUNDS + SIZES + struct.pack("<3q", 0, 4, 8) + BOUNDS,
            BIN,
            r"sequences that are not contiguous",
        ),
        (
            HEADER + NUM_BOUNDS + struct.pack("<3i", 3, 2, 2) + POINTERS + BOUNDS,
            BIN,
            r"t\.bin has 12 bytes, but t\.idx lists 7 tokens of 2 bytes",
        ),
        (
            HEADER
            + NUM_BOUNDS
            + struct.pack("<3i", 9, -5, 2)
            + struct.pack("<3q", 0, 18, 8)
            + BOUNDS,
            BIN,
            r"sequences that are not contiguous",
        ),
        (
            IDX[:-24] + struct.pack("<3q", 0, 4, 3),
            BIN,
            r"document bounds that do not increase from 0 to",
        ),
        (
            IDX[:-24] + struct.pack("<3q", 0, 1, 2),
            BIN,
            r"document bounds that do not increase from 0 to",
        ),
    ],
)
def test_damaged_files_are_refused(idx, content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        open_token_file(write(tmp_path, idx, content))


@pytest.mark.parametrize("num_sequences", [0, 2**36])
def test_huge_sparse_index_is_refused_without_reading_it(num_sequences, tmp_path):
    prefix = write(tmp_path, IDX[:18] + struct.pack("<QQ", num_sequences, 2))
    num_bytes = 34 + 12 * (num_sequences or 2**36) + 16
    os.truncate(tmp_path / "t.idx", num_bytes)
    with limited_resources(), pytest.raises(ValueError, match=f"has {num_bytes} bytes|byte 0"):
        open_token_file(prefix)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_missing_file_is_refused(ending, tmp_path):
    path = write(tmp_path)
    Path(f"{path}.{ending}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"there is no file .*t\.{ending}.*'my_tokens'"):
        open_token_file(path)


def test_writer_reproduces_the_format_exactly(tmp_path):
    documents = [np.array([5, 6, 7]), np.array([8], np.uint32), np.array([9, 300])]
    write_token_file(str(tmp_path / "new" / "w"), documents, np.dtype(np.uint16))
    assert (tmp_path / "new" / "w.bin").read_bytes() == BIN
    expected = HEADER + b"\x04\0\0\0\0\0\0\0" + SIZES + POINTERS + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "new" / "w.idx").read_bytes() == expected
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["w.bin", "w.idx"]
    write_token_file(str(tmp_path / "empty"), [], np.dtype(np.int32))
    assert len(open_token_file(str(tmp_path / "empty"))) == 0


@pytest.mark.parametrize("ending", ["bin", "bin.tmp", "idx", "idx.tmp"])
def test_writer_replaces_links_and_leaves_their_targets(ending, tmp_path):
    (tmp_path / "private").write_text("private")
    (tmp_path / f"w.{ending}").symlink_to(tmp_path / "private")
    write_token_file(str(tmp_path / "w"), [np.array([5, 6])], np.dtype(np.uint16))
    assert lists(open_token_file(str(tmp_path / "w"))) == [[5, 6]]
    assert (tmp_path / "private").read_text() == "private"
    assert not any(path.is_symlink() for path in tmp_path.iterdir())


def megatron_config(directory, *paths, **changes):
    fields = {"name": "megatron", "paths": paths, "validation_fraction": 0.0, "sequence_length": 2}
    return jsonl_config(directory, ["unread"], **{**fields, **changes})


def test_token_files_are_trained_on_unchanged(tmp_path):
    path = write(tmp_path, content=struct.pack("<6H", 5, 6, 256, 256, 9, 200))
    corpus = load_text(megatron_config(tmp_path, path, path + ".idx"))
    # Documents end with one end-of-document token, whether or not they have one in the file.
    document = [5, 6, 256, 256, 9, 200, 256]
    assert tokens_of(corpus.train).tolist() == [256, *document, *document]
    corpus = load_text(megatron_config(tmp_path, path, validation_fraction=0.5))
    assert tokens_of(corpus.train).tolist() == [256, 5, 6, 256, 256]
    assert tokens_of(corpus.validation).tolist() == [256, 9, 200, 256]


def test_globs_of_token_files_are_read_in_order(tmp_path):
    for number in (3, 1, 2):
        write_token_file(str(tmp_path / f"t{number}"), [np.array([number])], np.dtype(np.uint16))
    expected = [256, 1, 256, 2, 256, 3, 256]
    for pattern in ("t*", "t*.bin", "t?.idx"):
        corpus = load_text(megatron_config(tmp_path, str(tmp_path / pattern)))
        assert tokens_of(corpus.train).tolist() == expected
    with pytest.raises(FileNotFoundError, match=r"data\.paths: no token file matches '.*/u\*'"):
        load_text(megatron_config(tmp_path, str(tmp_path / "u*")))


def test_names_of_token_files_are_no_globs_of_others(tmp_path):
    for name, token in (("t[1]", 5), ("t1", 6)):
        write_token_file(str(tmp_path / name), [np.array([token])], np.dtype(np.uint16))
    for pattern in ("t[1]", "t[1].bin"):
        corpus = load_text(megatron_config(tmp_path, str(tmp_path / pattern)))
        assert tokens_of(corpus.train).tolist() == [256, 5, 256]


def test_reading_ids_that_the_tokenizer_does_not_have_is_refused(tmp_path, capsys):
    path = str(tmp_path / "large")
    write_token_file(path, [np.array([5, 2**31 - 1])], np.dtype(np.int32))
    assert megatron.main(["read", path, "--data.tokenizer=bytes"]) == 2
    assert "document 0 has the token id 2147483647, but" in capsys.readouterr().err


def test_ids_outside_the_tokenizer_are_rejected(tmp_path):
    message = r"data\.name='megatron': the token id 300 must be .* less than the tokenizer's 257"
    with pytest.raises(ValueError, match=message):
        load_text(megatron_config(tmp_path, write(tmp_path)))


def run(capsys, *arguments):
    code = megatron.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_command_line_writes_shows_and_reads_files(tmp_path, capsys):
    texts = [f"document {i} — é" for i in range(12)]
    config = jsonl_config(tmp_path, texts)
    arguments = [
        "--data.name=text",
        f"--data.paths={config.paths[0]}",
        "--data.tokenizer=bytes",
        "--data.validation_fraction=0.3",
        f"--data.cache_dir={config.cache_dir}",
    ]
    train = list(open_documents(config)["train"])
    num_tokens = sum(len(text.encode()) + 1 for text in train)
    code, out = run(capsys, "write", tmp_path / "w", *arguments)
    shown = rf"Megatron, uint16, {len(train)} documents in {len(train)} sequences, {num_tokens} tok"
    assert code == 0 and shown in out and "data.tokenizer=bytes" in out
    assert shown in run(capsys, "show", tmp_path / "w")[1]
    code, out = run(
        capsys, "read", tmp_path / "w", "--data.tokenizer=bytes", "--first=1", "--count=2"
    )
    assert code == 0 and "document 1," in out and "document 3," not in out
    assert f"{train[1]}<|endoftext|>\n" in out and train[2] in out
    # Training on the written file reads the same tokens in the same order as the original corpus.
    (tmp_path / "other").mkdir()
    written = load_text(megatron_config(tmp_path / "other", str(tmp_path / "w")))
    direct = load_text(DataConfig(**{**vars(config), "sequence_length": 2}))
    np.testing.assert_array_equal(tokens_of(written.train), tokens_of(direct.train))
    assert run(capsys, "write", tmp_path / "v", *arguments, "--split=validation")[0] == 0
    assert len(open_token_file(str(tmp_path / "v"))) == 12 - len(train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nowhere"], "error: data.paths: there is no file nowhere.bin"),
        (["write", "x", "--data.name=text"], "error: data.name='text' needs at least one glob"),
        (["read", "t", "--data.tokenizer=bpe"], "error: data.tokenizer='bpe' is trained from text"),
        (
            ["read", "t", "--data.tokenizer=bytes", "--first=2"],
            "error: --first=2 must be the number of a document",
        ),
    ],
)
def test_command_line_reports_errors(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    code, out = run(capsys, *arguments)
    assert code == 2 and out.startswith(message)
