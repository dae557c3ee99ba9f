"""Repositories of the Hugging Face hub, and their files in the cache of `huggingface_hub`.

    org/name                                a model
    org/name@v1.0                           a revision of it: a branch, a tag or a commit
    hf://datasets/org/name@v1.0/data/*.csv  files of a dataset

A path that exists on this machine is never taken for the name of a repository. A repository is
pinned to a commit first, whose files never change: files in the cache then need no network.

Strangers wrote these files. Only formats that cannot contain code are fetched, so neither pickles
(.bin) nor scripts (.py) ever get into the cache. `huggingface_hub` reads `HF_HOME`, `HF_ENDPOINT`,
`HF_HUB_OFFLINE` and the token, and locks files that several processes download.
"""

import contextlib
import dataclasses
import glob
import io
import re
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from untrusted.files import open_regular
from untrusted.messages import LastingError, shortened

#: Prefix of the files of a dataset.
DATASETS = "hf://datasets/"
#: Ends of the names of files that may be fetched.
FORMATS = tuple(
    """
    .safetensors .json .txt .model .jinja
    .jsonl .csv .tsv .parquet .arrow .jsonl.gz .jsonl.zst .txt.gz .txt.zst
    .jpg .jpeg .png .webp .bmp .gif
    """.split()
)

# Files that are downloaded at the same time; 8 is the default of `huggingface_hub`.
_NUM_DOWNLOADS = 8

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_REPOSITORY = re.compile(rf"({_NAME}/{_NAME})(?:@[\w.-]+(?:/[\w.-]+)*)?")
# The revision of a dataset has no slash, because a path may follow.
_DATASET = re.compile(rf"{DATASETS}({_NAME}/{_NAME})(?:@([\w.-]+))?(?:/(.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class OfflineError(LastingError, ConnectionError):
    """The cache lacks a file, and HF_HUB_OFFLINE is set, so waiting does not help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository of the hub.

    Attributes:
        kind: "model" or "dataset".
        name: its owner and name, `org/name`.
        revision: branch, tag or commit; None for the default branch.
    """

    kind: str
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        prefix = DATASETS if self.kind == "dataset" else ""
        return f"{prefix}{self.name}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def download_command(self) -> str:
        """The command that downloads the repository into the cache."""
        kind = " --repo-type=dataset" if self.kind == "dataset" else ""
        revision = f" --revision={self.revision}" if self.revision else ""
        return f"hf download{kind} {self.name}{revision}"


def has_form_of_model(text: str) -> bool:
    """Return whether a text is `org/name` or `org/name@revision`, even if it is also a path.

    The name of a file, `folder/tokenizer.json`, is no model.
    """
    match = _REPOSITORY.fullmatch(text)
    return match is not None and not match[1].endswith(".json")


def model_of(text: str) -> Repository | None:
    """Return the model that `org/name` or `org/name@revision` names.

    Returns:
        The model; None for a path that exists, and for a text of another form.
    """
    if not has_form_of_model(text) or Path(text).exists():
        return None
    name, _, revision = text.partition("@")
    return Repository(kind="model", name=name, revision=revision or None)


def pinned_model_of(text: str) -> Repository | None:
    """Return the model of `org/name@commit`, as runs record it; None for any other text."""
    repository = model_of(text)
    return repository if repository is not None and repository.is_pinned else None


def dataset_of(text: str) -> tuple[Repository, str] | None:
    """Return the dataset of `hf://datasets/org/name@revision/path`, and the path in it.

    Returns:
        None if the text has another prefix. The path is "" if there is none.

    Raises:
        ValueError: The text has the prefix, but another form.
    """
    if not text.startswith(DATASETS):
        return None
    match = _DATASET.fullmatch(text)
    if match is None or ".." in (match[3] or "").split("/"):
        raise ValueError(
            f"{shortened(text)!r} must be of the form {DATASETS}OWNER/NAME[@REVISION][/PATH]"
        )
    return Repository(kind="dataset", name=match[1], revision=match[2]), (match[3] or "").strip("/")


def pin(repository: Repository) -> Repository:
    """Return a repository at the commit that its revision is at now.

    Without a network, it is the commit that the revision was at when it was last asked for.

    Raises:
        ValueError: The hub has no such repository or revision, or does not let this user read it.
        ConnectionError: The hub cannot be reached, and the cache does not have the revision.
    """
    from huggingface_hub import HfApi  # slow, and most commands do not need it

    if repository.is_pinned:
        return repository
    with _explaining(repository):
        commit = HfApi().resolve_revision(
            repository.name, repo_type=repository.kind, revision=repository.revision
        )
    return dataclasses.replace(repository, revision=commit.resolved)


def check_access(repository: Repository, files: Sequence[str]) -> None:
    """Check that this user may download files, unless the cache has them.

    Anybody may list the files of a gated repository. Without a network, nothing is checked.

    Args:
        repository: pinned repository.

    Raises:
        ValueError: The hub does not let this user read the repository.
    """
    from huggingface_hub import HfApi

    if _cached_folder(repository, files) is None:
        with contextlib.suppress(ConnectionError), _explaining(repository):
            HfApi().auth_check(repository.name, repo_type=repository.kind)


def list_files(repository: Repository) -> list[str]:
    """Return the paths of the files of a pinned repository that may be fetched, sorted.

    Raises:
        ValueError: See `file_sizes`.
        ConnectionError: See `file_sizes`.
    """
    return [*file_sizes(repository)]


def file_sizes(repository: Repository) -> dict[str, int]:
    """Return the files of a pinned repository that may be fetched, sorted: path -> size in bytes.

    Raises:
        ValueError: See `pin`.
        ConnectionError: The hub cannot be reached, and the cache has no list of all files.
    """
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile

    where: dict[str, Any] = {"repo_type": repository.kind, "revision": repository.revision}
    try:
        files = [*get_cached_repo_tree(repository.name, **where)]
    except CachedRepoTreeNotFoundError:
        with _explaining(repository):
            files = [*HfApi().list_repo_tree(repository.name, recursive=True, **where)]
    sizes = {file.path: file.size for file in files if isinstance(file, RepoFile)}
    return {path: sizes[path] for path in sorted(sizes) if path.endswith(FORMATS)}


def download(repository: Repository, file: str, directory: Path) -> Path:
    """Return a file of a pinned repository, downloaded to a directory unless the cache has it.

    Args:
        file: path from `file_sizes`.

    Raises:
        ValueError: See `pin`.
        ConnectionError: The hub cannot be reached, and the cache lacks the file.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm

    class NoBar(tqdm):
        """A bar that is not shown: it would cut the lines of a run's log."""

        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **{**options, "disable": True})

    folder = _cached_folder(repository, [file])
    if folder is not None:
        return folder / file
    where: dict[str, Any] = {"repo_type": repository.kind, "revision": repository.revision}
    with _explaining(repository):
        return Path(
            hf_hub_download(repository.name, file, local_dir=directory, tqdm_class=NoBar, **where)
        )


