"""Files at URLs, through `fsspec`: object stores, and single files of web servers.

    s3://bucket/run          Amazon S3, and servers that speak its protocol; needs `s3fs`
    gs://bucket/run          Google Cloud Storage; needs `gcsfs`
    https://host/a.jsonl     a single file; needs `aiohttp`
    memory://a               any other file system of fsspec

The packages read their usual settings: `AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, `AWS_ENDPOINT_URL`,
`GOOGLE_APPLICATION_CREDENTIALS`, `STORAGE_EMULATOR_HOST`, and fsspec's `FSSPEC_S3_…`.

An object appears as a whole, or not at all. Operations are repeated while a server cannot be
reached. Names of objects come from strangers: one that would be written outside its folder is
refused.
"""

import contextlib
import dataclasses
import datetime
import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from untrusted.messages import LastingError, shortened

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://(.+)", re.DOTALL)
#: Schemes of this machine's files, and of the hub, whose files have functions of their own.
_OTHER_SCHEMES = ("file", "local", "hf")
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "az": "adlfs",
    "abfs": "adlfs",
}
# Keys of fsspec's descriptions of files that say which version of the file it is.
_VERSIONS = ("ETag", "etag", "generation", "LastModified", "updated", "mtime", "created")
_TIMES = ("LastModified", "updated", "mtime", "created")
# Packages whose exceptions mean that a request failed. Other exceptions are bugs.
_CLIENTS = ("aiobotocore", "aiohttp", "asyncio", "botocore", "gcsfs", "google", "requests")
# Errors of a file of this machine, which the same operation would raise again.
_OF_THIS_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 8.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


def is_url(text: str) -> bool:
    """Return whether a text is a URL that fsspec may read, such as `s3://bucket/a.txt`.

    Local files, the Hugging Face hub, and chains such as `zip::s3://a.zip` are none.
    """
    match = _URL.fullmatch(text)
    return match is not None and match[1] not in _OTHER_SCHEMES and "::" not in text


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """The description of a file in a store.

    Attributes:
        version: changes with the content.
        size: size in bytes; None if the server does not say it.
        modified_s: time of the last change, in seconds since 1970, or None.
    """

    version: str
    size: int | None
    modified_s: float | None


