"""Load a text corpus: find its documents, tokenize them, and build the rows of the objective."""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data.blend import parse_mixture
from data.cache import make_cache
from data.config import RECORD_OBJECTIVES, DataConfig
from data.examples import (
    CheckedExamples,
    ConcatExamples,
    Corpus,
    Examples,
    Label,
    NoExamples,
)
from data.mixture import sources
from data.sequences import ConcatDocuments
from data.text.chat.conversations import (
    EncodedChats,
    encode,
    end_of_answers,
    open_chats,
    texts_of_messages,
    validation_chats,
)
from data.text.chat.lines import ChatLines
from data.text.chat.template import ChatTemplate, load_template
from data.text.documents import Documents, find_corpus
from data.text.hub_tokenizer import local_tokenizer
from data.text.objectives.chat import ChatExamples
from data.text.objectives.labelled import ClassificationExamples, Seq2SeqExamples
from data.text.objectives.preference import PreferenceExamples
from data.text.objectives.registry import make_examples, num_tokens_needed
from data.text.records import (
    Records,
    check_known_labels,
    check_labels,
    scan,
    split_lines,
    texts_of_records,
    validation_lines,
)
from data.text.streaming.token_stream import TokenStream
from data.text.token_store import TokenStore, load_tokens
from data.text.tokenization.bpe import load_bpe
from data.text.tokenization.byte_tokenizer import ByteTokenizer
from data.text.tokenization.file_tokenizer import load_tokenizer_file
from data.text.tokenization.tokenizer import Tokenizer
from data.validation import naming_validation_paths, validation_sources


@dataclass(frozen=True, kw_only=True)
class TextCorpus(Corpus):
    """A tokenized corpus.

    For objectives that read a token stream, the train split contains only full rows.

    Attributes:
        chat_templates: name of a file of a tokenizer -> the chat template in it, for conversations.
        end_of_answers: id of the token that ends the answers in conversations; None without
            such a token.
    """

    tokenizer: Tokenizer
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    end_of_answers: int | None = None

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.tokenizer.vocab_size


def load_text(config: DataConfig) -> TextCorpus:
    """Load a tokenized corpus, which is built on first use and cached.

    Raises:
        ValueError: The corpus or the tokenizer is unknown, broken or unsuitable for the objective,
            or the corpus is too small for one row.
        FileNotFoundError: A glob matches nothing, or a token file or the tokenizer file does not
            exist.
    """
    if config.objective in ("chat", "preference"):
        return _load_chat(config)
    if config.objective in RECORD_OBJECTIVES:
        return _load_records(config)
    return _load_streamed(config) if config.streaming else _load_stores(config)


def load_validation_text(config: DataConfig, labels: tuple[Label, ...]) -> TextCorpus:
    """Load only the validation sets that the config names, without training data.

    Args:
        config: config section `data`; its tokenizer does not need to be trained.
        labels: labels that the model has learned.

    Raises:
        ValueError: A set or the tokenizer is broken, or a set has no row.
        FileNotFoundError: A glob matches nothing, or the tokenizer file does not exist.
    """
    make_cache(config)
    tokenizer = load_fixed_tokenizer(config)
    assert tokenizer is not None, config.tokenizer
    if config.objective in ("chat", "preference"):
        template = _template(config, tokenizer)
        encoded = _encoded_sets(validation_chats(config), template, tokenizer, config)
        sets = _chat_rows(encoded, config)
    elif config.objective in RECORD_OBJECTIVES:
        sets = _record_rows(_validation_records(config), labels, config, tokenizer)
    else:
        sets = _stream_rows(_find_validation(config), config, tokenizer)
    corpus = TextCorpus(
        tokenizer=tokenizer,
        train=NoExamples(),
        validation=NoExamples(),
        fingerprint="",
        labels=labels,
    )
    return corpus.with_validation(sets)


def load_stores(config: DataConfig) -> tuple[Tokenizer, list[TokenStore]]:
    """Load the tokenizer, and the tokens of each source, for an objective in STREAM_OBJECTIVES.

    Returns:
        The tokenizer, and one store per source of the mixture (one if the corpus is no mixture).

    Raises:
        ValueError: A source or the tokenizer is unknown or broken.
        FileNotFoundError: A glob matches nothing, or a token file or the tokenizer file does not
            exist.
    """
    tokenizer, corpora = _find_streams(config)
    directory = config.cache_path
    return tokenizer, [load_tokens(corpus, tokenizer, directory=directory) for corpus in corpora]


def _find_streams(config: DataConfig) -> tuple[Tokenizer, list[Documents]]:
    """Find the documents of each source, and load the tokenizer or train it on them."""
    make_cache(config)
    # A tokenizer file is checked before a corpus is downloaded or read.
    tokenizer = load_fixed_tokenizer(config)
    corpora = [find_corpus(source) for source in sources(config)]
    corpora = [replace(corpus, open=functools.cache(corpus.open)) for corpus in corpora]
    tokenizer = tokenizer or train_bpe(
        config,
        "\0".join(corpus.key for corpus in corpora),
        lambda: ConcatDocuments([corpus.open()["train"] for corpus in corpora]),
    )
    return tokenizer, corpora