def read_part(repository: Repository, file: str, num_bytes: int, *, from_end: bool) -> bytes | None:
    """Return the first or the last bytes of a file of a pinned repository, or all of a shorter one.

    Args:
        file: path from `file_sizes`.

    Returns:
        None if the server only sends whole files, and the last bytes are wanted.

    Raises:
        ValueError: See `pin`.
        ConnectionError: The hub cannot be reached, and the cache lacks the file.
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    folder = _cached_folder(repository, [file])
    if folder is not None:
        with open_regular(folder / file) as stream:
            stream.seek(max(stream.seek(0, io.SEEK_END) - num_bytes, 0) if from_end else 0)
            return stream.read(num_bytes)
    where: dict[str, Any] = {"repo_type": repository.kind, "revision": repository.revision}
    url = hf_hub_url(repository.name, file, **where)
    span = f"bytes=-{num_bytes}" if from_end else f"bytes=0-{num_bytes - 1}"
    headers = {**build_hf_headers(), "Range": span, "Accept-Encoding": "identity"}
    content = bytearray()
    with (
        _explaining(repository),
        get_session().stream("GET", url, headers=headers, follow_redirects=True) as response,
    ):
        hf_raise_for_status(response)
        if from_end and response.status_code != HTTPStatus.PARTIAL_CONTENT:
            return None
        for piece in response.iter_bytes():
            content += piece
            if len(content) >= num_bytes:
                break
    return bytes(content[:num_bytes])


def cached_files(repository: Repository) -> list[str]:
    """Return the paths of the files of a pinned repository that the cache has, sorted.

    A download of single files, as `transformers` does it, leaves no list of all files. Then these
    are the only files that are known without a network, but there may be others.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    where: dict[str, Any] = {"repo_type": repository.kind, "revision": repository.revision}
    try:
        folder = Path(snapshot_download(repository.name, local_files_only=True, **where))
    except LocalEntryNotFoundError:
        return []
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(path for path in paths if path.endswith(FORMATS))


