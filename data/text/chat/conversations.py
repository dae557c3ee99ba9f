"""Conversations in .jsonl files and tables, as tokens and a mark for each that is learned.

The lines are parsed in lines.py.
"""

import collections
import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.cache import read_array, write_array
from data.config import DataConfig
from data.sequences import LazySequence
from data.text.chat.lines import ChatLines, Conversations, Preferences
from data.text.chat.rendering import Span
from data.text.chat.template import ChatTemplate, Dialogue, Rendered
from data.text.records import split_lines, validation_lines
from data.text.spans import DocumentSpans
from data.text.tokenization.tokenizer import Tokenizer
from untrusted.cached import locked

_log = logging.getLogger(__name__)

#: Increase this when conversations are encoded in another way.
_REVISION = 3
#: Limits of one call that renders: large enough to hide its overhead, but small in memory.
_BATCH_LINES = 64
_BATCH_BYTES = 2**20


def texts_of_messages(lines: ChatLines) -> Sequence[str]:
    """Return the contents of each line's messages as one document, to train a tokenizer on."""

    def read(index: int) -> str:
        messages = (message for each in lines[index] for message in each.messages)
        return "\n".join(message.get("content") or "" for message in messages)

    return LazySequence(len(lines), read)


@dataclass(frozen=True, kw_only=True)
class EncodedChats:
    """The tokens of conversations, one after another.

    Attributes:
        tokens: int32[number of tokens].
        is_learned: bool[number of tokens], whether the assistant says the token.
        ends: int64[number of conversations], the end of each among the tokens.
    """

    tokens: np.ndarray
    is_learned: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start = self.ends[index - 1] if index else 0
        part = slice(start, self.ends[index])
        return self.tokens[part], self.is_learned[part]

    @property
    def digest(self) -> str:
        """A hash of everything."""
        digest = hashlib.sha256(self.tokens.tobytes())
        digest.update(self.is_learned.tobytes())
        digest.update(self.ends.tobytes())
        return digest.hexdigest()


def open_chats(config: DataConfig) -> dict[str, ChatLines]:
    """Split the lines of `data.paths` into train and validation, without parsing them.

    Args:
        config: config section `data`, with the objective "chat" or "preference".

    Raises:
        FileNotFoundError: A glob matches nothing.
        ValueError: A file is of another kind, or there are too few lines for the splits.
    """
    return _as_chats(split_lines(config), config)


def validation_chats(config: DataConfig) -> dict[str, ChatLines]:
    """Return the conversations of each set of `data.validation_paths`, by its name."""
    return _as_chats(validation_lines(config), config)


def _as_chats(lines: Mapping[str, DocumentSpans], config: DataConfig) -> dict[str, ChatLines]:
    of_objective = Conversations if config.objective == "chat" else Preferences
    announced: set[str] = set()
    return {name: of_objective(spans, config, announced) for name, spans in lines.items()}


def encode(
    lines: ChatLines, template: ChatTemplate, tokenizer: Tokenizer, config: DataConfig
) -> EncodedChats:
    """Encode conversations, line by line; those that are too long for their share of a row are cut.

    The result is cached. A line is left out if nothing learned is left of one of its conversations.

    Raises:
        ValueError: A conversation is not valid, or the template refuses it.
    """
    digest = hashlib.sha256(f"{_REVISION} {config.sequence_length}\0".encode())
    for part in (template.key, tokenizer.fingerprint, *map(repr, lines)):
        digest.update(f"{part}\0".encode("utf-8", "replace"))
    name = config.cache_path / f"chat-{digest.hexdigest()[:24]}"
    with locked(name):
        # Each token is 2 × its id, plus 1 if it is learned.
        marked = read_array(Path(f"{name}-tokens.npy"))
        ends = read_array(Path(f"{name}-ends.npy"))
        if marked is None or ends is None:
            max_tokens = config.sequence_length // lines.num_dialogues + 1
            parts = [*_encode_lines(lines, template, tokenizer, max_tokens)]
            marked = np.concatenate([np.zeros(0, np.int64), *parts])
            ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
            write_array(Path(f"{name}-tokens.npy"), marked)
            write_array(Path(f"{name}-ends.npy"), ends)
    return EncodedChats(
        tokens=(marked >> 1).astype(np.int32),
        is_learned=(marked & 1).astype(bool),
        ends=_without_lost(ends, lines, config),
    )


