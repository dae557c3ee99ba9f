"""Repositories of the Hugging Face hub: their names, commits, access, and files in the cache."""

import socket

import huggingface_hub
import pytest

from tests.hub import TOKEN, use_hub
from untrusted.hub import (
    Repository,
    cached_files,
    check_access,
    dataset_of,
    fetch,
    list_files,
    model_of,
    pin,
)

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "modeling_gpt.py": b"code",
    "onnx/model.onnx": b"graph",
    "sub/[a] b.txt": b"text",
}
SAFE = ["config.json", "model.safetensors", "sub/[a] b.txt"]


def download(text: str) -> dict[str, bytes]:
    """Return path -> content of all files of a model that may be fetched."""
    repository = model_of(text)
    assert repository is not None
    repository = pin(repository)
    files = list_files(repository)
    folder = fetch(repository, files)
    return {file: (folder / file).read_bytes() for file in files}


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("me/gpt-2.1", None),
        ("me/gpt@v1.0", "v1.0"),
        ("me/gpt@refs/pr/3", "refs/pr/3"),
    ],
)
def test_model_of_reads_names_with_revisions(text, revision):
    name = text.partition("@")[0]
    assert model_of(text) == Repository(kind="model", name=name, revision=revision)
    assert str(model_of(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "gpt2",
        "runs/a/b",
        "./runs/a",
        "/runs/a",
        "me/gpt@",
        "../a",
        "me/tokenizer.json",
        "",
        "me/a b",
    ],
)
def test_model_of_other_texts_is_none(text):
    assert model_of(text) is None


def test_path_that_exists_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "gpt").mkdir(parents=True)
    assert model_of("me/gpt") is None
    assert model_of("me/other") is not None


@pytest.mark.parametrize(
    ("text", "revision", "path"),
    [
        ("hf://datasets/me/texts", None, ""),
        ("hf://datasets/me/texts@v2", "v2", ""),
        ("hf://datasets/me/texts@v2/en/*.csv", "v2", "en/*.csv"),
    ],
)
def test_dataset_of_reads_revision_and_path(text, revision, path):
    repository = Repository(kind="dataset", name="me/texts", revision=revision)
    assert dataset_of(text) == (repository, path)


@pytest.mark.parametrize("text", ["hf://datasets/me", "hf://datasets/me/texts/../../etc"])
def test_dataset_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r"must be of the form hf://datasets/OWNER/NAME\[@REV"):
        dataset_of(text)


def test_fetch_downloads_only_formats_without_code(hub):
    hub.commit("me/gpt", FILES)
    assert download("me/gpt") == {file: FILES[file] for file in SAFE}
    assert sorted(hub.downloads()) == SAFE


def test_fetch_compares_each_file_with_few_patterns(hub, monkeypatch):
    """The time is linear in the number of files, of which datasets may have 100,000."""
    patterns: list[str] = []
    snapshot_download = huggingface_hub.snapshot_download

    def download_snapshot(*args, allow_patterns, **options):
        patterns.extend([allow_patterns] if isinstance(allow_patterns, str) else allow_patterns)
        return snapshot_download(*args, allow_patterns=allow_patterns, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download_snapshot)
    files = {f"{i}.txt": b"%d" % i for i in range(40)}
    hub.commit("me/gpt", files)
    assert download("me/gpt") == files
    assert len(patterns) <= 2


def test_files_of_a_commit_are_fetched_once_and_stay(hub):
    first = hub.commit("me/gpt", {"config.json": b"old"})
    assert download("me/gpt") == {"config.json": b"old"}
    hub.commit("me/gpt", {"config.json": b"new"})
    hub.requests.clear()
    assert download(f"me/gpt@{first}") == {"config.json": b"old"}
    assert hub.requests == []
    assert download("me/gpt") == {"config.json": b"new"}


def test_revision_is_pinned_to_its_commit(hub):
    tag = hub.commit("me/gpt", {"config.json": b"1"}, revision="v1.0")
    hub.commit("me/gpt", {"config.json": b"2"})
    assert str(pin(Repository(kind="model", name="me/gpt", revision="v1.0"))) == f"me/gpt@{tag}"
    assert download("me/gpt@v1.0") == {"config.json": b"1"}


