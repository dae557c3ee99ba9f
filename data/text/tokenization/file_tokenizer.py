"""A tokenizer of the `tokenizers` library: a tokenizer.json, or vocab.json and merges.txt."""

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from data.text.tokenization.special_tokens import (
    END_OF_TEXT,
    EOS_NAMES,
    find_sentinel_ids,
    find_special_ids,
)
from untrusted.documents import read_json
from untrusted.files import check_link, read_text
from untrusted.messages import shortened
from untrusted.schema import check

# The largest tokenizer.json that is read. Large vocabularies need 35 MB.
MAX_FILE_BYTES = 2**28
# Real vocabularies have at most a few hundred thousand tokens; arrays are as long as a vocabulary.
_MAX_VOCAB_SIZE = 2**24

# The first character of tokens that begin a word: a space, newline, tab or carriage return as they
# are written in byte-level vocabularies, and the "▁" of SentencePiece.
_WORD_MARKS = ("Ġ", "Ċ", "ĉ", "č", "▁")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, loaded from its JSON format.

    Args:
        content: The content of a tokenizer.json.
        source: The path of the file, as in `data.tokenizer`.

    Raises:
        ValueError: The JSON is not a tokenizer, or has no end-of-document token.
    """

    def __init__(self, content: str, source: str):
        with _refusing(
            f"data.tokenizer={source!r} is not a readable tokenizer.json",
            remedy="replace the file, or set data.tokenizer to 'bpe' or 'bytes'",
        ):
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        # A file saved for a classifier may truncate or pad. A corpus needs exactly its tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # If a text contains the name of a special token, encode that name as text: it must not end
        # the document.
        self._tokenizer.encode_special_tokens = True
        token_to_id = self._tokenizer.token_to_id
        found = [name for name in EOS_NAMES if token_to_id(name) is not None]
        # RoBERTa and OPT have GPT-2's end-of-document token as an ordinary token, and a special
        # token of their own, so special tokens take precedence.
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        found.sort(key=lambda name: name not in special)
        if not found:
            raise ValueError(
                f"data.tokenizer={source!r} has none of the end-of-document tokens "
                f"{list(EOS_NAMES)}; add one of them to the file as a special token"
            )
        self.eos_id: int = token_to_id(found[0])  # pyright: ignore
        self.special_ids: Mapping[str, int] = find_special_ids(token_to_id)
        self.sentinel_ids = find_sentinel_ids(token_to_id)
        # RoBERTa encodes a pair as CLS A SEP SEP B SEP, with 4 special tokens; BERT needs only 3.
        self.has_token_types = self._tokenizer.num_special_tokens_to_add(is_pair=True) != 4
        self.source = source
        self.content = content
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > _MAX_VOCAB_SIZE:
            raise ValueError(
                f"data.tokenizer={source!r} has the token id {self.vocab_size - 1:,}, but ids must "
                f"be less than {_MAX_VOCAB_SIZE:,}; replace the file"
            )
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    @property
    def unknown_token(self) -> str | None:
        """The token of words that the vocabulary lacks, or None if every text can be encoded."""
        return getattr(self._tokenizer.model, "unk_token", None)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary lacks it."""
        return self._tokenizer.token_to_id(token)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode texts; see `Tokenizer.encode_batch`."""
        with _refusing(
            f"data.tokenizer={self.source!r} cannot encode a text", remedy="replace the file"
        ):
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text with names of special tokens; see `Tokenizer.encode_with_offsets`."""
        encoded = self._with_special_tokens.encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        return np.array(encoded.ids, np.int32), offsets

    @functools.cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_str(self.content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids, with the names of special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def is_text(self) -> np.ndarray:
        """Return bool[vocab_size], true for the ids that text can encode to."""
        is_text = np.zeros(self.vocab_size, bool)
        is_text[list(self._tokenizer.get_vocab(with_added_tokens=True).values())] = True
        added = self._tokenizer.get_added_tokens_decoder()
        special = [i for i, token in added.items() if token.special]
        is_text[[*special, self.eos_id, *self.special_ids.values(), *self.sentinel_ids]] = False
        return is_text

    def starts_word(self) -> np.ndarray:
        """Return bool[vocab_size], true for the ids that begin a word.

        Raises:
            ValueError: The vocabulary does not mark where words begin.
        """
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        starts = np.zeros(self.vocab_size, bool)
        if isinstance(self._tokenizer.model, tokenizers.models.WordPiece):
            prefix = self._tokenizer.model.continuing_subword_prefix
            first = [i for token, i in vocab.items() if not token.startswith(prefix)]
        else:
            first = [i for token, i in vocab.items() if token.startswith(_WORD_MARKS)]
        if not first:
            raise ValueError(
                f"data.whole_words=True, but data.tokenizer={self.source!r} does not mark where "
                "words begin (with '##' in WordPiece, 'Ġ' in byte-level BPE or '▁' in "
                "SentencePiece); set data.whole_words=False"
            )
        starts[first] = True
        return starts


def load_tokenizer_file(path: str) -> FileTokenizer:
    """Load a tokenizer.json, or the vocab.json and merges.txt of older models.

    Args:
        path: The path of the file, or of a directory that contains these files.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a tokenizer.
    """
    file = Path(path).expanduser()
    directory = file
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        if find_tokenizer(directory) == directory:
            content = _byte_level_bpe(directory)
        else:
            content = read_text(file, max_bytes=MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"data.tokenizer={path!r}: there is no file {file}; set it to the path of a "
            "tokenizer.json, or to 'bpe' or 'bytes'"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.tokenizer={path!r} cannot be read as a tokenizer.json: {error}; "
            "replace the file, or set data.tokenizer to 'bpe' or 'bytes'"
        ) from error
    return FileTokenizer(content, path)


@contextlib.contextmanager
def _refusing(problem: str, *, remedy: str) -> Iterator[None]:
    """Turn every error of the `tokenizers` library into a ValueError.

    Args:
        problem: The beginning of the sentence, which names the file.
        remedy: The end of the sentence.
    """
    try:
        yield
    except BaseException as error:
        # The library raises plain Exception. A failed assertion of its Rust code is a BaseException
        # whose type cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{problem} ({shortened(error)}); {remedy}") from error


def find_tokenizer(directory: Path) -> Path | None:
    """Return the path to load the tokenizer of a model directory from, or None if it has none.

    Raises:
        ValueError: The tokenizer.json is a link that leads out of the directory.
    """
    check_link(directory / "tokenizer.json", directory)
    if (directory / "tokenizer.json").exists():
        return directory / "tokenizer.json"
    older = (directory / "vocab.json", directory / "merges.txt")
    return directory if all(file.is_file() for file in older) else None


def _byte_level_bpe(directory: Path) -> str:
    """Return the tokenizer.json of a byte-level BPE that is given as vocab.json and merges.txt.

    Raises:
        ValueError: A file is damaged, or leads out of the directory.
        OSError: A file cannot be read.
    """
    vocab = read_json(directory / "vocab.json", within=directory, max_bytes=MAX_FILE_BYTES)
    text = read_text(directory / "merges.txt", within=directory, max_bytes=MAX_FILE_BYTES)
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    config: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            config |= read_json(directory / name, within=directory)
    named = [each.get("content") if isinstance(each, dict) else each for each in config.values()]
    special = [each for each in named if isinstance(each, str) and each in vocab] or [END_OF_TEXT]
    check(vocab, dict[str, int], "vocab.json")
    if not all(0 <= i < _MAX_VOCAB_SIZE for i in vocab.values()):
        raise ValueError(f"vocab.json has token ids that are not from 0 to {_MAX_VOCAB_SIZE - 1:,}")
    with _refusing("vocab.json and merges.txt do not fit each other", remedy="replace both"):
        merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=config.get("add_prefix_space") is True
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([each for each in dict.fromkeys(special) if each in vocab])
    if "cls_token" in config and {"<s>", "</s>"} <= vocab.keys():  # two separators, as in RoBERTa
        tokenizer.post_processor = tokenizers.processors.RobertaProcessing(
            ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"])
        )
    return tokenizer.to_str()
