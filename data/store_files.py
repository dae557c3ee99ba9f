"""Files of data at URLs, which are copied into the cache before they are read.

    s3://bucket/texts/a.jsonl         a file
    gs://bucket/texts/*.parquet       the files that a glob matches, as for local files
    s3://bucket/photos                a folder, with all files below it
    https://host/a.csv                a file of a web server

The readers of local files do the rest. At each start the store is asked which files have changed;
only these are downloaded.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from data.named_paths import matching_files
from untrusted.local_copies import LocalCopy
from untrusted.stores import RemoteFile, Store, is_url

_MAGIC = re.compile(r"[*?\[]")
# Token files have two parts, of which the config names one.
_TOKENS = re.compile(r"(.*)\.(?:bin|idx)")


def local_entry(key: str, entry: str, stores: Path) -> str:
    """Return the local path or glob of a URL, whose files are copied.

    Args:
        key: key of the config, for messages.
        entry: URL of a file or of a folder, or a glob.
        stores: directory of all copies.

    Raises:
        ValueError: There is no such file, or the store refuses access.
        ConnectionError: The store cannot be reached.
    """
    with _naming(key):
        root, pattern = _split_glob(entry)
        copy = LocalCopy(Store(root), stores)
        with copy.locked():
            copy.pull_chosen(functools.partial(_choose, entry, pattern))
    return str(copy.directory / pattern)


def matching_objects(key: str, entry: str) -> tuple[Store, dict[str, RemoteFile]]:
    """Return the store of a URL, and the files that it stands for, by name, without copying them.

    Args:
        key: key of the config, for messages.
        entry: URL of a file or of a folder, or a glob.

    Raises:
        ValueError: There is no such file, or the store refuses access.
        ConnectionError: The store cannot be reached.
    """
    with _naming(key):
        root, pattern = _split_glob(entry)
        store = Store(root)
        files, is_chosen = _choose(entry, pattern, store.list())
        return store, {name: files[name] for name in files if is_chosen(name)}


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Let errors of the block begin with the key of the config."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    except ConnectionError as error:
        raise ConnectionError(f"{key}: {error}") from error


def _split_glob(entry: str) -> tuple[str, str]:
    """Return the URL of the folder of a glob, and the glob in it; "" if there is none."""
    if entry.startswith(("http://", "https://")):
        return entry, ""  # A web server lists no files.
    magic = _MAGIC.search(entry)
    if magic is None and not _TOKENS.fullmatch(entry):
        return entry.rstrip("/"), ""
    end = magic.start() if magic else len(entry)
    root = entry[:end].rpartition("/")[0]
    if not is_url(root):
        raise ValueError(f"{entry} has no bucket in front of the glob; name one")
    return root, entry[len(root) + 1 :]


def _choose(
    entry: str, pattern: str, files: Mapping[str, RemoteFile]
) -> tuple[Mapping[str, RemoteFile], Callable[[str], bool]]:
    """Return the arguments of `LocalCopy.pull`."""
    chosen = {*matching_files([*files], pattern)}
    if not chosen:
        some = f"; it has {len(files):,} others, such as {min(files)}" if files else ""
        raise ValueError(f"no file matches {entry}{some}; correct the URL")
    if tokens := _TOKENS.fullmatch(pattern):
        chosen |= {*matching_files([*files], f"{tokens[1]}.bin")}
        chosen |= {*matching_files([*files], f"{tokens[1]}.idx")}
    return files, chosen.__contains__
