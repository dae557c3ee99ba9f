"""Copies of runs in a store: which checkpoints are transferred. The store is fsspec's in memory."""

from pathlib import Path

import pytest

from checkpoint import run_copies
from checkpoint.layout import steps_in
from checkpoint.run_copies import (
    download_run,
    is_run_url,
    open_run_copy,
    run_path,
    upload_checkpoints,
    upload_records,
)
from untrusted.local_copies import LocalCopy
from untrusted.stores import Store

pytestmark = pytest.mark.usefixtures("memory_store")


def make_copy(machine: Path) -> LocalCopy:
    """Return the copy that a machine has of the run."""
    return LocalCopy(Store("memory://bucket/run"), machine, marker_of=run_copies._marker_of)


def save(copy: LocalCopy, step: int, text: str = "", *, is_complete: bool = True) -> None:
    """Write a checkpoint, or the first files of one."""
    folder = copy.directory / "checkpoints" / str(step)
    (folder / "state").mkdir(parents=True, exist_ok=True)
    (folder / "state" / "array").write_text(text or str(step))
    if is_complete:
        (folder / "checksums.sha256").write_text(text or str(step))


def steps(copy: LocalCopy) -> list[int]:
    return steps_in(copy.directory / "checkpoints")


def newest(complete: list[int]) -> list[int]:
    return complete[-1:]


def test_incomplete_checkpoint_is_neither_uploaded_nor_downloaded(tmp_path):
    a = make_copy(tmp_path / "a")
    save(a, 1)
    save(a, 2, is_complete=False)
    upload_checkpoints(a)
    assert sorted(a.store.list()) == ["checkpoints/1/checksums.sha256", "checkpoints/1/state/array"]
    # A process was killed while it uploaded step 2.
    a.store.write("checkpoints/2/state/array", b"2")
    b = make_copy(tmp_path / "b")
    download_run(b, newest)
    assert steps(b) == [1]
    with pytest.raises(ValueError, match="no complete checkpoint of step 2, but of 1"):
        download_run(b, lambda _: [2])
    # The next start of the run deletes it.
    open_run_copy(b)
    assert steps(b) == [1] and "checkpoints/2/state/array" not in b.store.list()


def test_only_chosen_checkpoints_are_downloaded(tmp_path):
    a = make_copy(tmp_path / "a")
    for step in (1, 2, 3):
        save(a, step)
    (a.directory / "config.yaml").write_text("x")
    upload_records(a)
    upload_checkpoints(a)
    b = make_copy(tmp_path / "b")
    download_run(b, lambda _: ())
    assert steps(b) == [] and (b.directory / "config.yaml").exists()
    download_run(b, newest)
    assert steps(b) == [3]
    open_run_copy(b)
    assert steps(b) == [1, 2, 3]


def test_checkpoint_that_was_not_uploaded_is_kept_unless_the_run_went_on_elsewhere(tmp_path):
    a = make_copy(tmp_path / "a")
    save(a, 1)
    upload_checkpoints(a)
    save(a, 2)
    open_run_copy(a)
    assert steps(a) == [1, 2]
    b = make_copy(tmp_path / "b")
    open_run_copy(b)
    save(b, 3)
    upload_checkpoints(b)
    open_run_copy(a)
    assert steps(a) == [1, 3]


def test_old_and_diverged_checkpoints_are_deleted_and_renamed_in_the_store(tmp_path):
    a = make_copy(tmp_path)
    for step in (1, 2):
        save(a, step)
    upload_checkpoints(a)
    folder = a.directory / "checkpoints"
    (folder / "1" / "checksums.sha256").unlink()
    (folder / "1" / "state" / "array").unlink()
    (folder / "2").rename(folder / "2.diverged")
    upload_checkpoints(a)
    assert {name.split("/")[1] for name in a.store.list()} == {"2.diverged"}
    b = make_copy(tmp_path / "b")
    open_run_copy(b)
    assert steps(b) == []


def test_records_leave_checkpoints_and_files_of_this_machine_alone(tmp_path):
    a = make_copy(tmp_path)
    save(a, 1)
    upload_checkpoints(a)
    for name in ("lock", "watchdog/0.json", ".metrics.jsonl.tmp", "metrics.jsonl"):
        (a.directory / name).parent.mkdir(exist_ok=True)
        (a.directory / name).write_text("x")
    (a.directory / "checkpoints" / "1" / "state" / "array").unlink()
    upload_records(a)
    assert sorted(a.store.list()) == [
        "checkpoints/1/checksums.sha256",
        "checkpoints/1/state/array",
        "metrics.jsonl",
    ]


def test_copy_that_a_run_is_writing_is_used_as_it_is(tmp_path):
    a = make_copy(tmp_path)
    save(a, 1)
    upload_checkpoints(a)
    save(a, 2)
    with open(a.directory / "lock", "w") as file:
        assert run_copies.try_lock(file, a.directory / "lock")
        a.store.write("checkpoints/3/state/array", b"3")
        a.store.write("checkpoints/3/checksums.sha256", b"3")
        download_run(a, newest)
        assert steps(a) == [1, 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/run", True),
        ("gs://bucket/a/run/checkpoints/300", True),
        ("s3://bucket", False),
        ("s3://bucket/runs/*", False),
        ("memory://bucket/run", False),
        ("runs/a", False),
    ],
)
def test_url_of_a_run(text, expected):
    assert is_run_url(text) is expected
    if not expected and not text.startswith("runs"):
        with pytest.raises(Exception, match="is a URL"):
            run_path(text)
