"""Turns an error into one sentence, even if a stranger chose the values that it quotes.

A value from a file may be long, have several lines, or contain characters that control a terminal.
"""

import errno
from typing import Any

#: Errors of the file system that only the user can resolve -> description of the problem.
LASTING = {
    errno.EACCES: "you have no permission",
    errno.EDQUOT: "your quota is used up",
    errno.EEXIST: "there is a file of this name",
    errno.EISDIR: "it is a directory",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOENT: "it does not exist",
    errno.ENOSPC: "the disk is full",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EPERM: "it is not permitted",
    errno.EROFS: "the file system is read-only",
}
#: Maximum length of a message. The end of a longer one is kept too, because it has the remedy.
_MAX_CHARACTERS = 4000
_END_CHARACTERS = 500


class LastingError(OSError):
    """An error of the file system or of the network that only the user can resolve."""


def without_surrogates(text: str) -> str:
    """Return a text in which `?` replaces lone surrogates, which JSON has, but UTF-8 has not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def sentence_of(error: BaseException) -> str:
    """Return an error as one line that a terminal can show.

    Args:
        error: error. An error of the file system names the file and the remedy.

    Returns:
        At most about 4,000 characters; the middle of a longer message is omitted.
    """
    text = _printable(str(error)) or type(error).__name__
    if isinstance(error, OSError) and error.errno in LASTING and error.filename is not None:
        text = _printable(
            f"{error.filename} cannot be used: {LASTING[error.errno]} ({error.strerror}); make it "
            "usable, or choose another path"
        )
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[: _MAX_CHARACTERS - _END_CHARACTERS]} […] {text[-_END_CHARACTERS:]}"


def shortened(value: Any, max_characters: int = 200) -> str:
    """Return a value, such as an error of a library, as a part of a sentence.

    Args:
        value: any value; its str() is used. An error without a message becomes its type's name.
        max_characters: maximum length of the result.
    """
    text = _printable(str(value))
    if not text and isinstance(value, BaseException):
        text = type(value).__name__
    return text if len(text) <= max_characters else text[:max_characters] + "…"


def _printable(text: str) -> str:
    """Return a text on one line, with escape sequences for characters that are not printable."""
    line = " ".join(part.strip() for part in text.splitlines())
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