def _load_streamed(config: DataConfig) -> TextCorpus:
    make_cache(config)
    tokenizer = load_fixed_tokenizer(config)
    assert tokenizer is not None, config.tokenizer
    sets = _stream_rows(_find_validation(config), config, tokenizer)
    stream = TokenStream(config, tokenizer)
    corpus = TextCorpus(
        tokenizer=tokenizer,
        train=NoExamples(),
        validation=NoExamples(),
        fingerprint=stream.fingerprint,
        stream=stream,
    )
    return corpus.with_validation(sets)


def _load_stores(config: DataConfig) -> TextCorpus:
    found = _find_validation(config)  # first, so that a missing file is found at once
    tokenizer, corpora = _find_streams(config)
    sets = _stream_rows(found, config, tokenizer)
    stores = [load_tokens(each, tokenizer, directory=config.cache_path) for each in corpora]
    parts = [
        _make_corpus(store, each, tokenizer)
        for store, each in zip(stores, sources(config), strict=True)
    ]
    corpus = parts[0] if config.name != "mixture" else _mix(parts, config)
    return corpus.with_validation(sets) if sets else corpus


def _find_validation(config: DataConfig) -> dict[str, Documents]:
    """Find the documents of each validation set that the config names, which has at least one."""
    with naming_validation_paths():
        corpora = {}
        for name, source in validation_sources(config).items():
            corpus = find_corpus(source)
            corpora[name] = replace(corpus, open=functools.cache(corpus.open))
            corpora[name].open()
        return corpora


def _stream_rows(
    corpora: Mapping[str, Documents], config: DataConfig, tokenizer: Tokenizer
) -> dict[str, Examples]:
    """Tokenize validation sets, and return the rows of each."""
    rows = {}
    for name, corpus in corpora.items():
        with naming_validation_paths():
            store = load_tokens(corpus, tokenizer, directory=config.cache_path)
        tokens = store.splits["train"]
        rows[name] = make_examples(tokens, config, tokenizer, keep_partial=True)
        if store.damage is not None:
            rows[name] = CheckedExamples(rows[name], store.damage.check)
    return _with_rows(rows, config)


def _with_rows(sets: dict[str, Examples], config: DataConfig) -> dict[str, Examples]:
    """Return validation sets, after a check that each has a row."""
    for name, rows in sets.items():
        if not len(rows):
            which = f"the set {name!r}" if name else "the set"
            key = "validation_splits" if config.validation_splits else "validation_paths"
            raise ValueError(
                f"data.{key}={getattr(config, key)!r}: {which} is too short for one "
                f"row of data.objective={config.objective!r} with data.sequence_length="
                f"{config.sequence_length}; add data, or leave it out"
            )
    return sets


def _make_corpus(store: TokenStore, config: DataConfig, tokenizer: Tokenizer) -> TextCorpus:
    train, validation = (
        make_examples(store.splits[split], config, tokenizer, keep_partial=split != "train")
        for split in ("train", "validation")
    )
    if len(train) == 0:
        raise ValueError(
            f"data.sequence_length={config.sequence_length} needs {num_tokens_needed(config)} "
            f"tokens for one sequence, but the train split of data.name={config.name!r} has only "
            f"{len(store.splits['train'])}; reduce data.sequence_length or add text"
        )
    if store.damage is not None:
        train = CheckedExamples(train, store.damage.check)
        validation = CheckedExamples(validation, store.damage.check)
    return TextCorpus(
        tokenizer=tokenizer, train=train, validation=validation, fingerprint=store.fingerprint
    )


def _mix(parts: Sequence[TextCorpus], config: DataConfig) -> TextCorpus:
    shares = [share for share, _ in parse_mixture(config.mixture)]
    keyed = " ".join(map(str, [*shares, *(part.fingerprint for part in parts)]))
    return TextCorpus(
        tokenizer=parts[0].tokenizer,
        train=ConcatExamples([part.train for part in parts]),
        validation=ConcatExamples([part.validation for part in parts]),
        fingerprint=hashlib.sha256(keyed.encode()).hexdigest(),
    )


def _load_records(config: DataConfig) -> TextCorpus:
    make_cache(config)
    tokenizer = load_fixed_tokenizer(config)
    named = _validation_records(config)
    splits = {split: Records(spans, config) for split, spans in split_lines(config).items()}
    fingerprint, labels_by_split = scan(splits)
    tokenizer = tokenizer or train_bpe(
        config, f"records {fingerprint}", lambda: texts_of_records(splits["train"])
    )
    labels: tuple[Label, ...] = ()
    if config.objective == "classification":
        labels = check_labels(labels_by_split, splits, config)
    keyed = f"{fingerprint} {tokenizer.fingerprint}"
    train, validation = (_rows(each, labels, config, tokenizer) for each in splits.values())
    corpus = TextCorpus(
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        fingerprint=hashlib.sha256(keyed.encode()).hexdigest(),
        labels=labels,
    )
    sets = _record_rows(named, labels, config, tokenizer)
    return corpus.with_validation(sets) if sets else corpus


