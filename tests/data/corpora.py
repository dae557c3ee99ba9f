"""Small text corpora and tokenizers that the data tests share."""

import json

import numpy as np
import tokenizers

from data.config import DataConfig
from data.examples import Examples
from data.text.objectives.causal_lm import CausalLMExamples

#: Ids of the tokenizer 'bytes' with special tokens.
EOS = 256
PAD = 257
CLS = 258
SEP = 259
MASK = 260
FIRST_SENTINEL = 360
WORDS = "the quick brown foxes jumped over lazy dogs while seventeen unbelievable things".split()


#: Seed of the training batches of tests.
SEED = 7


def jsonl_config(directory, records, **changes):
    """Write records or texts to a .jsonl file, and return a config that reads it."""
    records = [r if isinstance(r, dict) else {"text": r} for r in records]
    (directory / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    fields = {
        "name": "text",
        "paths": (str(directory / "a.jsonl"),),
        "tokenizer": "bytes",
        "sequence_length": 32,
        "global_batch_size": 6,
        "validation_fraction": 0.3,
        "cache_dir": str(directory / "cache"),
    }
    return DataConfig(**{**fields, **changes})


def tokens_of(examples: Examples) -> np.ndarray:
    """Return the token array of a causal_lm corpus."""
    assert isinstance(examples, CausalLMExamples)
    return np.asarray(examples.tokens)


def documents(count=60):
    """Return texts of very different lengths."""
    return [" ".join(WORDS[i % 7 : 4 + i % 9] * (1 + i * i % 5)) + f" {i}" for i in range(count)]


def word_piece(directory):
    """Write a tokenizer like BERT's, which splits the longer WORDS into pieces; return its path."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({letter for word in WORDS for letter in word} | set("0123456789"))
    pieces = ["fox", "jump", "seven", "believ", "able", "thing", "un", "the", "quick", "teen"]
    vocab = [*specials, *letters, *(f"##{p}" for p in [*letters, *pieces]), *pieces]
    model = tokenizers.models.WordPiece({t: i for i, t in enumerate(vocab)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(directory / "word_piece.json"))
    return str(directory / "word_piece.json")


def byte_level(directory):
    """Write a tokenizer like RoBERTa's; return its path."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(directory / "byte_level.json"))
    return str(directory / "byte_level.json")


def sentence_piece(directory):
    """Write a tokenizer like T5's, with five sentinels; return its path."""
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(5))]
    letters = sorted({letter for word in WORDS for letter in word} | set("0123456789"))
    pieces = ["<pad>", "</s>", "<unk>", "▁", *letters, *(f"▁{word}" for word in WORDS[::2])]
    model = tokenizers.models.Unigram([(p, -1.0 - i / 100) for i, p in enumerate(pieces)], unk_id=2)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", *sentinels])
    tokenizer.save(str(directory / "sentence_piece.json"))
    return str(directory / "sentence_piece.json")


def take(iterator, count):
    """Return the next `count` batches of an iterator."""
    return [next(iterator) for _ in range(count)]


def assert_rows(found, whole, rows):
    """Check that batches are equal, bit for bit, to these rows of the whole batches."""
    for one, all_rows in zip(found, whole, strict=True):
        assert one.keys() == all_rows.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], all_rows[key][rows], err_msg=key)


def user_config(name, tmp_path):
    """Return a config of a corpus without settings of its own, with its cache in `tmp_path`."""
    return DataConfig(
        name=name, sequence_length=8, global_batch_size=2, cache_dir=str(tmp_path / "cache")
    )
