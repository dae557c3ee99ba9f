"""Tokenizers: decoding restores the encoded text, and broken tokenizer files are refused."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
import transformers

from convert.files.tokenizer_files import keep_tokenizer
from data.text.chat.template import load_template
from data.text.tokenization import tokenizer_checks
from data.text.tokenization.bpe import load_bpe
from data.text.tokenization.byte_tokenizer import ByteTokenizer
from data.text.tokenization.file_tokenizer import FileTokenizer, load_tokenizer_file
from generate.prompts import TextCodec
from tests.data.corpora import byte_level, sentence_piece, word_piece
from tests.data.text.tokenization.tokenizer_folders import KINDS, save_bpe, save_json, vocab_size

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


#: Texts with added tokens, runs of spaces, numbers, and two forms of é.
PUBLISHED = [
    "the cat",
    " the  naïve 数学!",
    "",
    "1234  the\n\ncafé      x\t\ty cafe\u0301",
    "a</s> b<s> x <mask> y [MASK] [SEP]<extra_id_3> <|im_end|> <tool_call>the cats catsx",
    "THE <think> <|user|> <｜end▁of▁sentence｜>I'm we'LL",
]


@pytest.fixture(scope="module", params=KINDS)
def published(request, tmp_path_factory):
    """A folder of a published kind, and its tokenizer in transformers."""
    directory = tmp_path_factory.mktemp(request.param)
    KINDS[request.param](directory)
    return directory, transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.drawn(4)
def test_tokenizer_folders_give_the_ids_of_transformers(published):
    directory, theirs = published
    ours = load_tokenizer_file(str(directory))
    codec = TextCodec(ours)
    for text in PUBLISHED:
        ids = theirs(text)["input_ids"]
        assert codec.encode(text) == ids, text
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert codec.encode(text, has_special_tokens=False) == plain, text
        for skips in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skips)
            assert codec.decode(ids, has_special_tokens=not skips) == expected, text
        # In a corpus, the name of a special token is text.
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode_batch([text])[0].tolist() == plain, text


def test_tokenizer_folders_give_the_special_tokens_of_transformers(published):
    directory, theirs = published
    ours = load_tokenizer_file(str(directory))
    end = theirs.sep_token_id if theirs.eos_token_id is None else theirs.eos_token_id
    assert (ours.eos_id, ours.bos_id) == (end, theirs.bos_token_id)
    for use in ("pad", "cls", "sep", "mask"):
        if (expected := getattr(theirs, f"{use}_token_id")) is not None:
            assert ours.special_ids[use] == expected, use
    names = {name: str(token) for name, token in theirs.special_tokens_map.items()}
    names.pop("extra_special_tokens", None)
    assert ours.token_names == {"eos_token": ours.decode([end]), **names}
    assert not ours.is_text()[[i for i in theirs.all_special_ids if i < ours.vocab_size]].any()
    assert ours.has_token_types == (theirs.num_special_tokens_to_add(pair=True) != 4)


def test_chat_templates_get_the_special_tokens_of_transformers(published):
    directory, theirs = published
    names = [name for name in ("bos_token", "eos_token", "pad_token") if getattr(theirs, name)]
    text = "|".join(f"{{{{ {name} }}}}" for name in names)
    (directory / "own.jinja").write_text(text)
    ours = load_tokenizer_file(str(directory))
    template = load_template(str(directory / "own.jinja"), directory, ours.decode([ours.eos_id]))
    chat = [{"role": "user", "content": "Hello"}]
    expected = theirs.apply_chat_template(chat, chat_template=text, tokenize=False)
    assert template.render(chat) == expected


def test_tokenizer_kept_by_a_run_has_the_same_special_tokens(published, tmp_path):
    directory, _ = published
    ours = load_tokenizer_file(str(directory))
    keep_tokenizer(ours, tmp_path)
    kept = load_tokenizer_file(str(tmp_path))
    for name in ("eos_id", "bos_id", "special_ids", "token_names", "content", "fingerprint"):
        assert getattr(kept, name) == getattr(ours, name), name


def test_tokenizer_in_a_cache_of_links_has_its_special_tokens(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    KINDS["deepseek"](tmp_path / "blobs")
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    tokenizer = load_tokenizer_file(str(tmp_path / "snapshot" / "tokenizer.json"))
    assert tokenizer.decode([tokenizer.eos_id]) == "<｜end▁of▁sentence｜>"
    # Only a tokenizer that is itself a link may have links that lead elsewhere next to it.
    (tmp_path / "snapshot" / "tokenizer.json").unlink()
    shutil.copy(tmp_path / "blobs" / "tokenizer.json", tmp_path / "snapshot")
    with pytest.raises(ValueError, match=r"data\.tokenizer=.*config\.json is a link"):
        load_tokenizer_file(str(tmp_path / "snapshot"))


@pytest.mark.parametrize(
    "files, eos",
    [
        ({"tokenizer_config": {"eos_token": "b"}, "config": {"eos_token_id": 1}}, 4),
        ({"special_tokens_map": {"eos_token": "b"}, "tokenizer_config": {"eos_token": "a"}}, 4),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": 4}}, 4),
        ({"generation_config": {"eos_token_id": [4, 1]}, "config": {"eos_token_id": 3}}, 4),
        ({"config": {"text_config": {"eos_token_id": 4}}}, 4),
        ({"config": {"eos_token_id": 99}}, 1),  # not in the vocabulary
        ({}, 1),
    ],
)
def test_end_of_text_is_looked_up_in_the_order_of_transformers(files, eos, tmp_path):
    (tmp_path / "tokenizer.json").write_text(word_level("</s>", "<pad>"))
    save_json(tmp_path, **files)
    tokenizer = load_tokenizer_file(str(tmp_path))
    assert tokenizer.eos_id == eos
    assert tokenizer.token_names["eos_token"] == tokenizer.decode([eos])
    alone = FileTokenizer(word_level("</s>", "<pad>"), "x")
    # Tokens are cached under the fingerprint, and the separator of documents is one of them.
    assert (tokenizer.fingerprint == alone.fingerprint) == (eos == alone.eos_id)


def test_too_long_added_tokens_are_refused(tmp_path):
    KINDS["gpt2"](tmp_path)
    save_json(tmp_path, added_tokens={"x" * 5000: vocab_size(tmp_path)})
    with pytest.raises(ValueError, match="'xxx.* has 5,000 characters, but at most 4,096 are"):
        load_tokenizer_file(str(tmp_path))


@pytest.mark.parametrize(("count", "size"), [(40, 4000), (30_000, 1)])
def test_too_many_added_tokens_are_refused_before_they_are_added(count, size, tmp_path):
    """Adding them would take gigabytes with some normalizers, in the process that trains."""
    KINDS["gpt2"](tmp_path)
    first = vocab_size(tmp_path)
    added = {f"{'a' * size}{i:05d}": first + i for i in range(count)}
    save_json(tmp_path, added_tokens=added)
    with pytest.raises(ValueError, match="added tokens are missing .*, but at most 131,072 are"):
        load_tokenizer_file(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["DistilBertTokenizer", "DistilBertTokenizerFast", "ElectraTokenizer"]
)
def test_tokenizers_like_berts_are_read(name, tmp_path):
    KINDS["bert"](tmp_path)
    expected = load_tokenizer_file(str(tmp_path)).encode_batch(["The cat sat."])[0]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    save_json(tmp_path, tokenizer_config=config | {"tokenizer_class": name})
    tokenizer = load_tokenizer_file(str(tmp_path))
    assert tokenizer.encode_batch(["The cat sat."])[0].tolist() == expected.tolist()


@pytest.mark.parametrize("other", ["[1]", "// a comment\n{}", '{"eos_token_id": 3}'])
def test_file_of_another_name_has_no_model_next_to_it(other, tmp_path):
    file = tmp_path / "own.json"
    file.write_text(word_level("</s>"))
    (tmp_path / "config.json").write_text(other)
    assert load_tokenizer_file(str(file)).decode([load_tokenizer_file(str(file)).eos_id]) == "</s>"


def test_tokenizer_is_loaded_without_a_home_directory(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(word_level("</s>"))

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tokenizer_checks, "cache_path", fail)
    assert load_tokenizer_file(str(tmp_path)).vocab_size == 4


def test_older_tokenizer_of_unknown_class_is_refused(tmp_path):
    KINDS["gpt2"](tmp_path)
    save_json(tmp_path, tokenizer_config={"tokenizer_class": "WhisperTokenizer"})
    with pytest.raises(
        ValueError, match=r"'WhisperTokenizer' in .* cannot be read from vocab\.json"
    ):
        load_tokenizer_file(str(tmp_path))


@pytest.mark.parametrize("first", [0, 1, 1000])
def test_added_tokens_must_follow_the_vocabulary(first, tmp_path):
    KINDS["gpt2"](tmp_path)
    save_json(tmp_path, added_tokens={"<new>": vocab_size(tmp_path) + first})
    if not first:
        assert load_tokenizer_file(str(tmp_path)).decode([vocab_size(tmp_path)]) == "<new>"
        return
    with pytest.raises(ValueError, match=r"the added token '<new>' has the id \d+, but would get"):
        load_tokenizer_file(str(tmp_path))


@pytest.mark.parametrize(
    "name, content", [("vocab.json", "[1]"), ("vocab.json", '{"a": 1e99}'), ("merges.txt", "a b c")]
)
def test_damaged_vocab_or_merges_are_refused(name, content, tmp_path):
    save_bpe(tmp_path / "t", ["</s>"])
    (tmp_path / "t" / name).write_text(content)
    with pytest.raises(ValueError, match=r"data\.tokenizer=.* cannot be read as a tokenizer\.json"):
        load_tokenizer_file(str(tmp_path / "t"))
