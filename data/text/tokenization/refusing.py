"""Turns the errors of the `tokenizers` library into a ValueError of one sentence."""

import contextlib
from collections.abc import Iterator

from untrusted.messages import shortened


@contextlib.contextmanager
def refusing(problem: str, *, remedy: str) -> Iterator[None]:
    """Turn every error of the `tokenizers` library into a ValueError.

    Args:
        problem: beginning of the sentence, which names the file.
        remedy: end of the sentence.
    """
    try:
        yield
    except BaseException as error:
        # The library raises plain Exception. A failed assertion of its Rust code is a BaseException
        # whose type cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{problem} ({shortened(error)}); {remedy}") from error
