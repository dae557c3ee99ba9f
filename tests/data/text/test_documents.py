"""Every kind of corpus provides the right documents, or an error of one clear sentence."""

import dataclasses
import json
import logging
import sys

import numpy as np
import pytest

from data.config import DataConfig
from data.examples import BrokenExample
from data.text.documents import find_corpus, open_documents
from data.text.text_files import TEXT_PART_BYTES
from tests.data.corpora import user_config


def text_config(*paths, **changes):
    config = DataConfig(
        name="text",
        paths=tuple(map(str, paths)),
        validation_fraction=0.0,
        sequence_length=8,
        global_batch_size=2,
    )
    return dataclasses.replace(config, **changes)


def test_very_long_line_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "sparse.jsonl"
    path.write_bytes(b'{"text": "one"}\n')
    with open(path, "ab") as file:
        file.truncate(2**36)
    with pytest.raises(ValueError, match=r"sparse\.jsonl line 2 is too long: .* than 64 MiB"):
        open_documents(text_config(path))


def test_text_that_is_not_utf8_is_cut_into_small_parts(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\x80" * 40 * TEXT_PART_BYTES)
    documents = open_documents(text_config(path))["train"]
    assert len(documents) == 20
    with pytest.raises(ValueError, match=r"text\.txt is not UTF-8"):
        _ = documents[0]


def test_text_files_keep_every_byte_in_parts_at_line_ends(tmp_path):
    long = "".join(f"line {i} — naïve\n" for i in range(20_000))
    endless = "数" * TEXT_PART_BYTES  # No line ends, and three bytes per character.
    (tmp_path / "a.txt").write_text(long, encoding="utf-8")
    (tmp_path / "b.txt").write_text(endless, encoding="utf-8")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfmarked\n")
    documents = open_documents(text_config(tmp_path / "*.txt"))["train"]
    assert "".join(documents) == long + endless + "marked\n"
    parts = [part for part in documents if part.startswith("line")]
    assert len(parts) > 10 and all(part.endswith("\n") for part in parts)
    # A part may extend to the end of its line, and then to the end of a character.
    assert max(len(part.encode()) for part in documents) <= 2 * TEXT_PART_BYTES + 3


def test_text_files_are_split_by_content_and_the_split_is_stable(tmp_path):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(4000)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines))
    config = text_config(tmp_path / "*.jsonl", validation_fraction=0.2)
    before = {split: list(texts) for split, texts in open_documents(config).items()}
    key = find_corpus(config).key
    assert sorted(before["train"] + before["validation"]) == sorted(
        f"document {i}" for i in range(4000)
    )
    assert 0.19 < len(before["validation"]) / 4000 < 0.21
    # Adding text, even a copy of the old text, moves no document to the other split.
    (tmp_path / "0.jsonl").write_text("\n".join([*lines, '{"text": "new"}']))
    after = open_documents(config)
    assert set(before["train"]) <= set(after["train"])
    assert set(before["validation"]) <= set(after["validation"])
    assert not set(after["train"]) & set(after["validation"])
    assert find_corpus(config).key != key


def test_two_text_documents_give_two_splits(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    documents = open_documents(text_config(tmp_path / "a.jsonl", validation_fraction=0.01))
    assert {split: len(texts) for split, texts in documents.items()} == {
        "train": 1,
        "validation": 1,
    }


def test_jsonl_reads_the_named_field_and_skips_blank_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x\\ny"}\n\n  \n{"body": "\\ud800z", "n": 1}')
    documents = open_documents(text_config(tmp_path / "a.jsonl", text_field="body"))["train"]
    assert list(documents) == ["x\ny", "?z"]
    assert documents[1] == "?z"
    with pytest.raises(IndexError):
        documents[2]


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("b.txt", b"x", FileNotFoundError, r"data\.paths: no file matches '.*a\.\*'"),
        ("a.md", b"x", ValueError, r"data\.paths matches '.*a\.md', but only \.txt, \.jsonl"),
        ("a.txt", b" \n\n", ValueError, r"there is no text in .*a\.txt; add text"),
        ("a.txt", b"ok \xff", ValueError, r"a\.txt is not UTF-8 text \(byte 3 is 0xff\)"),
        ("a.jsonl", b'{"text": "x"}\n{"te', ValueError, r"a\.jsonl line 2 is not valid JSON"),
        ("a.jsonl", b'\n\n{"t": 1}\n', ValueError, r"line 3 has the fields \['t'\].*text_field"),
        ("a.jsonl", b'{"text": 1}\n', ValueError, r"line 1 has .*data\.text_field='text'"),
        ("a.jsonl", b"[1]\n", ValueError, r"line 1 must contain a JSON object"),
    ],
)
def test_invalid_text_files_are_rejected(file, content, error, message, tmp_path):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(error, match=message):
        list(open_documents(text_config(tmp_path / "a.*"))["train"])


