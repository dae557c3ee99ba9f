"""Tokenizers of older models, which have files with their vocabulary instead of a tokenizer.json.

    vocab.json, merges.txt    a byte-level BPE: GPT-2, OPT, Phi, RoBERTa, BART, Qwen
    vocab.txt                 WordPiece: BERT

How texts are split before the vocabulary applies is not in these files; the class of the tokenizer
in `transformers` determines it.
"""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from data.text.tokenization.refusing import refusing
from data.text.tokenization.settings import TokenizerSettings, add_tokens, read_settings
from untrusted.documents import read_json
from untrusted.files import read_text
from untrusted.messages import shortened
from untrusted.schema import check

# The largest file of a tokenizer that is read. Large vocabularies need 35 MB.
MAX_FILE_BYTES = 2**28
# Real vocabularies have at most a few hundred thousand tokens; arrays are as long as a vocabulary.
MAX_VOCAB_SIZE = 2**24

#: How Qwen splits texts into words, numbers of one digit, and punctuation.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Classes that put a token before a pair of texts, two between them, and one after them.
_ROBERTA = ("BartTokenizer", "RobertaTokenizer")
_BYTE_LEVEL = ("CodeGenTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", *_ROBERTA)


def has_older_files(directory: Path) -> bool:
    """Return whether a directory has a tokenizer in one of the older formats."""
    return _has_merges(directory) or (directory / "vocab.txt").is_file()


def build_tokenizer(directory: Path) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """Build the tokenizer of a directory in an older format; return its other settings, too.

    Raises:
        ValueError: A file is damaged or leads out of the directory, or the class of the tokenizer
            is not supported.
        OSError: A file cannot be read.
    """
    has_merges = _has_merges(directory)
    default_class = "GPT2Tokenizer" if has_merges else "BertTokenizer"
    settings = read_settings(directory, within=directory, default_class=default_class)
    build = _byte_level_bpe if has_merges else _word_piece
    return build(directory, settings), settings


def _has_merges(directory: Path) -> bool:
    return all((directory / name).is_file() for name in ("vocab.json", "merges.txt"))


def _byte_level_bpe(directory: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    kind = settings.tokenizer_class
    _check_class(kind, _BYTE_LEVEL, "vocab.json and merges.txt")
    vocab = read_json(directory / "vocab.json", within=directory, max_bytes=MAX_FILE_BYTES)
    check(vocab, dict[str, int], "vocab.json")
    if not all(0 <= i < MAX_VOCAB_SIZE for i in vocab.values()):
        raise ValueError(f"vocab.json has token ids that are not from 0 to {MAX_VOCAB_SIZE - 1:,}")
    text = read_text(directory / "merges.txt", within=directory, max_bytes=MAX_FILE_BYTES)
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    with refusing("vocab.json and merges.txt do not fit each other", remedy="replace both"):
        merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    has_space = settings.flag("add_prefix_space", default=False)
    if kind == "Qwen2Tokenizer":
        words = pre_tokenizers.Split(tokenizers.Regex(_QWEN_WORDS), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=has_space, use_regex=False)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_space)
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens(tokenizer, settings)
    if kind in _ROBERTA:
        ends = [_special_token(tokenizer, settings, use) for use in ("sep", "cls")]
        trims = settings.flag("trim_offsets", default=True)
        tokenizer.post_processor = processors.RobertaProcessing(
            *ends, trim_offsets=trims, add_prefix_space=has_space
        )
    else:
        _add_template(tokenizer, settings)
    return tokenizer


def _add_template(tokenizer: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Let texts begin and end with special tokens if `add_bos_token` and `add_eos_token` say so."""
    ends = {
        use: _special_token(tokenizer, settings, use)
        for use in ("bos", "eos")
        if use in settings.named and settings.flag(f"add_{use}_token", default=False)
    }
    if not ends:
        return

    def around(text: str, number: int) -> list[str]:
        first = [f"{ends['bos'][0]}:{number}"] if "bos" in ends else []
        last = [f"{ends['eos'][0]}:{number}"] if "eos" in ends else []
        return [*first, f"{text}:{number}", *last]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("$A", 0),
        pair=[*around("$A", 0), *around("$B", 1)],
        special_tokens=[*dict.fromkeys(ends.values())],
    )


def _word_piece(directory: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    _check_class(settings.tokenizer_class, ("BertTokenizer",), "vocab.txt")
    text = read_text(directory / "vocab.txt", within=directory, max_bytes=MAX_FILE_BYTES)
    vocab = {line.rstrip(): i for i, line in enumerate(text.removesuffix("\n").split("\n"))}
    unknown = settings.named["unk"].content if "unk" in settings.named else "[UNK]"
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    strips_accents = settings.options.get("strip_accents")
    check(strips_accents, bool | None, "tokenizer_config.json: strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", default=True),
        strip_accents=strips_accents,
        lowercase=settings.flag("do_lower_case", default=True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    add_tokens(tokenizer, settings)
    cls = _special_token(tokenizer, settings, "cls")
    sep = _special_token(tokenizer, settings, "sep")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls[0]}:0 $A:0 {sep[0]}:0",
        pair=f"{cls[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1",
        special_tokens=[cls, sep],
    )
    return tokenizer


def _special_token(
    tokenizer: tokenizers.Tokenizer, settings: TokenizerSettings, use: str
) -> tuple[str, int]:
    """Return a special token that the vocabulary must have, and its id."""
    token = settings.named[use].content if use in settings.named else f"[{use.upper()}]"
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(
            f"the vocabulary lacks the {use}_token {shortened(token)!r}; correct "
            "tokenizer_config.json"
        )
    return token, token_id


def _check_class(kind: str, known: tuple[str, ...], files: str) -> None:
    if kind not in known:
        raise ValueError(
            f"tokenizer_class={shortened(kind)!r} in tokenizer_config.json or config.json cannot "
            f"be read from {files}, which is possible for {', '.join(known)}; write a "
            "tokenizer.json with transformers: AutoTokenizer.from_pretrained(DIR)"
            ".save_pretrained(DIR)"
        )
