"""A tokenizer of the `tokenizers` library: a tokenizer.json, or the files of older models."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import tokenizers

from data.text.tokenization.older_files import (
    MAX_FILE_BYTES,
    MAX_VOCAB_SIZE,
    build_tokenizer,
    has_older_files,
)
from data.text.tokenization.refusing import refusing
from data.text.tokenization.settings import TokenizerSettings, add_tokens, read_settings
from data.text.tokenization.special_tokens import (
    EOS_NAMES,
    NAMES,
    find_sentinel_ids,
    find_special_ids,
)
from data.text.tokenization.tokenizer_checks import check_tokenizer
from untrusted.files import check_link, read_text

# The first character of tokens that begin a word: a space, newline, tab or carriage return as they
# are written in byte-level vocabularies, and the "▁" of SentencePiece.
_WORD_MARKS = ("Ġ", "Ċ", "ĉ", "č", "▁")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, loaded from its JSON format.

    Args:
        content: content of a tokenizer.json.
        source: path of the file, as in `data.tokenizer`.

    Attributes:
        bos_id: id of the token that begins a text; None if the tokenizer has none.

    Raises:
        ValueError: The JSON is not a tokenizer, has no end-of-document token, or does not fit the
            other files.
    """

    def __init__(self, content: str, source: str, settings: TokenizerSettings | None = None):
        settings = settings or TokenizerSettings()
        with refusing(
            f"data.tokenizer={source!r} is not a readable tokenizer.json",
            remedy="replace the file, or set data.tokenizer to 'bpe' or 'bytes'",
        ):
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        with refusing(
            f"data.tokenizer={source!r} does not fit the files next to it", remedy="correct them"
        ):
            if add_tokens(self._tokenizer, settings):
                content = self._tokenizer.to_str()
        encode_exactly(self._tokenizer)
        self.source = source
        self.content = content
        token_to_id = self._tokenizer.token_to_id
        named = {use: token_to_id(token.content) for use, token in settings.named.items()}
        known = {use: i for use, i in named.items() if i is not None}
        usual_eos = self._usual_eos()
        usual_ids = find_special_ids(token_to_id)
        self.bos_id: int | None = known.get("bos")
        self.eos_id = self._find_eos(known, settings.end_ids, usual_eos)
        self.special_ids: Mapping[str, int] = usual_ids | {
            use: i for use, i in known.items() if use in NAMES
        }
        self.token_names: Mapping[str, str] = {
            **{f"{use}_token": settings.named[use].content for use in known},
            "eos_token": str(self._tokenizer.id_to_token(self.eos_id)),
        }
        self.sentinel_ids = find_sentinel_ids(token_to_id)
        # RoBERTa encodes a pair as CLS A SEP SEP B SEP, with 4 special tokens; BERT needs only 3.
        self.has_token_types = self._tokenizer.num_special_tokens_to_add(is_pair=True) != 4
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(
                f"data.tokenizer={source!r} has the token id {self.vocab_size - 1:,}, but ids must "
                f"be less than {MAX_VOCAB_SIZE:,}; replace the file"
            )
        # The content alone decides most tokenizers. Their fingerprints must not change, because
        # runs could not be resumed.
        keyed = content
        if (self.eos_id, self.special_ids) != (usual_eos, usual_ids):
            keyed += json.dumps({**self.special_ids, "eos": self.eos_id}, sort_keys=True)
        self.fingerprint = hashlib.sha256(keyed.encode()).hexdigest()

    def _usual_eos(self) -> int | None:
        """Return the id of the end-of-document token by its usual names; None without one."""
        token_to_id = self._tokenizer.token_to_id
        names = [name for name in EOS_NAMES if token_to_id(name) is not None]
        # RoBERTa and OPT have GPT-2's end-of-document token as an ordinary token, and a special
        # token of their own, so special tokens take precedence.
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        names.sort(key=lambda name: name not in special)
        return token_to_id(names[0]) if names else None

    def _find_eos(self, named: Mapping[str, int], end_ids: Sequence[int], usual: int | None) -> int:
        """Return the id of the end-of-document token.

        Args:
            named: use -> id of the special tokens that files name.
            end_ids: ids of the tokens that end a text in generation.
            usual: id by the usual names.
        """
        in_generation = [i for i in end_ids if self._tokenizer.id_to_token(i) is not None]
        for candidate in (named.get("eos"), *in_generation, named.get("sep"), usual):
            if candidate is not None:
                return candidate
        raise ValueError(
            f"data.tokenizer={self.source!r} has none of the end-of-document tokens "
            f"{list(EOS_NAMES)}; name its own as eos_token in a tokenizer_config.json next to it"
        )

    @property
    def unknown_token(self) -> str | None:
        """The token of words that the vocabulary lacks, or None if every text can be encoded."""
        return getattr(self._tokenizer.model, "unk_token", None)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Encode texts; see `Tokenizer.encode_batch`."""
        with self._refusing("cannot encode a text"):
            return encode_texts(self._tokenizer, texts)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text with names of special tokens; see `Tokenizer.encode_with_offsets`."""
        with self._refusing("cannot encode a text"):
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
        with self._refusing("cannot decode tokens"):
            return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def _refusing(self, problem: str) -> AbstractContextManager[None]:
        return refusing(f"data.tokenizer={self.source!r} {problem}", remedy="replace the file")

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


def encode_exactly(tokenizer: tokenizers.Tokenizer) -> None:
    """Let a tokenizer encode exactly the tokens of a text."""
    # A file saved for a classifier may truncate or pad.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # If a text contains the name of a special token, encode that name as text: it must not end
    # the document.
    tokenizer.encode_special_tokens = True


def encode_texts(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Encode each text as int32[number of tokens], without special tokens."""
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(one.ids, np.int32) for one in encoded]


def load_tokenizer_file(path: str) -> FileTokenizer:
    """Load a tokenizer.json, or the files of older models, with the files next to them.

    Args:
        path: path of the file, or of a directory that contains these files.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a tokenizer.
    """
    file = Path(path).expanduser()
    directory = file
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        if find_tokenizer(directory) == directory:
            built, settings = build_tokenizer(directory)
            content = built.to_str()
        else:
            content = read_text(file, max_bytes=MAX_FILE_BYTES)
            # In the cache of Hugging Face, all files are links that lead out of their directory.
            is_link = file.resolve().parent != file.parent.resolve()
            settings = read_settings(
                file.parent,
                within=None if is_link else file.parent,
                has_model=file.name == "tokenizer.json",
            )
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"data.tokenizer={path!r}: there is no file {file}; set it to the path of a "
            "tokenizer.json, to OWNER/NAME on the Hugging Face hub, or to 'bpe' or 'bytes'"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.tokenizer={path!r} cannot be read as a tokenizer.json: {error}; "
            "replace the file, or set data.tokenizer to 'bpe' or 'bytes'"
        ) from error
    check_tokenizer(content, path)
    return FileTokenizer(content, path, settings)


def find_tokenizer(directory: Path) -> Path | None:
    """Return the path to load the tokenizer of a model directory from, or None if it has none.

    Raises:
        ValueError: The tokenizer.json is a link that leads out of the directory.
    """
    check_link(directory / "tokenizer.json", directory)
    if (directory / "tokenizer.json").exists():
        return directory / "tokenizer.json"
    return directory if has_older_files(directory) else None
