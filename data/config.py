"""The config section `data`: the corpus, the objective, the tokenizer, and the batch shape."""

import os
from dataclasses import dataclass
from pathlib import Path

from data.blend import parse_mixture
from data.checks import is_int, require

#: The training objectives; docs/data.md describes them.
STREAM_OBJECTIVES = ("causal_lm", "masked_lm", "masked_lm_pairs", "span_corruption")
RECORD_OBJECTIVES = ("seq2seq", "classification")
IMAGE_OBJECTIVES = ("image_classification", "image_reconstruction", "image_contrast")
OBJECTIVES = (*STREAM_OBJECTIVES, *RECORD_OBJECTIVES, *IMAGE_OBJECTIVES)
# Values of `name` other than TFDS data sets and import paths of functions, for text and for images.
_TEXT_NAMES = ("python_stdlib", "text", "megatron", "mixture")
_IMAGE_NAMES = ("digits", "image_folder")
# Fields that are read only for text. `label_field` is not one of them, because TFDS data sets of
# images have labels too.
_TEXT_FIELDS = (
    "mixture",
    "text_field",
    "mask_fraction",
    "mean_span_length",
    "target_field",
    "tokenizer",
    "vocab_size",
    "sequence_length",
)
# Fields that only some objectives read -> these objectives.
_READ_WITH = {
    "isolate_documents": ("causal_lm", "masked_lm"),
    "whole_words": ("masked_lm", "masked_lm_pairs"),
    "target_length": ("span_corruption", "seq2seq"),
    "pair_field": ("classification",),
}
# The shortest sequence that has room for the special tokens and for one token of each text.
_SHORTEST = {
    "masked_lm": 3,
    "masked_lm_pairs": 6,
    "span_corruption": 3,
    "seq2seq": 2,
    "classification": 3,
}
# The smallest vocabularies of 'bpe': 256 bytes, the end of a document, and, for objectives other
# than causal_lm, 104 more special tokens (see data/text/special_tokens.py).
_MIN_VOCAB_SIZE = 257
_MIN_VOCAB_SIZE_WITH_SPECIAL = 361


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus, the objective, the tokenizer of texts, and the shape of the batches.

    Raises:
        ValueError: A field is out of range; the message names the key, the value, the rule and the
            remedy.
    """

    # The corpus. For text: 'python_stdlib' (the sources of this machine's Python), 'text' (the
    # files of `paths`), 'megatron' (the token files of `paths`), 'mixture' (several of these), a
    # TFDS name such as 'wiki40b/en', or 'package.module:function', a function that returns
    # {'train': documents, 'validation': documents}, each a sequence of str. For images: 'digits'
    # (scikit-learn's handwritten digits), 'image_folder' (the folders of `paths`), a TFDS name such
    # as 'cifar10', or a function that returns sequences of (image, label).
    name: str = "python_stdlib"
    # For name='text': globs of .txt and .jsonl files. Each .jsonl line is one document; a .txt file
    # is cut at line ends into documents of about 32 KiB. For name='megatron': paths of token files
    # without the suffixes .bin and .idx. For name='image_folder': one folder, which contains either
    # a folder of images per class or train/ and val/ folders of that kind; or two folders, the
    # second for validation.
    paths: tuple[str, ...] = ()
    # For name='mixture': entries 'WEIGHT SOURCE'. A source is a name as above, a glob of .txt or
    # .jsonl files, or the .bin file of a token file.
    mixture: tuple[str, ...] = ()
    # The field of a .jsonl line, or the feature of a TFDS data set, that contains the text.
    text_field: str = "text"
    # The training objective. For text: 'causal_lm', 'masked_lm', 'masked_lm_pairs',
    # 'span_corruption', 'seq2seq' or 'classification'; the last two read each .jsonl line as one
    # example. For images: 'image_classification', 'image_reconstruction' or 'image_contrast'.
    objective: str = "causal_lm"
    # Restrict attention to tokens of the same document, and restart positions in each document.
    isolate_documents: bool = False
    # The fraction of tokens to predict, for the masked_lm objectives and span_corruption.
    mask_fraction: float = 0.15
    # Mask either all tokens of a word or none of them.
    whole_words: bool = False
    # Mean length of a span in tokens, for span_corruption.
    mean_span_length: float = 3.0
    # Length of the decoder sequence in tokens. None stands for the length that the spans need (for
    # span_corruption), or for sequence_length (for seq2seq).
    target_length: int | None = None
    # The field that contains the target text, for seq2seq.
    target_field: str = "target"
    # The field that contains the second text, for classification; None for single texts.
    pair_field: str | None = None
    # The field that contains the label, a str or an int, for classification; for a TFDS data set of
    # images, the feature.
    label_field: str = "label"
    # 'bytes', 'bpe' (trained on the train split on first use, then cached), or the path of a
    # tokenizer.json.
    tokenizer: str = "bpe"
    # Vocabulary size of the 'bpe' tokenizer, including special tokens. Other tokenizers have their
    # own size.
    vocab_size: int = 8192
    # Length of a sequence in tokens (T); in models with a decoder, of the encoder sequence.
    sequence_length: int = 128
    # Sequences or images per step, summed over all processes and microbatches.
    global_batch_size: int
    # The fraction of documents or images held out for validation if the corpus has no validation
    # split of its own: from 0 (none) to 1, exclusive.
    validation_fraction: float = 0.05
    # The directory of built data sets, trained tokenizers and tokenized corpora;
    # '' stands for $XDG_CACHE_HOME/taibai or ~/.cache/taibai.
    cache_dir: str = ""
    # The seed of shuffling and masking, from 0 to 2**32 - 1.
    seed: int = 0
    # Number of threads per process that read batches ahead of the step.
    num_threads: int = 2

    def __post_init__(self) -> None:
        for key in ("name", "text_field", "tokenizer", "target_field", "label_field"):
            require(
                isinstance(getattr(self, key), str) and getattr(self, key) != "",
                f"data.{key}={getattr(self, key)!r} must be a non-empty string; "
                f"the default is {getattr(DataConfig, key)!r}",
            )
        self._check_sources()
        self._check_objective()
        for key in ("sequence_length", "global_batch_size", "num_threads"):
            value = getattr(self, key)
            require(
                is_int(value) and value >= 1,
                f"data.{key}={value!r} must be an integer of at least 1; choose 1 or more",
            )
        self._check_lengths()
        # The vocabulary always contains the 256 bytes and the end-of-document token.
        require(
            is_int(self.vocab_size) and _MIN_VOCAB_SIZE <= self.vocab_size < 2**31,
            f"data.vocab_size={self.vocab_size!r} must be an integer from 257 (256 bytes and the "
            "end-of-document token) to 2**31 - 1; choose for example 8192",
        )
        require(
            not (self.tokenizer == "bpe" and self.has_special_tokens)
            or self.vocab_size >= _MIN_VOCAB_SIZE_WITH_SPECIAL,
            f"data.vocab_size={self.vocab_size} must be at least {_MIN_VOCAB_SIZE_WITH_SPECIAL} "
            f"with data.objective={self.objective!r} (256 bytes and 105 special tokens); "
            "choose for example 8192",
        )
        require(
            isinstance(self.validation_fraction, float | int)
            and 0.0 <= self.validation_fraction < 1.0,
            f"data.validation_fraction={self.validation_fraction!r} must be at least 0 and less "
            "than 1; choose for example 0.05",
        )
        require(
            isinstance(self.cache_dir, str),
            f"data.cache_dir={self.cache_dir!r} must be a string; use '' for the default directory",
        )
        require(
            is_int(self.seed) and 0 <= self.seed < 2**32,
            f"data.seed={self.seed!r} must be an integer from 0 to 2**32 - 1; choose for example 0",
        )

    def _check_sources(self) -> None:
        for key, example in (("paths", "my_texts/*.txt"), ("mixture", "0.7 wiki40b/en")):
            value = getattr(self, key)
            require(
                isinstance(value, tuple) and all(isinstance(v, str) and v for v in value),
                f"data.{key}={value!r} must be a tuple of non-empty strings; write ('{example}',)",
            )
        require(
            self.name != "text" or self.paths,
            "data.name='text' needs at least one glob in data.paths=(); "
            "set data.paths=('my_texts/*.txt',)",
        )
        require(
            self.name != "megatron" or self.paths,
            "data.name='megatron' needs the path of a token file in data.paths=(); "
            "set data.paths=('my_tokens',) to read my_tokens.bin and my_tokens.idx",
        )
        require(
            self.name != "megatron" or self.tokenizer != "bpe",
            "data.tokenizer='bpe' is trained from text, but data.name='megatron' reads token ids; "
            "set data.tokenizer to the tokenizer.json that the token files were written with",
        )
        require(
            self.name in ("text", "megatron", "image_folder") or not self.paths,
            f"data.paths={self.paths!r} is read only with data.name='text', 'megatron' or "
            f"'image_folder', but data.name={self.name!r}; set one of these, or leave data.paths "
            "empty",
        )
        require(
            self.name != "image_folder" or len(self.paths) in (1, 2),
            f"data.name='image_folder' needs one or two folders in data.paths={self.paths!r}, the "
            "second for validation; set for example data.paths=('my_images',)",
        )
        require(
            bool(self.mixture) == (self.name == "mixture"),
            f"data.mixture={self.mixture!r} must be set if and only if data.name='mixture', but "
            f"data.name={self.name!r}; set both, for example data.mixture=('0.7 wiki40b/en', "
            "'0.3 python_stdlib'), or leave data.mixture empty",
        )
        parse_mixture(self.mixture)

    def _check_objective(self) -> None:
        require(
            self.objective in OBJECTIVES,
            f"data.objective={self.objective!r} is unknown; choose {', '.join(OBJECTIVES)}",
        )
        for key, objectives in _READ_WITH.items():
            value = getattr(self, key)
            default = getattr(DataConfig, key)
            require(
                value == default or self.objective in objectives,
                f"data.{key}={value!r} is read only with data.objective="
                f"{' or '.join(map(repr, objectives))}, but it is {self.objective!r}; "
                f"set data.{key}={default!r}",
            )
        self._check_images()
        require(
            self.objective not in RECORD_OBJECTIVES or self.name == "text",
            f"data.objective={self.objective!r} reads examples from .jsonl files, but "
            f"data.name={self.name!r}; set data.name='text' and data.paths=('my_examples.jsonl',)",
        )
        require(
            isinstance(self.mask_fraction, float | int) and 0.0 < self.mask_fraction < 1.0,
            f"data.mask_fraction={self.mask_fraction!r} must be more than 0 and less than 1; "
            "choose for example 0.15",
        )
        require(
            isinstance(self.mean_span_length, float | int) and self.mean_span_length >= 1,
            f"data.mean_span_length={self.mean_span_length!r} must be at least 1; "
            "choose for example 3",
        )
        require(
            self.pair_field is None or (isinstance(self.pair_field, str) and self.pair_field),
            f"data.pair_field={self.pair_field!r} must be a non-empty string, or None if examples "
            "have a single text",
        )

    def _check_images(self) -> None:
        what = "texts"
        others = _IMAGE_NAMES
        remedy = "data.name='text', or an objective for images such as 'image_classification'"
        if self.reads_images:
            what = "images"
            others = _TEXT_NAMES
            remedy = "data.name='digits', 'image_folder', a TFDS set, or 'package.module:function'"
        require(
            self.name not in others,
            f"data.objective={self.objective!r} reads {what}, but data.name={self.name!r} has "
            f"none; set {remedy}",
        )
        for key in _TEXT_FIELDS if self.reads_images else ():
            value = getattr(self, key)
            default = getattr(DataConfig, key)
            require(
                value == default,
                f"data.{key}={value!r} is read only for texts, but data.objective="
                f"{self.objective!r} reads images; set data.{key}={default!r}",
            )

    def _check_lengths(self) -> None:
        shortest = 6 if self.pair_field else _SHORTEST.get(self.objective, 1)
        require(
            self.sequence_length >= shortest,
            f"data.sequence_length={self.sequence_length} must be at least {shortest} with "
            f"data.objective={self.objective!r}, to hold special tokens and text; increase it",
        )
        require(
            self.target_length is None or (is_int(self.target_length) and self.target_length >= 2),
            f"data.target_length={self.target_length!r} must be an integer of at least 2, or None; "
            "leave it None for the default",
        )

    @property
    def reads_images(self) -> bool:
        """Whether the objective trains on images."""
        return self.objective in IMAGE_OBJECTIVES

    @property
    def has_perplexity(self) -> bool:
        """Whether the loss is a mean over tokens, so that its exponential is a perplexity."""
        return not self.reads_images and self.objective != "classification"

    @property
    def has_special_tokens(self) -> bool:
        """Whether 'bytes' and 'bpe' have special tokens other than the end of a document."""
        return self.objective != "causal_lm"

    @property
    def cache_path(self) -> Path:
        """The cache directory, with `~` expanded; this does not create it."""
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "taibai"


def make_cache(config: DataConfig) -> None:
    """Create the cache directory if it does not exist.

    Args:
        config: The config section `data`.

    Raises:
        ValueError: The directory cannot be created.
    """
    try:
        config.cache_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={config.cache_dir!r}: {config.cache_path} cannot be created "
            f"({error.strerror}); set data.cache_dir to a directory that you may write to"
        ) from error
