"""What to train on and how to cut it into batches: the config section `data`."""

import os
from dataclasses import dataclass
from pathlib import Path

from data.blend import parse_mixture
from data.checks import is_int, require

#: What is learnt from the data: see docs/data.md.
STREAM_OBJECTIVES = ("causal_lm", "masked_lm", "masked_lm_pairs", "span_corruption")
RECORD_OBJECTIVES = ("seq2seq", "classification")
IMAGE_OBJECTIVES = ("image_classification", "image_reconstruction", "image_contrast")
OBJECTIVES = (*STREAM_OBJECTIVES, *RECORD_OBJECTIVES, *IMAGE_OBJECTIVES)
# What `name` may be beside a TFDS set and a function of the user's, for texts and for images.
_TEXT_NAMES = ("python_stdlib", "text", "megatron", "mixture")
_IMAGE_NAMES = ("digits", "image_folder")
# What is not for images. Of `label_field` TFDS sets of images have one, too.
_TEXT_FIELDS = (
    *("mixture", "text_field", "mask_fraction", "mean_span_length", "target_field", "tokenizer"),
    *("vocab_size", "sequence_length"),
)
# The objectives that a field is for, where it is not for all of them.
_READ_WITH = {
    "isolate_documents": ("causal_lm", "masked_lm"),
    "whole_words": ("masked_lm", "masked_lm_pairs"),
    "target_length": ("span_corruption", "seq2seq"),
    "pair_field": ("classification",),
}
# Shorter sequences have no room for a token of each text beside the special ones.
_SHORTEST = {
    "masked_lm": 3,
    "masked_lm_pairs": 6,
    "span_corruption": 3,
    "seq2seq": 2,
    "classification": 3,
}
# What 'bytes' and 'bpe' know besides text: see data/text/special_tokens.py.
_MIN_VOCAB_SIZE, _MIN_VOCAB_SIZE_WITH_SPECIAL = 257, 361


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A corpus, what is learnt of it, a text's tokenizer, and the shape of the batches.

    Raises:
        ValueError: A field is out of range; the message names key, value, rule and remedy.
    """

    # The corpus: 'python_stdlib' (the sources of this machine's Python), 'text' (the files of
    # `paths`), 'megatron' (token files, `paths`), 'mixture' (several of these), a TFDS name such
    # as 'wiki40b/en', or 'package.module:function' of your own that returns {'train': documents,
    # 'validation': documents}, each a sequence of str. For images: 'digits' (handwritten, of
    # scikit-learn), 'image_folder' (the folders of `paths`), a TFDS name such as 'cifar10', or a
    # function whose sequences are of (image, label).
    name: str = "python_stdlib"
    # Globs of .txt and .jsonl files, for name='text'. A .jsonl line is one document; a .txt file
    # is cut into documents of about 32 KiB at line ends. For name='megatron', the paths of token
    # files without their endings .bin and .idx. For name='image_folder', a folder with a folder of
    # images for each class, or with train/ and val/ of that kind; or two folders, the second for
    # validation.
    paths: tuple[str, ...] = ()
    # For name='mixture': 'WEIGHT SOURCE' each, the source a name as above, a glob of .txt or
    # .jsonl files, or a token file's .bin.
    mixture: tuple[str, ...] = ()
    # The field of a .jsonl line, or the feature of a TFDS set, that holds the text.
    text_field: str = "text"
    # What is learnt: 'causal_lm', 'masked_lm', 'masked_lm_pairs', 'span_corruption', 'seq2seq' or
    # 'classification'; the last two read .jsonl lines as examples. Of images:
    # 'image_classification', 'image_reconstruction' or 'image_contrast'.
    objective: str = "causal_lm"
    # Tokens see their own document only, and positions begin anew in each.
    isolate_documents: bool = False
    # The part of the tokens to be restored, for the masked_lm objectives and span_corruption.
    mask_fraction: float = 0.15
    # Mask all tokens of a word or none.
    whole_words: bool = False
    # Tokens of a span, on average, for span_corruption.
    mean_span_length: float = 3.0
    # Tokens of the decoder's sequence; None: what the spans need, or sequence_length.
    target_length: int | None = None
    # The field that holds what to answer, for seq2seq.
    target_field: str = "target"
    # The field that holds a second text, for classification; None: there is none.
    pair_field: str | None = None
    # The field that holds the label, a str or an int, for classification; of a TFDS set of images,
    # the feature.
    label_field: str = "label"
    # 'bytes', 'bpe' (trained from the train split on first use, then cached), or the path of a
    # tokenizer.json.
    tokenizer: str = "bpe"
    # Tokens of the 'bpe' tokenizer, special tokens included. The other tokenizers bring their own
    # size.
    vocab_size: int = 8192
    # Tokens a sequence (T); of the encoder, where there is a decoder too.
    sequence_length: int = 128
    # Sequences, or images, a step, summed over all processes and microbatches.
    global_batch_size: int
    # The part of the documents, or images, held out for validation, where the corpus has no
    # validation split of its own: 0 (none) up to, not including, 1.
    validation_fraction: float = 0.05
    # Where built data sets, tokenizers and token files are kept;
    # '' means $XDG_CACHE_HOME/taibai, or ~/.cache/taibai.
    cache_dir: str = ""
    # Seed of the shuffling and masking, 0 to 2**32 - 1.
    seed: int = 0
    # Threads of each process that read batches ahead of the step.
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
        # 256 bytes and the end-of-document token are always in the vocabulary.
        require(
            is_int(self.vocab_size) and _MIN_VOCAB_SIZE <= self.vocab_size < 2**31,
            f"data.vocab_size={self.vocab_size!r} must be an integer from 257 (256 bytes and the "
            "end of a document) to 2**31 - 1; choose for example 8192",
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
            f"data.cache_dir={self.cache_dir!r} must be a string; '' is the user's cache directory",
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
            f"data.name='image_folder' needs one folder in data.paths={self.paths!r}, or two, the "
            "second for validation; set data.paths=('my_images',)",
        )
        require(
            bool(self.mixture) == (self.name == "mixture"),
            f"data.mixture={self.mixture!r} goes with data.name='mixture' and with no other, but "
            f"data.name={self.name!r}; set both, such as data.mixture=('0.7 wiki40b/en', "
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
            f"data.pair_field={self.pair_field!r} must be a non-empty string, or None for none",
        )

    def _check_images(self) -> None:
        what, others = "texts", _IMAGE_NAMES
        remedy = "data.name='text', or data.objective='image_classification' and the like"
        if self.reads_images:
            what, others = "images", _TEXT_NAMES
            remedy = "data.name='digits', 'image_folder', a TFDS set, or 'package.module:function'"
        require(
            self.name not in others,
            f"data.objective={self.objective!r} reads {what}, and data.name={self.name!r} has "
            f"none; set {remedy}",
        )
        for key in _TEXT_FIELDS if self.reads_images else ():
            value, default = getattr(self, key), getattr(DataConfig, key)
            require(
                value == default,
                f"data.{key}={value!r} is read only with texts, but data.objective="
                f"{self.objective!r} reads images; set data.{key}={default!r}",
            )

    def _check_lengths(self) -> None:
        shortest = 6 if self.pair_field else _SHORTEST.get(self.objective, 1)
        require(
            self.sequence_length >= shortest,
            f"data.sequence_length={self.sequence_length} must be at least {shortest} with "
            f"data.objective={self.objective!r}, for special tokens and text; choose more",
        )
        require(
            self.target_length is None or (is_int(self.target_length) and self.target_length >= 2),
            f"data.target_length={self.target_length!r} must be an integer of at least 2, or None; "
            "leave it None for the default",
        )

    @property
    def reads_images(self) -> bool:
        """Whether the objective is one of images."""
        return self.objective in IMAGE_OBJECTIVES

    @property
    def has_perplexity(self) -> bool:
        """Whether the loss is one of tokens, so that e to its power says something."""
        return not self.reads_images and self.objective != "classification"

    @property
    def has_special_tokens(self) -> bool:
        """Whether 'bytes' and 'bpe' know more special tokens than the end of a document."""
        return self.objective != "causal_lm"

    @property
    def cache_path(self) -> Path:
        """The cache directory, resolved but not created."""
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "taibai"


def make_cache(config: DataConfig) -> None:
    """Makes the cache directory, if need be.

    Raises:
        ValueError: It cannot be made.
    """
    try:
        config.cache_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"data.cache_dir={config.cache_dir!r}: {config.cache_path} cannot be created "
            f"({error.strerror}); set data.cache_dir to a directory that you may write"
        ) from error
