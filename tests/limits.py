"""Limits of the time and the memory in which hostile input must be refused."""

import contextlib
import resource
import time
from collections.abc import Iterator

MAX_SECONDS = 5.0
MAX_BYTES = 2**30


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Limit the memory that the block allocates."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm") as file:
        num_pages = int(file.read().split()[5])  # pages of the data segment
    resource.setrlimit(
        resource.RLIMIT_DATA, (num_pages * resource.getpagesize() + MAX_BYTES, limits[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


@contextlib.contextmanager
def limited_resources() -> Iterator[None]:
    """Limit the memory that the block allocates, and check its processor time."""
    start = time.process_time()
    with limited_memory():
        yield
    assert time.process_time() - start < MAX_SECONDS
