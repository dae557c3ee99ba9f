"""A folder of this machine that is a copy of the files below a URL.

Programs work on the folder. `pull` brings it to the state of the store, `push` the store to the
state of the folder. An index, next to the folder, says which version of each file both had when
they were last the same:

    stores/4f1d…/run/            the copy of s3://bucket/run
    stores/4f1d…/.index          {"metrics.jsonl": ["9dd4… 812", 812, 1790…], …}

    pull    store has another version than the index     -> download
            store lacks a file of the index              -> delete here
            store has the version of the index           -> leave the file, which may be newer here
    push    file has changed since the index, or is new  -> upload
            file of the index is not there any more      -> delete in the store

Files that are not in the index are never deleted in the store. Without the index, or if it is
damaged, everything is downloaded again.
"""

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from untrusted.cached import locked, read_cached, write_cached
from untrusted.files import make_private_directory, version_of, write_text
from untrusted.stores import RemoteFile, Store

# Files that are transferred at the same time.
_NUM_TRANSFERS = 8
# Times that a store is listed before a deleted file is an error.
_NUM_ATTEMPTS = 3


class LocalCopy:
    """A copy of the files below a URL; one process at a time may pull or push.

    Attributes:
        store: files at the URL.
        directory: copy of them; if the URL names a file, it is this file.
    """

    def __init__(
        self,
        store: Store,
        stores: Path,
        *,
        marker_of: Callable[[str], str | None] = lambda name: None,
    ):
        """Describe a copy; nothing is read or created.

        Args:
            stores: directory of all copies.
            marker_of: returns the name of the file which says that a file and those around it are
                complete, or None. It is transferred after them, and deleted before one of them
                changes.
        """
        self.store = store
        self._marker_of = marker_of
        digest = hashlib.sha256(store.url.encode()).hexdigest()[:16]
        name = re.sub(r"[^\w.-]", "_", store.url.rpartition("/")[2].partition("?")[0])
        self._folder = stores / digest
        self._index_file = self._folder / ".index"
        # The other files in the folder have names with a dot in front.
        self.directory = self._folder / (name.strip(".") or "files")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process of this machine pulls, for the duration of the block."""
        with locked(self.directory):
            yield

    @property
    def id(self) -> str:
        """Differs from the id of every other copy, on any machine."""
        file = self._folder / ".id"
        with contextlib.suppress(FileNotFoundError):
            return file.read_text(encoding="utf-8")
        make_private_directory(self._folder)
        write_text(file, secrets.token_hex(16))
        return file.read_text(encoding="utf-8")

    def known(self) -> list[str]:
        """Return the names of the files that the store had when it was last pulled or pushed."""
        return [*self._read_index()]

    def pull(
        self, files: Mapping[str, RemoteFile], wanted: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Download files that the store has in another version.

        Args:
            files: all files of the store, as `store.list` returns them.
            wanted: whether to download a file.

        Raises:
            FileNotFoundError: A file has been deleted from the store since it was listed.
            ValueError: See `Store`.
            ConnectionError: See `Store`.
        """
        index = self._read_index()
        make_private_directory(self._folder)
        changed = [
            name
            for name, file in files.items()
            if wanted(name)
            and (index.get(name, [""])[0] != file.version or not (self.directory / name).exists())
        ]
        removed = [name for name in index if name not in files]

        def download(name: str) -> None:
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self.store.download(name, path, files[name])

        try:
            markers = self._markers([*changed, *removed])
            for name in [*(markers & index.keys()), *removed]:
                (self.directory / name).unlink(missing_ok=True)
                index.pop(name, None)
            changed += [name for name in markers & files.keys() if name not in changed]
            for part in _first_and_last(changed, markers):
                for name in _in_parallel(download, part):
                    index[name] = [files[name].version, *version_of(self.directory / name)]
        finally:
            self._write_index(index)

    def pull_chosen(
        self,
        choose: Callable[
            [Mapping[str, RemoteFile]], tuple[Mapping[str, RemoteFile], Callable[[str], bool]]
        ],
    ) -> None:
        """List the store and pull, again if a file is deleted from the store in between.

        Args:
            choose: returns the arguments of `pull` for the files of the store.

        Raises:
            FileNotFoundError: Files are deleted from the store again and again.
            ValueError: See `Store`.
            ConnectionError: See `Store`.
        """
        for _ in range(_NUM_ATTEMPTS - 1):
            with contextlib.suppress(FileNotFoundError):
                return self.pull(*choose(self.store.list()))
        self.pull(*choose(self.store.list()))

    def push(self, names: Iterable[str], may_delete: Callable[[str], bool]) -> None:
        """Upload files that have changed here, and delete files that are not here any more.

        Args:
            names: files here that the store should have.
            may_delete: whether to delete a file that the store has and that is not here.

        Raises:
            ValueError: See `Store`.
            ConnectionError: See `Store`.
        """
        index = self._read_index()
        versions = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                versions[name] = [*version_of(self.directory / name)]
        changed = [name for name in versions if index.get(name, [])[1:] != versions[name]]
        removed = [name for name in index if may_delete(name)]
        removed = [name for name in removed if not (self.directory / name).exists()]

        def upload(name: str) -> None:
            self.store.upload(self.directory / name, name)

        try:
            markers = self._markers([*changed, *removed])
            for name in _in_parallel(self.store.delete, sorted(markers & index.keys())):
                del index[name]
            changed += [name for name in markers & versions.keys() if name not in changed]
            for part in _first_and_last(changed, markers):
                for name in _in_parallel(upload, part):
                    index.pop(name, None)
            for name in _in_parallel(self.store.delete, [n for n in removed if n in index]):
                del index[name]
            if changed:
                files = self.store.list()
                index |= {n: [files[n].version, *versions[n]] for n in changed if n in files}
        finally:
            self._write_index(index)

    def _markers(self, names: Iterable[str]) -> set[str]:
        """Return the markers of some files."""
        markers = {self._marker_of(name) for name in names}
        return {marker for marker in markers if marker is not None}

    def _read_index(self) -> dict[str, list[Any]]:
        """Return version in the store, size and modification time here, by name."""
        content = read_cached(self._index_file)
        return {} if content is None else json.loads(content)

    def _write_index(self, index: Mapping[str, Any]) -> None:
        make_private_directory(self._folder)
        write_cached(self._index_file, json.dumps(index).encode())


def _first_and_last(names: Iterable[str], markers: set[str]) -> tuple[list[str], list[str]]:
    """Return the names that are no markers, and then the markers among them."""
    names = list(names)
    return [n for n in names if n not in markers], [n for n in names if n in markers]


def _in_parallel(action: Callable[[str], object], names: Iterable[str]) -> Iterator[str]:
    """Call an action for all names; yield a name when its call is done, in their order."""
    names = list(names)
    pool = ThreadPoolExecutor(max_workers=_NUM_TRANSFERS)
    try:
        for name, _ in zip(names, pool.map(action, names), strict=True):
            yield name
    finally:
        # After an error, the others need not be transferred.
        pool.shutdown(cancel_futures=True)
