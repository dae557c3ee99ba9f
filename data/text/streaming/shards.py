"""The shards of a streamed corpus: files of `data.paths`, which are fetched when they are needed.

    texts/a.jsonl                       is read where it is
    s3://bucket/a.jsonl.gz              is downloaded to a directory, and deleted after use
    hf://datasets/me/texts/a.parquet    likewise, unless the cache of huggingface_hub has it

All are listed when a run starts. A shard that has changed or vanished since then ends the run.
"""

import abc
import dataclasses
import os
from pathlib import Path

from data.config import DataConfig
from data.examples import BrokenExample
from data.formats import format_of, named_formats
from data.hub_files import files_of_entry
from data.store_files import matching_objects
from data.text.text_files import find_files
from untrusted.files import version_of
from untrusted.hub import Repository, dataset_of, download, file_sizes, pin, read_part
from untrusted.stores import RemoteFile, Store, is_url

# Seconds for which a request is repeated during a run, while its store cannot be reached.
_PATIENCE_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(abc.ABC):
    """A file of a corpus.

    Attributes:
        name: its path or URL.
        size: size in bytes; None if a web server does not say it.
        version: changes with the content. It is the same on all hosts, except for local files.
    """

    name: str
    size: int | None
    version: str

    @property
    def is_local(self) -> bool:
        """Whether the file is read where it is."""
        return False

    @abc.abstractmethod
    def fetch(self, directory: Path) -> Path:
        """Return the path of the file, downloaded to a directory if it is not on this machine.

        Raises:
            OSError: The file has vanished, or cannot be fetched.
            ValueError: The store refuses access.
        """

    def read_part(self, num_bytes: int, *, from_end: bool) -> bytes | None:
        """Return the first or the last bytes of a file that is not on this machine.

        Returns:
            None if its server only sends whole files.

        Raises:
            OSError: The file has vanished, or cannot be fetched.
            ValueError: The store refuses access.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def current_version(self) -> str | None:
        """Return the version that the file has now.

        Returns:
            None if it has vanished, unless this is an OSError.
        """

    def check(self) -> None:
        """Check, after the file was read, that it is still the one that was listed.

        Raises:
            OSError: The file has vanished, or its store cannot be reached.
            BrokenExample: The file has changed.
        """
        if self.current_version() != self.version:
            raise BrokenExample(
                f"data.paths: {self.name} has changed since this run started; restore it, or start "
                "again in another workdir"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LocalShard(Shard):
    @property
    def is_local(self) -> bool:
        return True

    def fetch(self, directory: Path) -> Path:
        del directory
        self.check()
        return Path(self.name)

    def current_version(self) -> str | None:
        return _version_of(self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StoredShard(Shard):
    store: Store
    key: str
    file: RemoteFile

    def fetch(self, directory: Path) -> Path:
        target = directory / f"shard{format_of(self.name)}"
        self.store.download(self.key, target, self.file)
        return target

    def read_part(self, num_bytes: int, *, from_end: bool) -> bytes | None:
        return self.store.read_part(self.key, num_bytes, from_end=from_end)

    def current_version(self) -> str | None:
        file = self.store.describe(self.key)
        return None if file is None else file.version


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HubShard(Shard):
    repository: Repository
    path: str

    def fetch(self, directory: Path) -> Path:
        return download(self.repository, self.path, directory)

    def read_part(self, num_bytes: int, *, from_end: bool) -> bytes | None:
        return read_part(self.repository, self.path, num_bytes, from_end=from_end)

    def current_version(self) -> str | None:
        return self.version  # The content of a commit does not change.


def find_shards(config: DataConfig) -> list[Shard]:
    """Return the files of `data.paths`, each once, sorted by name.

    Raises:
        FileNotFoundError: A glob matches no file.
        ValueError: A file is of another kind, or a store or the hub refuses access.
        ConnectionError: A store or the hub cannot be reached.
    """
    shards = {shard.name: shard for entry in config.paths for shard in _shards_of(entry)}
    for name in sorted(shards):
        if format_of(name) is None:
            raise ValueError(
                f"data.paths matches {name!r}, but only {named_formats()} files can be read; "
                "narrow the glob or convert the file"
            )
    return [shards[name] for name in sorted(shards)]


def relative_names(shards: list[Shard]) -> list[str]:
    """Return the names of shards in the deepest folder that contains all of them."""
    names = [shard.name for shard in shards]
    folder = os.path.commonprefix(names).rpartition("/")[0]
    return [name.removeprefix(folder).removeprefix("/") for name in names]


def _shards_of(entry: str) -> list[Shard]:
    reference = dataset_of(entry)
    if reference is not None:
        repository = pin(reference[0])
        sizes = file_sizes(repository)
        return [
            _HubShard(
                name=f"{repository}/{path}",
                size=sizes.get(path),
                version=str(repository.revision),
                repository=repository,
                path=path,
            )
            for path in files_of_entry("data.paths", entry, repository, reference[1])
        ]
    if is_url(entry):
        store, files = matching_objects("data.paths", entry)
        store.patience_s = _PATIENCE_S
        return [
            _StoredShard(
                name=f"{store.url}/{name}" if name else store.url,
                size=file.size,
                version=file.version,
                store=store,
                key=name,
                file=file,
            )
            for name, file in files.items()
        ]
    return [
        _LocalShard(name=str(file.absolute()), size=file.stat().st_size, version=_version_of(file))
        for file in find_files((entry,))
    ]


def _version_of(file: str | Path) -> str:
    return "{} {}".format(*version_of(file))
