"""Files in received directories: links, named pipes, devices and huge files."""

import errno
import os
import resource
from pathlib import Path

import pytest

from convert import from_hf, to_hf
from data.text.tokenization.file_tokenizer import find_tokenizer
from tests.convert import cases
from untrusted.documents import read_json_lines
from untrusted.files import (
    check_link,
    copy_file,
    digest_of,
    open_in_place,
    open_regular,
    read_bytes,
    write_text,
)


@pytest.fixture
def secret(tmp_path):
    """A private file outside of the received directory `tmp_path/received`, which is created."""
    (tmp_path / "received").mkdir()
    (tmp_path / "secret").write_text("private")
    return tmp_path / "secret"


def test_links_that_lead_outside_are_refused(secret, tmp_path):
    received = tmp_path / "received"
    (received / "inside").write_text("x")
    (received / "link").symlink_to("inside")
    (received / "out").symlink_to(secret)
    (received / "folder").symlink_to(tmp_path)
    (received / "circle").symlink_to("circle")
    check_link(received / "link", received)
    check_link(received / "absent", received)
    for name in ("out", "folder/secret", "../secret", "circle"):
        with pytest.raises(ValueError, match="outside|cannot be resolved"):
            check_link(received / name, received)


def test_directory_may_be_a_link_itself(secret, tmp_path):
    (tmp_path / "received" / "file").write_text("x")
    (tmp_path / "alias").symlink_to("received")
    assert read_bytes(tmp_path / "alias" / "file", within=tmp_path / "alias") == b"x"


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_link_that_cannot_be_read_does_not_lead_outside(tmp_path, monkeypatch, code):
    """The error says nothing about the link, and the next attempt may succeed."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "directory")
    lstat = os.lstat

    def fail_once(path, **options):
        if os.fspath(path).endswith("link"):
            monkeypatch.setattr(os, "lstat", lstat)
            raise OSError(code, os.strerror(code), path)
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", fail_once)
    file = tmp_path / "link" / "file"
    with pytest.raises(OSError, match=os.strerror(code)):
        check_link(file, tmp_path / "link")
    check_link(file, tmp_path / "link")


def test_links_into_the_blobs_of_a_hub_cache_are_followed(secret, tmp_path):
    snapshot = tmp_path / "models--gpt2" / "snapshots" / "1f2e"
    blobs = tmp_path / "models--gpt2" / "blobs"
    for directory in (snapshot, blobs):
        directory.mkdir(parents=True)
    (blobs / "a9b8").write_text("x")
    (snapshot / "config.json").symlink_to("../../blobs/a9b8")
    assert read_bytes(snapshot / "config.json", within=snapshot) == b"x"
    (blobs / "evil").symlink_to(secret)
    (snapshot / "vocab.txt").symlink_to("../../blobs/evil")
    with pytest.raises(ValueError, match="outside"):
        read_bytes(snapshot / "vocab.txt", within=snapshot)


def test_errors_of_reading_and_writing_name_the_file(tmp_path):
    memory = Path("/proc/self/mem")  # a regular file whose first byte cannot be read
    for read in (read_bytes, digest_of, read_json_lines):
        with pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'"):
            read(memory)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # stands for a disk that fails
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/\.config\.yaml\.tmp'"):
            write_text(tmp_path / "config.yaml", "long" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ValueError, match="is not a regular file"):
            open_regular(tmp_path / name)
        with pytest.raises(ValueError, match="is not a regular file|is a symbolic link"):
            open_in_place(tmp_path / name, os.O_WRONLY)
    with pytest.raises((ValueError, IsADirectoryError)):
        open_regular(tmp_path)


def test_only_files_with_one_name_are_opened_in_place(tmp_path):
    (tmp_path / "log").write_text("line")
    os.close(open_in_place(tmp_path / "log", os.O_WRONLY))
    (tmp_path / "other").hardlink_to(tmp_path / "log")
    for name in ("log", "other"):
        with pytest.raises(ValueError, match=rf"{name} is one of 2 names \(hard links\)"):
            open_in_place(tmp_path / name, os.O_WRONLY)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder is not a regular file"):
        open_in_place(tmp_path / "folder", os.O_RDWR)


def test_large_files_are_refused_without_reading_them(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"has 1,099,511,627,776 bytes, but at most 16,777,216"):
        read_bytes(tmp_path / "sparse")


def test_large_files_are_not_copied(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"sparse is too large: it has 1,099,511,627,776 bytes"):
        copy_file(tmp_path / "sparse", tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["sparse"]


def test_writing_replaces_links_and_leaves_their_targets(secret, tmp_path):
    received = tmp_path / "received"
    for name in ("config.yaml", ".config.yaml.tmp"):
        (received / name).symlink_to(secret)
    write_text(received / "config.yaml", "new")
    assert secret.read_text() == "private"
    assert (received / "config.yaml").read_text() == "new"
    assert not (received / "config.yaml").is_symlink()
    assert [path.name for path in received.iterdir()] == ["config.yaml"]


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_text(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_copies_are_made_of_regular_files_inside_only(secret, tmp_path):
    received = tmp_path / "received"
    (received / "vocab.txt").symlink_to(secret)
    with pytest.raises(ValueError, match="outside"):
        copy_file(received / "vocab.txt", tmp_path / "copy", within=received)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "config.json", "merges.txt"])
def test_model_with_a_link_to_a_private_file_is_not_converted(name, secret, tmp_path, capsys):
    received = tmp_path / "received"
    cases.save("gpt2", received)
    (received / name).unlink(missing_ok=True)
    (received / name).symlink_to(secret)
    assert from_hf.main([str(received), str(tmp_path / "ours")]) == 2
    assert f"{name} is a link to {secret}, outside" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


@pytest.fixture
def run(tmp_path):
    """A run, converted from a model with a tokenizer."""
    cases.save("gpt2", tmp_path / "theirs")
    (tmp_path / "theirs" / "vocab.txt").write_text("public")
    assert from_hf.main([str(tmp_path / "theirs"), str(tmp_path / "received" / "run")]) == 0
    return tmp_path / "received" / "run"


@pytest.mark.parametrize(
    "link", ["hf", "hf/vocab.txt", "checkpoints", "checkpoints/0", "checkpoints/0/state/more"]
)
def test_run_with_a_link_to_a_private_directory_is_not_exported(
    link, secret, run, tmp_path, capsys
):
    private = tmp_path / "private"
    if (run / link).exists():
        (run / link).rename(private)
        (run / link).symlink_to(private)
    else:
        (run / link).symlink_to(secret)
    for path in (run, run / "checkpoints" / "0"):
        assert to_hf.main([str(path), str(tmp_path / "out")]) == 2
        assert f"{run / link} is a link to" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=f"{run / link} is a link to .*, outside"):
        to_hf.convert(run, tmp_path / "out")


def test_run_that_the_user_names_by_a_link_is_exported(secret, run, tmp_path):
    (tmp_path / "alias").symlink_to(run)
    (run / "hf").rename(run / "files")
    (run / "hf").symlink_to("files")  # Inside the run.
    assert to_hf.main([str(tmp_path / "alias"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "vocab.txt").read_text() == "public"


def test_tokenizer_of_a_run_may_not_be_a_link_to_a_private_file(secret, tmp_path):
    (tmp_path / "received" / "tokenizer.json").symlink_to(secret)
    with pytest.raises(ValueError, match="outside"):
        find_tokenizer(tmp_path / "received")
