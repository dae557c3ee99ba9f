"""A cache in which there is something else in the place of tokens or of a tokenizer."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from data.text.text_corpus import load_text
from tests.data.corpora import documents, jsonl_config, tokens_of
from tests.data.text.tokenization.tokenizer_folders import KINDS, save_json


@pytest.mark.parametrize("is_at", ["final", "temporary"])
@pytest.mark.parametrize("kind", ["file", "link", "directory", "empty store", "store of one split"])
def test_anything_at_the_place_of_the_cache_is_replaced(kind, is_at, tmp_path):
    config = jsonl_config(tmp_path, documents())
    fingerprint = load_text(config).fingerprint
    (store,) = [path for path in Path(config.cache_dir).glob("tokens-*") if path.is_dir()]
    victim = tmp_path / "victim"
    store.rename(victim)
    place = store if is_at == "final" else store.with_suffix(".tmp")
    if kind == "file":
        place.write_text("")
    elif kind == "link":
        place.symlink_to(victim)
    else:
        place.mkdir()
        meta = {"dtype": "uint16", "num_tokens": {}, "fingerprint": sha256(b"uint16").hexdigest()}
        if kind == "store of one split":
            (place / "train.bin").write_bytes(b"ab")
            meta["num_tokens"] = {"train": 1}
            meta["fingerprint"] = sha256(b"uint16" + b"ab" + b"train").hexdigest()
        if kind != "directory":
            (place / "meta.json").write_text(json.dumps(meta))
    assert load_text(config).fingerprint == fingerprint
    assert store.is_dir() and not store.is_symlink()
    assert (victim / "meta.json").exists()


def test_tokens_of_another_end_of_text_are_not_reused(tmp_path):
    directory = tmp_path / "tokenizer"
    KINDS["opt"](directory)
    ends = []
    for name in ("</s>", "<pad>"):
        save_json(directory, special_tokens_map={"bos_token": name, "eos_token": name})
        corpus = load_text(jsonl_config(tmp_path, documents(), tokenizer=str(directory)))
        ends.append((tokens_of(corpus.train)[0], corpus.tokenizer.eos_id, corpus.fingerprint))
    assert [end[:2] for end in ends] == [(2, 2), (1, 1)]
    assert ends[0][2] != ends[1][2]


@pytest.mark.parametrize("suffix", ["", ".sha256"])
def test_folder_at_the_place_of_a_tokenizer_is_replaced(suffix, tmp_path):
    config = jsonl_config(tmp_path, documents(), tokenizer="bpe", vocab_size=300)
    fingerprint = load_text(config).tokenizer.fingerprint
    (file,) = Path(config.cache_dir).glob("bpe-*.json")
    for place in (Path(f"{file}{suffix}"), file.with_name(f".{file.name}{suffix}.tmp")):
        place.unlink(missing_ok=True)
        (place / "folder").mkdir(parents=True)
        if file.is_file():
            file.unlink()
        assert load_text(config).tokenizer.fingerprint == fingerprint
        assert file.is_file()
