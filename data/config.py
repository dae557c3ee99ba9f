"""What to train on and how to cut it into batches: the config section `data`."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A text corpus, its tokenizer and the shape of its batches; checked when built.

    Raises:
        ValueError: A field is out of range; the message names key, value, rule and remedy.
    """

    # The corpus: 'python_stdlib' (the sources of this machine's Python), 'text' (the files of
    # `paths`), a TFDS name such as 'wiki40b/en', or 'package.module:function' of your own that
    # returns {'train': documents, 'validation': documents}, each a sequence of str.
    name: str = "python_stdlib"
    # Globs of .txt and .jsonl files, for name='text'. A .jsonl line is one document; a .txt file
    # is cut into documents of about 32 KiB at line ends.
    paths: tuple[str, ...] = ()
    # The field of a .jsonl line, or the feature of a TFDS set, that holds the text.
    text_field: str = "text"
    # 'bytes', 'bpe' (trained from the train split on first use, then cached), or the path of a
    # tokenizer.json.
    tokenizer: str = "bpe"
    # Tokens of the 'bpe' tokenizer, end-of-document token included. The other tokenizers bring
    # their own size.
    vocab_size: int = 8192
    # Tokens a sequence (T).
    sequence_length: int
    # Sequences a step, summed over all processes and microbatches.
    global_batch_size: int
    # The part of the documents held out for validation, where the corpus has no validation split
    # of its own: 0 (none) up to, not including, 1.
    validation_fraction: float = 0.05
    # Where built data sets, tokenizers and token files are kept;
    # '' means $XDG_CACHE_HOME/taibai, or ~/.cache/taibai.
    cache_dir: str = ""
    # Seed of the shuffling, 0 to 2**32 - 1.
    seed: int = 0
    # Threads of each process that read batches ahead of the step.
    num_threads: int = 2

    def __post_init__(self) -> None:
        for key in ("name", "text_field", "tokenizer"):
            _require(
                isinstance(getattr(self, key), str) and getattr(self, key) != "",
                f"data.{key}={getattr(self, key)!r} must be a non-empty string; "
                f"the default is {getattr(DataConfig, key)!r}",
            )
        _require(
            isinstance(self.paths, tuple) and all(isinstance(p, str) and p for p in self.paths),
            f"data.paths={self.paths!r} must be a tuple of non-empty strings; "
            "write ('my_texts/*.txt',)",
        )
        _require(
            self.name != "text" or self.paths,
            "data.name='text' needs at least one glob in data.paths=(); "
            "set data.paths=('my_texts/*.txt',)",
        )
        _require(
            self.name == "text" or not self.paths,
            f"data.paths={self.paths!r} is read only with data.name='text', but "
            f"data.name={self.name!r}; set data.name='text' or leave data.paths empty",
        )
        for key in ("sequence_length", "global_batch_size", "num_threads"):
            value = getattr(self, key)
            _require(
                _is_int(value) and value >= 1,
                f"data.{key}={value!r} must be an integer of at least 1; choose 1 or more",
            )
        # 256 bytes and the end-of-document token are always in the vocabulary.
        _require(
            _is_int(self.vocab_size) and 257 <= self.vocab_size < 2**31,
            f"data.vocab_size={self.vocab_size!r} must be an integer from 257 (256 bytes and the "
            "end of a document) to 2**31 - 1; choose for example 8192",
        )
        _require(
            isinstance(self.validation_fraction, float | int)
            and 0.0 <= self.validation_fraction < 1.0,
            f"data.validation_fraction={self.validation_fraction!r} must be at least 0 and less "
            "than 1; choose for example 0.05",
        )
        _require(
            isinstance(self.cache_dir, str),
            f"data.cache_dir={self.cache_dir!r} must be a string; '' is the user's cache directory",
        )
        _require(
            _is_int(self.seed) and 0 <= self.seed < 2**32,
            f"data.seed={self.seed!r} must be an integer from 0 to 2**32 - 1; choose for example 0",
        )

    @property
    def cache_path(self) -> Path:
        """The cache directory, resolved but not created."""
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "taibai"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: object, message: str) -> None:
    if not holds:
        raise ValueError(message)
