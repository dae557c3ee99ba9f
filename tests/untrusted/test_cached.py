"""Cache files with digests, and the cache of compiled programs."""

import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from distributed.compilation_cache import (
    VerifiedCache,
    use_compilation_cache,
    without_compilation_cache,
)
from tests.runs import CONFIG as CONFIG_FILE
from tests.runs import TINY, write_corpus
from train.config.config_files import as_yaml, load
from train.main import main
from untrusted.cached import read_cached, write_cached
from untrusted.files import make_private_directory

CONFIG: Any = jax.config


@pytest.mark.parametrize("plain", [False, True])
def test_damaged_files_are_not_read(plain, tmp_path, caplog):
    path = tmp_path / "file"
    assert read_cached(path, plain=plain) is None
    write_cached(path, b"content", plain=plain)
    assert read_cached(path, plain=plain) == b"content"
    assert path.read_bytes().endswith(b"content") and (path.read_bytes() == b"content") == plain
    for damage in (lambda b: b[:-1], lambda b: b[:-1] + b"T", lambda b: b""):
        write_cached(path, b"content", plain=plain)
        path.write_bytes(damage(path.read_bytes()))
        assert read_cached(path, plain=plain) is None
    assert caplog.text.count("is damaged") == 3


def test_directory_is_created_only_for_the_user(tmp_path):
    make_private_directory(tmp_path / "a" / "cache")
    assert (tmp_path / "a" / "cache").stat().st_mode & 0o777 == 0o700


def test_directories_between_are_created_only_for_the_user_too(tmp_path, usual_umask):
    make_private_directory(tmp_path / "cache" / "xla")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.fixture
def usual_umask():
    """The umask that most systems have: others may read new files."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def compile_program() -> int:
    jax.clear_caches()
    return int(jax.jit(lambda x: jnp.sort(x * 3 + 1)[2])(jnp.arange(5)))


@pytest.mark.thorough
def test_damaged_programs_are_compiled_and_written_again(own_cache, tmp_path, caplog):
    use_compilation_cache(tmp_path / "xla")
    assert compile_program() == 7
    programs = sorted((tmp_path / "xla").iterdir())
    assert programs
    for program in programs:
        program.write_bytes(program.read_bytes()[:-100])
    assert compile_program() == 7
    assert "is damaged (its SHA-256 differs)" in caplog.text
    cache = VerifiedCache(tmp_path / "xla")
    assert all(cache.get(program.stem) is not None for program in programs)


def test_programs_are_neither_read_nor_written_without_the_cache(tmp_path):
    cache = VerifiedCache(tmp_path)
    cache.put("kept", b"program")
    with without_compilation_cache():
        cache.put("new", b"program")
        assert cache.get("kept") is None
    assert cache.get("kept") == b"program"
    assert cache.get("new") is None


def test_two_processes_may_store_the_same_program(tmp_path, monkeypatch):
    def renamed_by_another_process_first(source, target, replace=os.replace):
        replace(source, target)
        replace(source, target)

    monkeypatch.setattr("untrusted.files.os.replace", renamed_by_another_process_first)
    cache = VerifiedCache(tmp_path)
    cache.put("key", b"program")
    assert cache.get("key") == b"program"


@pytest.mark.thorough
@pytest.mark.parametrize("is_received", [False, True])
def test_caches_of_a_run_are_private_and_received_programs_are_not_used(
    is_received, own_cache, usual_umask, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    write_corpus(tmp_path)
    overrides = [*TINY, f"data.paths={tmp_path}/*.txt"]
    arguments = [f"--config={CONFIG_FILE}", *(f"--config.{each}" for each in overrides)]
    data = own = tmp_path / "xdg" / "taibai"
    if is_received:
        data = tmp_path / "received"
        config = load(CONFIG_FILE, [*overrides, f"data.cache_dir={data}"])
        (tmp_path / "config.yaml").write_text(as_yaml(config.to_dict()))
        arguments = [f"--config={tmp_path / 'config.yaml'}"]
    assert main([*arguments, "--fast_dev_run"]) == 0
    assert list((own / "xla").glob("*.program"))
    assert list(data.glob("tokens-*"))
    assert {directory.stat().st_mode & 0o777 for directory in (data, own)} == {0o700}
    if is_received:
        assert not (data / "xla").exists()
        # The user may choose the received directory.
        assert main([*arguments, "--fast_dev_run", f"--config.data.cache_dir={data}"]) == 0
        assert (data / "xla").is_dir()


def test_directory_that_others_may_write_to_is_not_used(own_cache, tmp_path, caplog):
    (tmp_path / "xla").mkdir()
    (tmp_path / "xla").chmod(0o777)
    before = CONFIG.jax_compilation_cache_dir
    with caplog.at_level(logging.WARNING):
        use_compilation_cache(tmp_path / "xla")
    assert CONFIG.jax_compilation_cache_dir == before
    assert "others may write to it and cached programs are code" in caplog.text
