"""The config section `data`: the corpus, the objective, the tokenizer, and the batch shape."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.batch_sizes import BatchSizes, check_rampup
from data.blend import parse_mixture, weighted_token_files
from data.checks import require
from data.named_paths import check_entry, named_paths
from fields.field import field
from fields.paths import cache_path, check_local
from fields.section import Section

#: The training objectives; docs/data.md describes them.
STREAM_OBJECTIVES = ("causal_lm", "masked_lm", "masked_lm_pairs", "span_corruption")
RECORD_OBJECTIVES = ("seq2seq", "classification", "chat", "preference")
IMAGE_OBJECTIVES = (
    "image_classification",
    "image_reconstruction",
    "image_contrast",
    "image_text",
)
OBJECTIVES = (*STREAM_OBJECTIVES, *RECORD_OBJECTIVES, *IMAGE_OBJECTIVES)
# Values of `name` other than TFDS data sets and import paths of functions, for text and for images.
_TEXT_NAMES = ("python_stdlib", "text", "megatron", "mixture")
_IMAGE_NAMES = ("digits", "image_folder")
#: Values of `name` that are not a TFDS set; python_stdlib and digits are sets of this project.
NOT_TFDS = ("text", "megatron", "mixture", "image_folder")
# Fields that are read only for text. TFDS data sets of images have labels too.
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
# Those of them that captions of images need.
_CAPTION_FIELDS = ("text_field", "tokenizer", "vocab_size", "sequence_length")
# Fields that only some objectives read -> these objectives.
_READ_WITH = {
    "isolate_documents": ("causal_lm", "masked_lm"),
    "packing": ("causal_lm", "chat", "preference"),
    "whole_words": ("masked_lm", "masked_lm_pairs"),
    "target_length": ("span_corruption", "seq2seq"),
    "pair_field": ("classification",),
    "messages_field": ("chat",),
    "preference_fields": ("preference",),
    "chat_template": ("chat", "preference"),
}
# Fields that restrict `streaming` -> the values that it supports, and why.
_STREAMED = (
    ("name", ("text",), "which reads files of text"),
    (
        "objective",
        ("causal_lm", "masked_lm", "span_corruption"),
        "which cuts a row out of a given number of tokens",
    ),
    ("packing", ("in_order",), "which cannot choose between all documents"),
    ("verify", ("times",), "because it would read all files at each start"),
)
# The shortest sequence that has room for the special tokens and for one token of each text.
_SHORTEST = {
    "masked_lm": 3,
    "masked_lm_pairs": 6,
    "span_corruption": 3,
    "seq2seq": 2,
    "classification": 3,
    "image_text": 3,
}
# 256 bytes, the end of a document, and 104 more (data/text/tokenization/special_tokens.py).
_MIN_VOCAB_SIZE_WITH_SPECIAL = 361


def _name(default: str, doc: str, **rules: Any) -> Any:
    """Declare a string that must not be empty."""
    return field(default, doc, nonempty=True, remedy=f"the default is {default!r}", **rules)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, section="data"):
    """The corpus, the objective, the tokenizer of texts, and the shape of the batches.

    See docs/data.md.
    """

    name: str = _name(
        "python_stdlib",
        "Name of the corpus. For text: `python_stdlib` (the sources of this machine's Python), "
        "`text` (the files of `paths`), `megatron` (the token files of `paths`), `mixture` "
        "(several of these), a TFDS name such as `wiki40b/en`, or `package.module:function`, a "
        "function that returns `{'train': documents, 'validation': documents}`, each a sequence of "
        "str. For images: `digits` (scikit-learn's handwritten digits), `image_folder` (the "
        "folders of `paths`), a TFDS name such as `cifar10`, or a function that returns sequences "
        "of (image, label).",
    )
    paths: tuple[str, ...] = field(
        (),
        "Files or folders of the corpus. For `name=text`: globs of .txt, .jsonl, .json, .csv, "
        ".tsv, .parquet and .arrow files, such as `my_texts/*.txt,more.jsonl`, or folders that "
        "`datasets` has saved; .txt and .jsonl files may be compressed (.gz, .zst). "
        "Each .jsonl line, object of a .json list or row of a table is one document; a .txt file "
        "is cut at line ends into documents of about 32 KiB. For `name=megatron`: paths or globs "
        "of token files without the suffixes .bin and .idx, or a mixture in Megatron's spelling, "
        "`0.7 a 0.3 b`. "
        "For `name=image_folder`: one folder, which contains either a folder of images per class "
        "or train/ and val/ folders of that kind; or two folders, the second for validation. Or "
        "tables, as for `name=text`, or WebDataset's .tar files. For `image_text`: such folders "
        "without classes, with a metadata.jsonl in each. Each may be on the Hugging Face hub, "
        "`hf://datasets/OWNER/NAME[@REVISION][/PATH]`, or at a URL, such as `s3://bucket/*.txt`.",
        nonempty=True,
        remedy="write for example ('my_texts/*.txt',)",
    )
    split: str = _name(
        "train",
        "Split to train on, of a TFDS set or of an entry of `paths` that is a saved `DatasetDict`.",
    )
    validation_paths: tuple[str, ...] = field(
        (),
        "Files or folders to evaluate on, as for `paths`; nothing is then held out of the training "
        "data. `NAME=PATH` evaluates on several sets at once, each with metrics of its own such as "
        "`eval_NAME_loss`: `wiki=wiki/*.jsonl,code=code.txt`. A path that begins like a name is "
        "written with `./` in front. Images: one folder or glob per set.",
        nonempty=True,
        remedy="write for example ('held_out/*.txt',) or ('wiki=wiki/*.txt', 'code=code/*.txt')",
    )
    validation_splits: tuple[str, ...] = field(
        (),
        "Splits of them to evaluate on. Several have metrics of their own, such as "
        "`eval_test_loss`. Empty: `validation`, if there is one.",
        nonempty=True,
        remedy="write for example ('validation', 'test')",
    )
    mixture: tuple[str, ...] = field(
        (),
        "For `name=mixture`: entries `WEIGHT SOURCE`, such as `0.7 wiki40b/en,0.3 my_texts/*.txt`. "
        "A source is a name as above, a glob of files as in `paths`, or the .bin file of a token "
        "file.",
        nonempty=True,
        remedy="write for example ('0.7 wiki40b/en',)",
    )
    text_field: str = _name(
        "text",
        "Field of a .jsonl line or of a table's row, or feature of a TFDS data set, that contains "
        "the text. For `image_text`: field of a line of metadata.jsonl that contains the caption.",
    )
    objective: str = field(
        "causal_lm",
        "Training objective, which defines the batches. Objectives for images begin with "
        "`image_`. `seq2seq` and `classification` read each .jsonl line as one example.",
        choices=OBJECTIVES,
    )
    isolate_documents: bool = field(
        False,
        "For `causal_lm` and `masked_lm`: tokens attend only within their own document, and "
        "positions restart in each.",
    )
    packing: str = field(
        "in_order",
        "How texts fill the rows of `causal_lm`, `chat` and `preference`. `in_order`: one after "
        "another; `causal_lm` cuts documents at the ends of rows. `best_fit`: each into the "
        "fullest row with room for it, so that few tokens are padding, and no document is cut that "
        "is not longer than a row.",
        choices=("in_order", "best_fit"),
    )
    mask_fraction: float = field(
        0.15,
        "For the masked_lm objectives and `span_corruption`: fraction of tokens to mask and "
        "predict.",
        gt=0,
        lt=1,
        remedy="choose for example 0.15",
    )
    whole_words: bool = field(
        False, "For the masked_lm objectives: mask either all tokens of a word or none of them."
    )
    mean_span_length: float = field(
        3.0,
        "For `span_corruption`: mean length of a span in tokens.",
        ge=1,
        remedy="choose for example 3",
    )
    target_length: int | None = field(
        None,
        "Length of the decoder's sequence in tokens. None: as many as the spans need "
        "(`span_corruption`), or `sequence_length` (`seq2seq`).",
        ge=2,
        remedy="leave it None for the default",
    )
    target_field: str = _name(
        "target", "For `seq2seq`: field of a .jsonl line that contains the target text."
    )
    pair_field: str | None = field(
        None,
        "For `classification`: field that contains the second text. None: examples have a single "
        "text.",
        nonempty=True,
        remedy="None if examples have a single text",
    )
    label_field: str = _name(
        "label",
        "For `classification`: field that contains the label, a str or an int. For a TFDS data set "
        "of images: feature that contains it.",
    )
    messages_field: str = _name(
        "messages", "For `chat`: field with the messages, each with `role` and `content`."
    )
    preference_fields: tuple = field(
        ("prompt", "chosen", "rejected"),
        "For `preference`: fields of the prompt, if there is one, of the better and other answer.",
        length=3,
        nonempty=True,
    )
    chat_template: str = field(
        "",
        "For `chat` and `preference`: path of a Jinja file that turns messages into text, or "
        "`roles` for a simple one. Empty: the template of the tokenizer.",
        is_path=True,
    )
    tokenizer: str = _name(
        "bpe",
        "Tokenizer: `bytes`, `bpe` (trained on the train split on first use, then cached), the "
        "path of a tokenizer.json, `OWNER/NAME[@REVISION]` for the tokenizer of a model on the "
        "Hugging Face hub, or `init_from` for the tokenizer of the checkpoint.",
        is_path=True,
    )
    vocab_size: int = field(
        8192,
        "Vocabulary size of the `bpe` tokenizer, including special tokens. Other tokenizers have "
        "their own size.",
        ge=257,
        le=2**24,
        remedy="it includes 256 bytes and the end-of-document token; choose for example 8192",
    )
    sequence_length: int = field(
        128,
        "Length of a sequence in tokens (T); the encoder's, if there is one. 0: the longest that "
        "the model of `init_from` supports, but at most 4096.",
        ge=0,
    )
    global_batch_size: int = field(
        16,
        "Sequences or images per step, summed over all devices, processes and microbatches.",
        ge=1,
        required=True,
    )
    rampup_batch_size: tuple[int, ...] = field(
        (),
        "Batch-size ramp-up, `START,INCREMENT,EXAMPLES`: steps begin with START examples, and the "
        "size grows by INCREMENT, evenly over the first EXAMPLES examples of the run, until it is "
        "`global_batch_size`. A smaller batch has as few microbatches as it can without larger "
        "ones. `()`: all batches have the same size.",
        length=3,
        ge=1,
        also=((),),
        remedy="write for example 16,16,100000, or () for batches of the same size",
    )
    validation_fraction: float = field(
        0.05,
        "Fraction of documents or images held out for validation if the corpus has no validation "
        "split of its own and `validation_paths` is empty; 0: none.",
        ge=0,
        lt=1,
        remedy="choose for example 0.05",
    )
    verify: str = field(
        "times",
        "How to detect that files of `paths` have changed since they were tokenized, or since the "
        "run was last started. `times`: compare their sizes and modification times (for images: "
        "their sizes). `full`: read all files at every start and compare digests.",
        choices=("times", "full"),
    )
    cache_dir: str = field(
        "",
        "Directory of built data sets, trained tokenizers, tokenized corpora and compiled steps. "
        "Empty: `$XDG_CACHE_HOME/taibai`, or `~/.cache/taibai`.",
        is_path=True,
    )
    num_threads: int = field(
        2, "Number of threads per process that read batches ahead of the step.", ge=1, le=1024
    )

    streaming: bool = field(
        False,
        "For `name=text`: fetch and tokenize the files of `paths` while the run reads them, and "
        "delete them again, for text that is larger than the disk. Files are read in a shuffled "
        "order.",
    )
    cache_gb: float = field(
        50.0,
        "For `streaming`: largest size of files and tokens in `cache_dir`, in 10^9 bytes. The "
        "tokens used longest ago are deleted first.",
        gt=0,
        le=1e6,
        remedy="choose for example 50",
    )
    shuffle_window: int = field(
        8192,
        "For `streaming`: number of sequences that are shuffled with each other. They are in "
        "memory.",
        ge=1,
        le=2**24,
    )
    num_workers: int = field(
        2,
        "For `streaming`: processes, of each process of the run, that tokenize files. As many "
        "files are fetched ahead of their use.",
        ge=1,
        le=1024,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        weighted = weighted_token_files(self.paths) if self.name == "megatron" else ()
        if weighted:
            self._set("name", "mixture")
            self._set("mixture", weighted)
            self._set("paths", ())
        self._check_sources()
        self._check_objective()
        self._check_lengths()
        if self.streaming:
            self._check_streaming()
        check_rampup(self.global_batch_size, self.rampup_batch_size)

    def _check_sources(self) -> None:
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
        for _, source in parse_mixture(self.mixture):
            check_local("data.mixture: the source", source)
        for path in self.paths:
            check_entry("data.paths", path)
        named_paths(self.validation_paths)
        require(
            not (self.validation_paths and self.validation_splits),
            f"data.validation_paths={self.validation_paths!r} and data.validation_splits="
            f"{self.validation_splits!r} both name data to evaluate on; set one of them, for "
            "example the folders of the splits in data.validation_paths",
        )

    def _check_objective(self) -> None:
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
        require(
            self.objective != "image_text" or self.name == "image_folder",
            "data.objective='image_text' reads captions from metadata.jsonl in a folder of images, "
            f"but data.name={self.name!r}; set data.name='image_folder' and "
            "data.paths=('my_folder',)",
        )
        read = _CAPTION_FIELDS if self.reads_text else ()
        for key in _TEXT_FIELDS if self.reads_images else ():
            if key in read:
                continue
            value = getattr(self, key)
            default = getattr(DataConfig, key)
            require(
                value == default,
                f"data.{key}={value!r} is read only for texts, but data.objective="
                f"{self.objective!r} reads images; set data.{key}={default!r}",
            )

    def _check_lengths(self) -> None:
        require(
            self.sequence_length > 0,
            "data.sequence_length=0 stands for the length of the model of init_from, which is not "
            "set; set init_from, or a length such as data.sequence_length=1024",
        )
        shortest = 6 if self.pair_field else _SHORTEST.get(self.objective, 1)
        require(
            self.sequence_length >= shortest,
            f"data.sequence_length={self.sequence_length} must be at least {shortest} with "
            f"data.objective={self.objective!r}, to hold special tokens and text; increase it",
        )
        require(
            not (self.tokenizer == "bpe" and self.has_special_tokens)
            or self.vocab_size >= _MIN_VOCAB_SIZE_WITH_SPECIAL,
            f"data.vocab_size={self.vocab_size} must be at least {_MIN_VOCAB_SIZE_WITH_SPECIAL} "
            f"with data.objective={self.objective!r} (256 bytes and 105 special tokens); "
            "choose for example 8192",
        )

    def _check_streaming(self) -> None:
        for key, values, reason in _STREAMED:
            value = getattr(self, key)
            require(
                value in values,
                f"data.{key}={value!r} cannot be combined with data.streaming=True, {reason}; set "
                f"data.{key}={' or '.join(map(repr, values))}, or data.streaming=False",
            )
        require(
            self.tokenizer != "bpe",
            "data.tokenizer='bpe' is trained on all texts, which data.streaming=True never has at "
            "once; set data.tokenizer to a tokenizer.json, OWNER/NAME or 'bytes'",
        )
        require(
            self.validation_paths or self.validation_splits or not self.validation_fraction,
            f"data.validation_fraction={self.validation_fraction} cannot be held out with "
            "data.streaming=True, which never has all texts at once; set data.validation_paths, or "
            "data.validation_fraction=0 to evaluate on nothing",
        )

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch sizes of all steps."""
        return BatchSizes.of(self.global_batch_size, self.rampup_batch_size)

    @property
    def reads_images(self) -> bool:
        """Whether the objective trains on images."""
        return self.objective in IMAGE_OBJECTIVES

    @property
    def reads_text(self) -> bool:
        """Whether the objective trains on texts, maybe together with images."""
        return not self.reads_images or self.objective == "image_text"

    @property
    def validation_names(self) -> tuple[str, ...]:
        """The names of the validation sets; a single set without a name has the name ""."""
        if self.validation_paths:
            return tuple(named_paths(self.validation_paths))
        return self.validation_splits if len(self.validation_splits) > 1 else ("",)

    @property
    def held_out_fraction(self) -> float:
        """Fraction of the training data to hold out; 0 if there is other data to evaluate on."""
        return 0.0 if self.names_validation else self.validation_fraction

    @property
    def names_validation(self) -> bool:
        """Whether the config names the data to evaluate on, files or splits."""
        return bool(self.validation_paths or self.validation_splits)

    @property
    def has_labels(self) -> bool:
        """Whether the objective learns the labels of its examples."""
        return self.objective in ("classification", "image_classification")

    @property
    def has_perplexity(self) -> bool:
        """Whether the loss is a mean over tokens, so that its exponential is a perplexity."""
        return not self.reads_images and self.objective not in ("classification", "preference")

    @property
    def has_special_tokens(self) -> bool:
        """Whether 'bytes' and 'bpe' have special tokens other than the end of a document."""
        return self.objective not in ("causal_lm", "chat", "preference")

    @property
    def cache_path(self) -> Path:
        """The cache directory, with `~` expanded; this does not create it."""
        return cache_path(self.cache_dir)
