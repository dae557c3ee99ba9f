"""Turns tokens into text while they arrive, up to a text that ends it."""

from collections.abc import Sequence

from generate.prompts import INCOMPLETE, TextCodec


class TextStream:
    """The text of a continuation that grows.

    A piece of text is held back while its last character is incomplete, or while it may be the
    beginning of a text that ends the continuation.

    Args:
        stop: texts that end the continuation.

    Attributes:
        is_stopped: whether one of them has appeared; no text follows.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        self._codec = codec
        self._stop = stop
        self._tokens = codec.context(prompt)
        # Text depends on the tokens before it, but only on few of them: the tokens from `_first`
        # are decoded together, and those before `_next` have been decoded already.
        self._first = 0
        self._next = len(self._tokens)
        self._held = ""
        self.is_stopped = False

    def add(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """Return the text that is known after these tokens, and was not known before.

        Args:
            is_last: whether no tokens follow, so that nothing is held back.
        """
        if self.is_stopped:
            return ""
        self._tokens.extend(tokens)
        known = self._codec.decode(self._tokens[self._first : self._next])
        text = self._codec.decode(self._tokens[self._first :])
        if is_last or not text.endswith(INCOMPLETE):
            self._held += text[len(known) :]
            if len(text) > len(known):  # special tokens have no text, so they are no context
                self._first = self._next
            self._next = len(self._tokens)
        ends = [place for text in self._stop if (place := self._held.find(text)) >= 0]
        if ends:
            self.is_stopped = True
            return self._held[: min(ends)]
        size = len(self._held) if is_last else len(self._held) - self._num_doubtful()
        ready = self._held[:size]
        self._held = self._held[size:]
        return ready

    def _num_doubtful(self) -> int:
        """Return how many characters at the end may begin a text of `stop`."""
        longest = min(len(self._held), max(map(len, self._stop), default=0))
        for size in range(longest, 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self._stop):
                return size
        return 0
