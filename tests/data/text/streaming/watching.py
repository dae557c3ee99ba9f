"""Measures the size of a directory while it changes."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path


def size_of(directory: Path) -> int:
    """Return the bytes of the files below a directory, which may vanish meanwhile."""
    sizes = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes += file.stat().st_size if file.is_file() else 0
    return sizes


@contextlib.contextmanager
def watching(directory: Path) -> Iterator[list[int]]:
    """Measure the size of a directory during a block, again and again."""
    sizes = []
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.is_set():
            with contextlib.suppress(FileNotFoundError):
                sizes.append(size_of(directory))
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sizes
    finally:
        has_ended.set()
        thread.join()