def _without_lost(ends: np.ndarray, lines: ChatLines, config: DataConfig) -> np.ndarray:
    """Return the ends of the conversations that are not empty, and warn about lines left out.

    Args:
        ends: int64[number of conversations], ends of all conversations.
    """
    sizes = np.diff(ends, prepend=0)
    lost = np.flatnonzero(sizes[:: lines.num_dialogues] == 0)
    if len(lost):
        _log.warning(
            "%d of %d lines are left out, because no token of an answer is learned: it is empty, "
            "data.sequence_length=%d cuts it off, or {%% generation %%} of the chat template does "
            "not contain it; the first is %s",
            len(lost),
            len(lines),
            config.sequence_length,
            lines.spans.place_of(int(lost[0])),
        )
    return ends[sizes > 0]


def end_of_answers(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that the assistant ends its answers with.

    Returns:
        The id of the first special token after an answer's content; None if there is none, or the
        template refuses one question and answer.
    """
    answer = "Answer."
    messages = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": answer}]
    try:
        rendered = template.learned(Dialogue(messages))
    except ValueError:
        return None
    places = (rendered.text.find(answer, start, stop) for start, stop in rendered.spans)
    place = next((each for each in places if each >= 0), None)
    if place is None:
        return None
    ids, offsets = tokenizer.encode_with_offsets(rendered.text)
    # The token may be in another part than the content, if the template marks several parts.
    end = place + len(answer)
    follows = _is_within(offsets, [(max(start, end), stop) for start, stop in rendered.spans])
    ends = ids[follows & ~tokenizer.is_text()[ids]]
    return int(ends[0]) if len(ends) else None


def _encode_lines(
    lines: ChatLines, template: ChatTemplate, tokenizer: Tokenizer, max_tokens: int
) -> Iterator[np.ndarray]:
    """Yield 2 × id + is_learned for the tokens of each conversation, at most `max_tokens`.

    The conversations of a line are empty if nothing is learned of one of them.
    """
    num_cut = 0
    for rendered in _render_lines(lines, template):
        arrays = []
        sizes = []
        for each in rendered:
            ids, offsets = tokenizer.encode_with_offsets(each.text)
            sizes.append(len(ids))
            arrays.append(
                2 * ids[:max_tokens].astype(np.int64) + _is_within(offsets[:max_tokens], each.spans)
            )
        num_cut += max(sizes) > max_tokens
        is_learned = all((marked[1:] & 1).any() for marked in arrays)
        yield from arrays if is_learned else [np.zeros(0, np.int64)] * len(arrays)
    if num_cut:
        _log.warning(
            "%d of %d lines have conversations of more than %d tokens, which are cut",
            num_cut,
            len(lines),
            max_tokens,
        )


def _render_lines(lines: ChatLines, template: ChatTemplate) -> Iterator[list[Rendered]]:
    """Yield the texts of each line, while a thread has the next lines rendered.

    Raises:
        ValueError: The template refuses a conversation; the message names the line.
    """
    with ThreadPoolExecutor(1, "chats") as thread:
        ahead: collections.deque[tuple[range, Future[list[Rendered | ValueError]]]]
        ahead = collections.deque()
        for numbers in _batches(lines):
            dialogues = [each for number in numbers for each in lines[number]]
            ahead.append((numbers, thread.submit(template.learned_of_all, dialogues)))
            if len(ahead) > 1:
                yield from _of_lines(lines, *ahead.popleft())
        for batch in ahead:
            yield from _of_lines(lines, *batch)


def _batches(lines: ChatLines) -> Iterator[range]:
    """Yield the numbers of lines that are rendered together, in order."""
    first = size = 0
    for number in range(len(lines)):
        size += lines.spans.size_of(number)
        if size >= _BATCH_BYTES or number - first + 1 == _BATCH_LINES:
            yield range(first, number + 1)
            first = number + 1
            size = 0
    if first < len(lines):
        yield range(first, len(lines))


def _of_lines(
    lines: ChatLines, numbers: range, future: Future[list[Rendered | ValueError]]
) -> Iterator[list[Rendered]]:
    """Yield the results for each line, or raise the error of the first one that has one."""
    results = iter(future.result())
    for number in numbers:
        rendered = []
        for result in itertools.islice(results, lines.num_dialogues):
            if isinstance(result, ValueError):
                raise ValueError(f"data.paths: {lines.spans.place_of(number)}: {result}")
            rendered.append(result)
        yield rendered


def _is_within(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return bool[n], whether a token overlaps one of the parts of the text.

    Args:
        offsets: int[n, 2], first character and end of each token.
    """
    is_within = np.zeros(len(offsets), bool)
    for start, stop in spans:
        is_within |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return is_within