def test_folder_instead_of_files_is_named_as_such(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'.*' is a folder; name its files, .*/\*\.txt'"):
        open_documents(text_config(tmp_path))


def test_one_small_document_cannot_be_split(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "alone"}')
    with pytest.raises(ValueError, match=r"data\.validation_fraction=0\.5 leaves .* but both need"):
        open_documents(text_config(tmp_path / "a.jsonl", validation_fraction=0.5))


def texts_of(config) -> dict[str, str]:
    return {split: "".join(texts) for split, texts in open_documents(config).items()}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("num_bytes", [300, 5_000, 77_000, 400_000])
@pytest.mark.parametrize("kind", ["prose", "one line", "files"])
def test_share_of_small_text_is_right_within_one_percent(kind, num_bytes, tmp_path, caplog):
    random = np.random.default_rng(num_bytes)
    words = ["word", "naïve", "数学", "a", "longer-word"]
    text = " ".join(random.choice(words, size=num_bytes // 6))
    if kind != "one line":
        text = text.replace(" a ", "\n")
    parts = [text] if kind != "files" else [text[i::3] for i in range(3)]
    for i, part in enumerate(parts):
        (tmp_path / f"{i}.txt").write_text(part, encoding="utf-8")
    for fraction in (0.05, 0.2):
        with caplog.at_level(logging.INFO):
            found = texts_of(text_config(tmp_path / "*.txt", validation_fraction=fraction))
        sizes = {split: len(text.encode()) for split, text in found.items()}
        assert sum(sizes.values()) == sum(len(part.encode()) for part in parts)
        share = sizes["validation"] / sum(sizes.values())
        assert abs(share - fraction) <= 0.01 + 3 / sum(sizes.values())
        assert f"{100 * share:.1f} % of {sum(sizes.values()):,} bytes of text" in caplog.text


def test_line_ends_change_neither_text_nor_split(tmp_path):
    lines = "".join(f"line {i} with {'x' * (i % 97)}\n" for i in range(5_000))
    found = []
    for end in ("\n", "\r\n"):
        folder = tmp_path / str(len(end))
        folder.mkdir()
        (folder / "a.txt").write_bytes(lines.replace("\n", end).encode())
        records = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(300))
        (folder / "b.jsonl").write_bytes(records.replace("\n", end).encode())
        documents = open_documents(text_config(folder / "*", validation_fraction=0.05))
        found.append({split: list(texts) for split, texts in documents.items()})
    assert found[0] == found[1]
    assert "".join(sorted(found[0]["train"] + found[0]["validation"])).count("\r") == 0


@pytest.mark.parametrize("change", ["truncated", "swapped", "removed"])
def test_file_that_changes_while_it_is_read_is_noticed(change, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50)))
    documents = open_documents(text_config(file))["train"]
    assert documents[3]
    if change == "truncated":
        file.write_text(file.read_text()[:-200])
    elif change == "swapped":
        file.write_text(file.read_text().replace("document 1", "document 2"))
    else:
        file.unlink()
    message = "cannot be read: No such file" if change == "removed" else "has changed since"
    with pytest.raises(BrokenExample, match=rf"data\.paths: .*a\.jsonl {message}"):
        documents[3]


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Return a function that writes a user's module, makes it importable, and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("user_corpus_")]:
        del sys.modules[name]


def test_import_path_yields_the_users_documents(user_module, tmp_path):
    name = user_module(
        "user_corpus_good",
        "class Own:\n"
        "    @staticmethod\n"
        "    def corpus():\n"
        "        return {'train': ['a', 'b'], 'validation': ('c',)}\n",
    )
    config = user_config(f"{name}:Own.corpus", tmp_path)
    documents = open_documents(config)
    assert {split: list(texts) for split, texts in documents.items()} == {
        "train": ["a", "b"],
        "validation": ["c"],
    }


def test_import_path_key_changes_with_the_documents(user_module, tmp_path):
    source = "def corpus():\n    return {'train': [%r], 'validation': []}\n"
    keys = []
    for text in ("a", "a", "b"):
        name = user_module("user_corpus_keys", source % text)
        sys.modules.pop(name, None)
        module_file = tmp_path / "__pycache__"
        for cached in module_file.glob("*"):
            cached.unlink()
        keys.append(find_corpus(user_config(f"{name}:corpus", tmp_path)).key)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("source", "attribute", "message"),
    [
        ("import nowhere_at_all", "f", r"importing user_corpus_bad failed: No module named"),
        ("1 / 0", "f", r"importing user_corpus_bad failed: ZeroDivisionError"),
        ("def corpus(): ...", "corpse", r"has no 'corpse'; the nearest names are \['corpus'"),
        ("f = 3", "f", r"is of type int, but must be a function"),
        ("def f(): raise OSError('disk')", "f", r"failed: OSError: disk; fix the function"),
        ("def f(): return ['a']", "f", r"returned <class 'list'>, but must return a dict"),
        ("def f(): return {'train': []}", "f", r"returned \['train'\], but .*'validation'"),
        (
            "def f(): return {'train': (t for t in 'a'), 'validation': []}",
            "f",
            r"returned a generator for 'train'",
        ),
        (
            "def f(): return {'train': ['a', b'b'], 'validation': []}",
            "f",
            r"document 1 of 'train' is a bytes, but must be a str",
        ),
        (
            "def f(): return {'train': [], 'validation': []}",
            "f",
            r"must have at least one document in its train",
        ),
    ],
)
def test_invalid_import_paths_are_rejected(source, attribute, message, user_module, tmp_path):
    name = user_module("user_corpus_bad", source)
    with pytest.raises(ValueError, match=rf"data\.name='user_corpus_bad:{attribute}'.*{message}"):
        open_documents(user_config(f"{name}:{attribute}", tmp_path))


def test_import_path_of_a_missing_module(tmp_path):
    with pytest.raises(ValueError, match=r"there is no module 'no_such_module'; .*PYTHONPATH"):
        open_documents(user_config("no_such_module.corpora:mine", tmp_path))