def fetch(repository: Repository, files: Sequence[str]) -> Path:
    """Download files that the cache lacks, and return the folder that has them.

    Args:
        repository: pinned repository.
        files: paths from `list_files` or `cached_files`.

    Raises:
        ValueError: See `pin`.
        ConnectionError: The hub cannot be reached, and the cache lacks a file.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import tqdm
    from tqdm.contrib.concurrent import thread_map

    folder = _cached_folder(repository, files)
    if folder is not None:
        return folder
    where: dict[str, Any] = {"repo_type": repository.kind, "revision": repository.revision}
    with _explaining(repository):
        # This also stores the list of all files, which `list_files` needs without a network. It
        # compares all files with all patterns, so the other files are not left to it.
        snapshot_download(repository.name, allow_patterns=glob.escape(files[0]), **where)
        thread_map(
            lambda file: hf_hub_download(repository.name, file, **where),
            files,
            max_workers=_NUM_DOWNLOADS,
            tqdm_class=tqdm,
            desc=f"Files of {repository.name}",
            disable=None,  # only on a terminal
        )
        folder = _cached_folder(repository, files)
        if folder is None:  # The client does not know all files of the repository.
            raise LocalEntryNotFoundError("some of its files are not in the cache")
    return folder


def _cached_folder(repository: Repository, files: Sequence[str]) -> Path | None:
    """Return the folder of the cache that has the files; None if it lacks one of them."""
    from huggingface_hub import try_to_load_from_cache

    where: dict[str, Any] = {"repo_type": repository.kind, "revision": repository.revision}
    folder = None
    for file in files:
        path = try_to_load_from_cache(repository.name, file, **where)
        if not isinstance(path, str):
            return None
        folder = Path(path.removesuffix(file))
    return folder


@contextlib.contextmanager
def _explaining(repository: Repository) -> Iterator[None]:
    """Turn an error of `huggingface_hub` into one sentence that names the remedy."""
    from huggingface_hub import constants, errors

    name = repository.name
    command = repository.download_command
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repository} is gated, and the hub does not let you read it; accept its terms at "
            f"{_page(repository)}, log in with 'hf auth login' or set HF_TOKEN, and check it with "
            f"'{command}'"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{repository} is neither a path on this machine nor a public {repository.kind} of the "
            "Hugging Face hub; correct it, or, if it is private, log in with 'hf auth login' or "
            f"set HF_TOKEN, and check it with '{command}'"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"{repository}: the {repository.kind} {name} has no revision {repository.revision!r}; "
            f"name a branch, tag or commit that '{command}' accepts, or leave it out"
        ) from error
    except errors.HFValidationError as error:
        raise ValueError(
            f"{repository} is not a name of the Hugging Face hub ({shortened(error)}); correct it, "
            f"and check it with '{command}'"
        ) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise ValueError(
                f"{repository}: the hub refuses your token; log in with 'hf auth login' or set "
                f"HF_TOKEN, and check it with '{command}'"
            ) from error
        raise _unavailable(repository, f"the hub answers {error.response.status_code}") from error
    except Exception as error:
        if not _is_unreachable(error):
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = "HF_HUB_OFFLINE is set"
        if not constants.is_offline_mode():
            reason = f"{constants.ENDPOINT} cannot be reached ({shortened(cause)})"
        raise _unavailable(repository, reason) from error


def _is_unreachable(error: Exception) -> bool:
    """Return whether an error says that the hub cannot answer now, or that the cache is incomplete.

    Then the files may still be in the cache.
    """
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    http = errors.HTTPError  # pyright: ignore  # httpx's, such as ConnectError
    kinds = (errors.LocalEntryNotFoundError, errors.RevisionResolutionError, http)
    return isinstance(error, (*kinds, errors.OfflineModeIsEnabled))


def _unavailable(repository: Repository, reason: str) -> ConnectionError:
    from huggingface_hub import constants

    no_path = ""
    correct = ""
    if repository.kind == "model":  # a name that looks like one may be a path with a typing error
        no_path = f"there is no path {repository} on this machine, and the model "
        correct = ", or correct the path"
    error = OfflineError if constants.is_offline_mode() else ConnectionError
    return error(
        f"{no_path}{repository} is not complete in the cache of the Hugging Face hub, and "
        f"{reason}; run '{repository.download_command}' where there is a network, with the same "
        f"HF_HOME{correct}"
    )


def _page(repository: Repository) -> str:
    from huggingface_hub import constants

    kind = "datasets/" if repository.kind == "dataset" else ""
    return f"{constants.ENDPOINT}/{kind}{repository.name}"
