"""Tokenizers: decoding restores the encoded text, and broken tokenizer files are refused."""

import json

import numpy as np
import pytest
import tokenizers
import transformers

from data.text.tokenization.bpe import load_bpe
from data.text.tokenization.byte_tokenizer import ByteTokenizer
from data.text.tokenization.file_tokenizer import FileTokenizer, load_tokenizer_file
from tests.data.corpora import byte_level, sentence_piece, word_piece

TEXTS = ["def f(x):\n    return x\n", "naïve — 数据 🙂\n\n\t", "", "<|endoftext|> is only text"]


def word_level(*specials, **settings):
    """Return the JSON of a small tokenizer with these special tokens."""
    vocab = {token: i for i, token in enumerate(["[UNK]", *specials, "a", "b"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[UNK]", *specials])
    for name, value in settings.items():
        getattr(tokenizer, name)(**value)
    return tokenizer.to_str()


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    file = tmp_path_factory.mktemp("bpe") / "bpe.json"
    documents = [f"def function_{i}(argument): return argument" for i in range(50)]
    return load_bpe(lambda: documents, file, 300)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokenizer_round_trip_preserves_text(kind, bpe):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    encoded = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    assert all(ids.dtype == np.int32 for ids in encoded)
    ids = np.concatenate(encoded)
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    # A text that contains the name of the end-of-document token does not end the document.
    assert tokenizer.eos_id not in ids
    assert tokenizer.eos_id < tokenizer.vocab_size


def test_byte_tokenizer_is_utf8():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode_batch(["é!"])[0].tolist() == [0xC3, 0xA9, 0x21]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.decode([65, 256, 66]) == "A<|endoftext|>B"


def test_bpe_has_the_requested_size_and_merges(bpe):
    assert bpe.vocab_size == 300
    assert len(bpe.encode_batch(["def function_7(argument)"])[0]) < 12


def test_bpe_is_trained_once_and_deterministically(tmp_path):
    documents = [f"word{i % 7} other{i % 5} third{i % 3}" for i in range(100)]
    load_bpe(lambda: documents, tmp_path / "one.json", 280)
    load_bpe(lambda: documents[::-1], tmp_path / "two.json", 280)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()

    def never():
        raise AssertionError("a cached tokenizer must not ask for documents")

    load_bpe(never, tmp_path / "one.json", 280)


@pytest.mark.parametrize("eos", ["<|endoftext|>", "</s>", "<eos>", "[SEP]"])
def test_tokenizer_file_finds_the_end_of_a_document(eos, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(word_level(eos))
    for path in (file, tmp_path):  # The file, or its directory, as in a downloaded model.
        tokenizer = load_tokenizer_file(str(path))
        assert (tokenizer.eos_id, tokenizer.vocab_size) == (1, 4)
        assert tokenizer.encode_batch(["a b a"])[0].tolist() == [2, 3, 2]


def test_tokenizer_file_neither_truncates_nor_pads():
    content = word_level("</s>", enable_truncation={"max_length": 2}, enable_padding={"length": 8})
    encoded = FileTokenizer(content, "x").encode_batch(["a b a b", "a"])
    assert [len(ids) for ids in encoded] == [4, 1]


def test_tokenizer_file_size_covers_ids_with_gaps():
    content = json.loads(word_level("</s>"))
    content["model"]["vocab"]["b"] = 99
    assert FileTokenizer(json.dumps(content), "x").vocab_size == 100


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, r"data\.tokenizer='.*t\.json': there is no file"),
        (b'{"version": "1.0"', ValueError, r"data\.tokenizer='.*t\.json' is not a readable"),
        (b"\xff\xfe", ValueError, r"data\.tokenizer='.*t\.json' cannot be read"),
        (
            word_level().encode(),
            ValueError,
            r"t\.json' has none of the end-of-document tokens \['<\|endoftext",
        ),
    ],
)
def test_invalid_tokenizer_files_are_rejected(content, error, message, tmp_path):
    file = tmp_path / "t.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(error, match=message):
        load_tokenizer_file(str(file))


def test_special_tokens_do_not_change_the_ids_of_text(bpe, tmp_path):
    plain = ByteTokenizer()
    special = ByteTokenizer(has_special_tokens=True)
    assert special.encode_batch(TEXTS)[1].tolist() == plain.encode_batch(TEXTS)[1].tolist()
    assert (special.vocab_size, special.eos_id) == (361, 256)
    assert special.special_ids == {"pad": 257, "cls": 258, "sep": 259, "mask": 260}
    assert special.sentinel_ids == tuple(range(360, 260, -1))
    assert special.decode([65, 260, 360]) == "A[MASK]<extra_id_0>"
    assert (plain.special_ids, plain.sentinel_ids) == ({}, ())
    assert (bpe.special_ids, bpe.sentinel_ids) == ({}, ())


def test_bpe_with_special_tokens_has_all_of_them_within_its_size(tmp_path):
    documents = [f"def function_{i}(argument): return argument" for i in range(50)]
    tokenizer = load_bpe(lambda: documents, tmp_path / "bpe.json", 400, has_special_tokens=True)
    assert tokenizer.vocab_size == 400
    ids = [*tokenizer.special_ids.values(), tokenizer.eos_id, *tokenizer.sentinel_ids]
    assert len(set(ids)) == 105 and max(ids) < 400
    assert list(tokenizer.sentinel_ids) == sorted(tokenizer.sentinel_ids)[::-1]
    encoded = tokenizer.encode_batch(["[MASK] <extra_id_0> <|endoftext|>", *TEXTS])
    assert tokenizer.decode(encoded[0]) == "[MASK] <extra_id_0> <|endoftext|>"
    assert tokenizer.is_text()[np.concatenate(encoded)].all()
    assert not tokenizer.is_text()[ids].any() and tokenizer.is_text().sum() == 400 - 105


@pytest.mark.parametrize(
    ("make", "eos", "unknown", "special_ids", "num_sentinels", "has_token_types"),
    [
        (word_piece, 3, 1, {"pad": 0, "cls": 2, "sep": 3, "mask": 4}, 0, True),
        (byte_level, 2, 3, {"pad": 1, "cls": 0, "sep": 2, "mask": 4}, 0, False),
        (sentence_piece, 1, 2, {"pad": 0, "sep": 1}, 5, True),
    ],
)
def test_special_tokens_of_published_kinds_are_found(
    make, eos, unknown, special_ids, num_sentinels, has_token_types, tmp_path
):
    tokenizer = load_tokenizer_file(make(tmp_path))
    assert tokenizer.eos_id == eos and tokenizer.special_ids == special_ids
    assert len(tokenizer.sentinel_ids) == num_sentinels
    assert tokenizer.has_token_types == has_token_types
    special = {eos, unknown, *special_ids.values(), *tokenizer.sentinel_ids}
    assert not tokenizer.is_text()[list(special)].any()
    ids = tokenizer.encode_batch(["the quick brown foxes jumped"])[0]
    starts = tokenizer.starts_word()[ids]
    pieces = [tokenizer.decode([i]) for i in ids]
    assert tokenizer.is_text()[ids].all() and len(ids) > 5
    # A byte-level vocabulary does not mark the first word of a text.
    assert starts[1:].sum() == 4 and starts[0] == (make is not byte_level), pieces


def save_bpe(directory, special, **files):
    """Write the vocab.json and the merges.txt of a byte-level BPE, and further JSON files."""
    trainer = tokenizers.ByteLevelBPETokenizer()
    texts = ["the cat sat on the mat", "naïve café — 数学 " * 3, "1234 5678 the the"] * 5
    trainer.train_from_iterator(texts, vocab_size=340, special_tokens=special, show_progress=False)
    directory.mkdir()
    trainer.save_model(str(directory))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


#: Model -> special tokens in the order of their ids, and the files that name them.
OLDER = {
    "gpt2": (["<|endoftext|>"], {}),
    "opt": (
        ["<s>", "<pad>", "</s>", "<unk>"],
        {"special_tokens_map": {"bos_token": {"content": "</s>"}, "eos_token": "</s>"}},
    ),
    "roberta": (
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        {"special_tokens_map": {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}},
    ),
}


@pytest.mark.parametrize("model", OLDER)
def test_vocab_and_merges_give_the_ids_of_transformers(model, tmp_path):
    special, files = OLDER[model]
    save_bpe(tmp_path / "t", special, **files, config={"model_type": model})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    ours = load_tokenizer_file(str(tmp_path / "t"))
    texts = ["the cat", " the naïve 数学!", "", "1234  the\n\ncafé"]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text
    assert ours.eos_id == special.index("</s>" if "</s>" in special else "<|endoftext|>")
    assert ours.has_token_types == (model != "roberta")


@pytest.mark.parametrize(
    "name, content", [("vocab.json", "[1]"), ("vocab.json", '{"a": 1e99}'), ("merges.txt", "a b c")]
)
def test_damaged_vocab_or_merges_are_refused(name, content, tmp_path):
    save_bpe(tmp_path / "t", ["</s>"])
    (tmp_path / "t" / name).write_text(content)
    with pytest.raises(ValueError, match=r"data\.tokenizer=.* cannot be read as a tokenizer\.json"):
        load_tokenizer_file(str(tmp_path / "t"))