def _rows(
    records: Records, labels: tuple[Label, ...], config: DataConfig, tokenizer: Tokenizer
) -> Examples:
    if config.objective == "classification":
        return ClassificationExamples(records, labels, config, tokenizer)
    return Seq2SeqExamples(records, config, tokenizer)


def _validation_records(config: DataConfig) -> dict[str, Records]:
    lines = validation_lines(config)
    return {name: Records(spans, config) for name, spans in lines.items()}


def _record_rows(
    sets: Mapping[str, Records],
    labels: tuple[Label, ...],
    config: DataConfig,
    tokenizer: Tokenizer,
) -> dict[str, Examples]:
    """Read and check the lines of validation sets, and return the rows of each."""
    with naming_validation_paths():
        for records in sets.values():
            _, of_set = scan({"validation": records})
            check_known_labels(of_set["validation"], records, labels)
    return {name: _rows(each, labels, config, tokenizer) for name, each in sets.items()}


def _load_chat(config: DataConfig) -> TextCorpus:
    make_cache(config)
    tokenizer = load_fixed_tokenizer(config)
    if tokenizer is not None:  # a missing template is found before the data is read
        _template(config, tokenizer)
    named = validation_chats(config)
    splits = open_chats(config)
    tokenizer = tokenizer or train_bpe(
        config,
        f"chat {hashlib.sha256(repr([*splits['train']]).encode()).hexdigest()}",
        lambda: texts_of_messages(splits["train"]),
    )
    template = _template(config, tokenizer)
    encoded_sets = _encoded_sets(named, template, tokenizer, config)
    encoded = [encode(split, template, tokenizer, config) for split in splits.values()]
    train, validation = (_packed(chats, config) for chats in encoded)
    if not len(train):
        raise ValueError(
            f"data.paths: none of the {len(splits['train'])} lines for training has a token that "
            f"is learned, beginning with {splits['train'].spans.place_of(0)}; increase "
            f"data.sequence_length={config.sequence_length} if it cuts off the answers, add the "
            "answers that are missing, or let {% generation %} in data.chat_template contain them"
        )
    digests = [chats.digest for chats in encoded]
    if config.objective == "preference":  # the file of its reference has rows of these sets
        digests += [chats.digest for chats in encoded_sets.values()]
    keyed = " ".join([*digests, tokenizer.fingerprint])
    corpus = TextCorpus(
        tokenizer=tokenizer,
        chat_templates=template.files,
        end_of_answers=end_of_answers(template, tokenizer),
        train=train,
        validation=validation,
        fingerprint=hashlib.sha256(keyed.encode()).hexdigest(),
    )
    sets = _chat_rows(encoded_sets, config)
    return corpus.with_validation(sets) if sets else corpus


def _template(config: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    path = None
    if config.tokenizer not in ("bytes", "bpe"):
        path = Path(local_tokenizer(config.tokenizer)).expanduser()
    return load_template(config.chat_template, path, tokenizer.decode([tokenizer.eos_id]))


def _packed(chats: EncodedChats, config: DataConfig) -> ChatExamples | PreferenceExamples:
    rows = ChatExamples if config.objective == "chat" else PreferenceExamples
    return rows(chats, config.sequence_length, best_fit=config.packing == "best_fit")


def _encoded_sets(
    sets: Mapping[str, ChatLines], template: ChatTemplate, tokenizer: Tokenizer, config: DataConfig
) -> dict[str, EncodedChats]:
    """Encode the conversations of validation sets."""
    with naming_validation_paths():
        return {name: encode(each, template, tokenizer, config) for name, each in sets.items()}


def _chat_rows(sets: Mapping[str, EncodedChats], config: DataConfig) -> dict[str, Examples]:
    """Return the rows of validation sets."""
    return _with_rows({name: _packed(chats, config) for name, chats in sets.items()}, config)


def load_fixed_tokenizer(config: DataConfig) -> Tokenizer | None:
    """Load a tokenizer that does not depend on the corpus; None if it has to be trained on it.

    Raises:
        FileNotFoundError: The tokenizer file does not exist.
        ValueError: The tokenizer file is broken, or the Hugging Face hub has no such tokenizer.
        ConnectionError: The hub cannot be reached, and the cache does not have the tokenizer.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer(has_special_tokens=config.has_special_tokens)
    if config.tokenizer == "bpe":
        return None
    return load_tokenizer_file(local_tokenizer(config.tokenizer))


def train_bpe(
    config: DataConfig, corpus_key: str, open_documents: Callable[[], Sequence[str]]
) -> Tokenizer:
    """Return the tokenizer `bpe` of a corpus, which is trained on first use.

    Args:
        config: config section `data`.
        corpus_key: string that changes whenever the documents change.
        open_documents: returns the documents of the train split.
    """
    key = hashlib.sha256(corpus_key.encode()).hexdigest()[:16]
    kind = "-special" if config.has_special_tokens else ""
    return load_bpe(
        open_documents,
        config.cache_path / f"bpe-{config.vocab_size}-{key}{kind}.json",
        config.vocab_size,
        has_special_tokens=config.has_special_tokens,
    )
