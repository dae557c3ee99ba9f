"""The parsers of the fuzz tests: one declaration for each kind of file."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parser:
    """A parser and valid input for it.

    Attributes:
        file: file that is damaged, relative to the directory.
        prepare: writes `file`, and the files that it needs, into an empty directory.
        parse: parses the file; its argument is the directory.
        damaged: returns a strategy for contents of `file`; its argument is a list of valid ones.
        share: how many inputs it gets in a campaign, relative to other parsers.
    """

    file: str
    prepare: Callable[[Path], Any]
    parse: Callable[[Path], Any]
    damaged: Callable[[Sequence[bytes]], st.SearchStrategy[bytes]]
    share: float = 1.0