@pytest.mark.parametrize("text", ["me/gpt@v9", f"me/gpt@{'0' * 40}"])
def test_unknown_revision_is_refused(text, hub):
    hub.commit("me/gpt", FILES)
    with pytest.raises(ValueError, match=f"^{text}: the model me/gpt has no revision .* 'hf down"):
        download(text)


def test_unknown_repository_is_refused(hub):
    with pytest.raises(ValueError, match="^me/none is neither a path .*'hf download me/none'$"):
        download("me/none")


def test_private_repository_needs_the_token(hub, monkeypatch):
    hub.commit("me/own", FILES, is_private=True)
    with pytest.raises(ValueError, match=r"if it is private, log in with 'hf auth login' or set"):
        download("me/own")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert [*download("me/own")] == SAFE


def test_gated_repository_needs_the_token(hub, monkeypatch):
    hub.commit("me/gated", FILES, is_gated=True)
    gated = f"is gated, .* at {hub.url}/me/gated, log in with 'hf auth login' .* 'hf download me/g"
    with pytest.raises(ValueError, match=gated):
        download("me/gated")
    pinned = pin(Repository(kind="model", name="me/gated"))
    with pytest.raises(ValueError, match=gated):
        check_access(pinned, SAFE)
    assert hub.downloads() == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_access(pinned, SAFE)
    assert [*download("me/gated")] == SAFE


def test_wrong_token_is_refused_without_showing_it(hub, monkeypatch):
    hub.commit("me/gpt", FILES)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match=r"refuses your token; log in with 'hf auth") as raised:
        download("me/gpt")
    assert "hf_wrong" not in str(raised.value)


def test_offline_reads_the_cache(hub, monkeypatch, tmp_path):
    hub.commit("me/gpt", FILES)
    files = download("me/gpt")
    use_hub(monkeypatch, hub.url, tmp_path / "hf_home", is_offline=True)
    hub.requests.clear()
    assert download("me/gpt") == files
    assert hub.requests == []


def test_offline_without_the_files_is_refused(hub, monkeypatch, tmp_path):
    hub.commit("me/gpt", FILES)
    pinned = pin(Repository(kind="model", name="me/gpt"))
    fetch(pinned, ["config.json"])
    use_hub(monkeypatch, hub.url, tmp_path / "hf_home", is_offline=True)
    with pytest.raises(ConnectionError, match=r"HF_HUB_OFFLINE is set; run 'hf download me/gpt -"):
        fetch(pinned, SAFE)
    with pytest.raises(ConnectionError, match=r"HF_HUB_OFFLINE is set; run 'hf download me/other'"):
        download("me/other")


def test_cache_without_a_list_of_files_has_some_files(hub, monkeypatch, tmp_path):
    commit = hub.commit("me/gpt", FILES)
    huggingface_hub.hf_hub_download("me/gpt", "config.json")
    pinned = Repository(kind="model", name="me/gpt", revision=commit)
    use_hub(monkeypatch, hub.url, tmp_path / "hf_home", is_offline=True)
    assert cached_files(pinned) == ["config.json"]
    assert (fetch(pinned, ["config.json"]) / "config.json").read_bytes() == FILES["config.json"]
    with pytest.raises(ConnectionError, match=r"HF_HUB_OFFLINE is set; run 'hf download me/gpt -"):
        list_files(pinned)
    assert cached_files(Repository(kind="model", name="me/none", revision=commit)) == []


def test_hub_without_a_network_is_refused_unless_cached(hub, monkeypatch, tmp_path, closed_port):
    hub.commit("me/gpt", FILES)
    files = download("me/gpt")
    use_hub(monkeypatch, f"http://127.0.0.1:{closed_port}", tmp_path / "hf_home")
    assert download("me/gpt") == files
    with pytest.raises(ConnectionError, match=f"{closed_port} cannot be reached .*refused.*; run"):
        download("me/other")