class Store:
    """The files below a URL. Names are relative to it, such as `checkpoints/300/config.yaml`.

    All methods raise

        ValueError       a bucket or a file is missing, or credentials, a permission or a package
        ConnectionError  the server cannot be reached, even after `patience_s`

    Attributes:
        url: URL, without a slash at the end.
        patience_s: seconds for which a failed operation is repeated.
    """

    def __init__(self, url: str, *, patience_s: float = 3.0):
        """Describe a store. No request is sent.

        Raises:
            ValueError: `fsspec` does not know the scheme, or the package for it is missing.
        """
        import fsspec  # slow, and most commands do not need it

        match = _URL.fullmatch(url)
        assert match is not None, url
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self._scheme = match[1]
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self._scheme in ("s3", "s3a"):
            options["config_kwargs"] = {
                "connect_timeout": 10,
                "read_timeout": 60,
                "retries": {"mode": "standard", "max_attempts": 3},
            }
        try:
            self._files: Any = fsspec.filesystem(self._scheme, **options)
        except ImportError as error:
            package = _PACKAGES.get(self._scheme)
            remedy = f"run 'pip install {package}'" if package else shortened(error)
            raise ValueError(
                f"{self.url} needs a package that is not installed; {remedy}"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{self.url} is a URL of an unknown scheme ({shortened(error)}); choose s3://, "
                "gs://, https:// or another scheme of fsspec"
            ) from error
        self._root = str(self._files._strip_protocol(self.url)).rstrip("/")

    def list(self) -> dict[str, RemoteFile]:
        """Return all files below the URL by name; the name is "" if the URL names a file."""
        try:
            if self._scheme in ("http", "https"):  # Its folders are pages of any form.
                return {"": _described(self._do(lambda: self._files.info(self.url)))}
            entries = self._do(lambda: self._files.find(self._root, detail=True))
        except FileNotFoundError as error:
            raise ValueError(f"{self.url} does not exist; correct the URL") from error
        files = {}
        for path, entry in entries.items():
            name = path.removeprefix(self._root).removeprefix("/")
            if not path.endswith("/") and entry.get("type", "file") == "file":
                self._check_name(name)
                files[name] = _described(entry)
        return files

    def describe(self, name: str) -> RemoteFile | None:
        """Return the description of a file; None if there is none."""
        try:
            return _described(self._do(lambda: self._files.info(self._path(name))))
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        try:
            return self._do(lambda: self._files.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def read_part(self, name: str, num_bytes: int, *, from_end: bool) -> bytes | None:
        """Return the first or the last bytes of a file, or all of a shorter one.

        Returns:
            None if the server only sends whole files, and the last bytes are wanted.

        Raises:
            FileNotFoundError: There is no such file.
        """

        def read() -> bytes | None:
            with self._files.open(self._path(name), "rb", block_size=num_bytes) as file:
                if not from_end:
                    return file.read(num_bytes)
                if file.size is None:
                    return None
                file.seek(max(file.size - num_bytes, 0))
                try:
                    return file.read(num_bytes)
                except ValueError:  # fsspec's, for a web server without range requests
                    return None

        return self._do(read)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        self._do(lambda: self._files.pipe_file(self._path(name), content))

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file if there is none, and return whether there was none.

        The server decides between several processes that do this at the same time.
        """
        try:
            self._do(lambda: self._files.pipe_file(self._path(name), content, mode="create"))
        except FileExistsError:
            return False
        return True

    def upload(self, source: Path, name: str) -> None:
        """Upload a file of this machine."""
        self._do(lambda: self._files.put_file(str(source), self._path(name)))

    def download(self, name: str, target: Path, file: RemoteFile) -> None:
        """Download a file, which appears at `target` as a whole.

        Raises:
            FileNotFoundError: It has been deleted in the meantime.
        """
        temporary = target.with_name(f".{target.name}.tmp")

        def get() -> None:
            self._files.get_file(self._path(name), str(temporary))
            size = temporary.stat().st_size
            if file.size is not None and size != file.size:
                raise ConnectionError(f"{size:,} of {file.size:,} bytes arrived")

        try:
            self._do(get)
            if file.modified_s is not None:
                os.utime(temporary, (file.modified_s, file.modified_s))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._do(lambda: self._files.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        root = self.url if self._scheme in ("http", "https") else self._root
        return f"{root}/{name}" if name else root

    def _check_name(self, name: str) -> None:
        parts = name.split("/")
        if name and any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ValueError(
                f"{self.url} has an object with the name {shortened(name)!r}, which cannot be the "
                "name of a file; rename or delete the object"
            )

    def _do(self, action: Callable[[], T]) -> T:
        """Do something, and do it again while the server cannot be reached.

        Raises:
            FileNotFoundError: There is no such file.
            FileExistsError: There is one, but there should be none.
        """
        deadline_s = time.monotonic() + self.patience_s
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                with self._explaining():
                    return action()
            except ConnectionError as error:
                if time.monotonic() + delay_s > deadline_s:
                    raise
                _log.warning("%s; trying again", shortened(error))
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn an error of a request into one sentence that names the remedy."""
        try:
            yield
        except FileExistsError:
            raise
        except Exception as error:
            kinds = [type(each).__name__ for each in _chain(error)]
            # fsspec takes a web server that does not answer for one without the file.
            is_absent = isinstance(error, FileNotFoundError)
            if is_absent and not any("Connect" in kind for kind in kinds):
                if "bucket does not exist" not in str(error):
                    raise
                raise ValueError(
                    f"{self.url}: the bucket does not exist; create it, or correct the URL"
                ) from error
            packages = {type(each).__module__.partition(".")[0] for each in _chain(error)}
            if any("Credential" in kind or "Token" in kind for kind in kinds):
                raise ValueError(
                    f"{self.url}: there are no valid credentials ({shortened(error)}); "
                    f"{_credentials(self._scheme)}"
                ) from error
            if isinstance(error, PermissionError) or getattr(error, "code", None) in (401, 403):
                raise ValueError(
                    f"{self.url}: you have no permission ({shortened(error)}); correct the "
                    "credentials or the permissions of the bucket"
                ) from error
            if isinstance(error, OSError) and error.errno in _OF_THIS_MACHINE:
                raise LastingError(shortened(error)) from error
            if isinstance(error, OSError) or packages & {*_CLIENTS}:
                raise ConnectionError(
                    f"{self.url} cannot be reached ({shortened(error)}); check the network and "
                    "the address of the server"
                ) from error
            raise


def _described(entry: Mapping[str, Any]) -> RemoteFile:
    """Return the description of a file, given the one of fsspec."""
    version = next((entry[key] for key in _VERSIONS if entry.get(key)), "")
    if isinstance(version, datetime.datetime):
        version = version.timestamp()  # Lists of some file systems have numbers.
    times = [entry[key] for key in _TIMES if isinstance(entry.get(key), datetime.datetime)]
    size = entry.get("size")
    return RemoteFile(
        version=f"{version} {size}",
        size=size if isinstance(size, int) else None,
        modified_s=times[0].timestamp() if times else None,
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _credentials(scheme: str) -> str:
    """Return how to give credentials."""
    if scheme in ("s3", "s3a"):
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run 'aws configure'"
    if scheme in ("gs", "gcs"):
        return "set GOOGLE_APPLICATION_CREDENTIALS, or run 'gcloud auth application-default login'"
    return "give those that the package for this scheme reads"
