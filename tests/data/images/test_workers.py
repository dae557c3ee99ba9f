"""Worker processes: results are in order, jax is not imported, and no process is left behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from data.images.workers import Workers

ROOT = Path(__file__).parents[3]


class Target:
    """The object whose methods the workers call in these tests."""

    def __init__(self, added: int):
        self._added = added

    def add(self, value: int) -> int:
        time.sleep(0.05 * (value % 3))  # Some later calls finish before earlier ones.
        return value + self._added

    def arrays(self, size: int) -> dict:
        return {"a": np.arange(size, dtype=np.uint8), "b": np.zeros((2, 0), np.float32)}

    def process(self, what: str) -> tuple[int, list[str]]:
        return os.getpid(), sorted({name.partition(".")[0] for name in sys.modules})

    def fail(self, what: str) -> None:
        raise ValueError(f"{what} was not right")

    def fail_oddly(self, what: str) -> None:
        class Odd(Exception):
            pass

        raise Odd(what)

    def kill(self, what: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def workers(count=2):
    return Workers(count, {"one": Target(1), "ten": Target(10)}, f"images.num_workers={count}")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pids, within_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def test_results_are_returned_in_the_order_of_requests():
    pool = workers(3)
    assert pool.map("one", "add", range(12)) == list(range(1, 13))
    assert pool.map("ten", "add", [5]) == [15]
    found = pool.map("one", "arrays", [10**6, 3])
    np.testing.assert_array_equal(found[0]["a"], np.arange(10**6, dtype=np.uint8))
    assert found[1]["a"].tolist() == [0, 1, 2] and found[1]["b"].shape == (2, 0)
    assert found[0]["a"].flags.writeable


@pytest.mark.parametrize("num_rows, count", [(64, 16), (64, 3), (7, 2), (5, 16), (1, 1), (256, 2)])
def test_all_workers_get_an_even_number_of_rows(num_rows, count):
    shares = workers(count).shares(range(num_rows))
    assert [row for share in shares for row in share] == list(range(num_rows))
    assert all(len(share) % 2 == 0 for share in shares[:-1])
    # Two rows are not split, because they may be a pair.
    assert len(shares) >= min(count, -(-num_rows // 2)) - (num_rows < 4 * count)
    assert max(map(len, shares)) <= 16


def test_workers_do_not_import_jax_and_exit_with_their_pool():
    pool = workers()
    answers = pool.map("one", "process", ["?"] * 8)
    pids = {pid for pid, _ in answers}
    assert len(pids) <= 2 and all(map(is_running, pids)) and os.getpid() not in pids
    for _, modules in answers:
        assert not {"jax", "jaxlib", "flax", "grain", "tensorflow", "torch"} & set(modules)
    del pool
    gc.collect()
    assert ends(pids)


def test_image_reading_modules_import_neither_jax_nor_grain():
    modules = (
        "data.images.image_corpus, data.images.folder, data.images.own, data.images.tfds_images"
    )
    program = (
        f"import sys, {modules}, tensorflow_datasets; heavy = {{'jax', 'grain', 'tensorflow'}}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_worker_error_is_raised_in_the_parent():
    pool = workers(1)
    with pytest.raises(ValueError, match="this was not right") as caught:
        pool.map("one", "fail", ["this"])
    assert "in a worker process" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Odd: that"):
        pool.map("one", "fail_oddly", ["that"])
    assert pool.map("one", "add", [1]) == [2], "it goes on after an error"


def test_killed_worker_is_reported_without_waiting():
    pool = workers(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"images\.num_workers=1 ended unexpectedly"):
            pool.map("one", "kill", ["now"])


PROGRAM = """
    import os, sys, time
    sys.path.insert(0, {root!r})
    from data.images.workers import Workers
    from tests.data.images.test_workers import Target
    pool = Workers(2, {{"one": Target(1)}}, "images.num_workers=2")
    pids = set()
    while len(pids) < 2:
        pids |= {{pid for pid, _ in pool.map("one", "process", ["?"] * 4)}}
    print(*pids, flush=True)
    {end}
"""


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "end",
    ["", "raise SystemExit(3)", "os._exit(3)", "time.sleep(100)"],
    ids=["end", "exit", "exit at once", "kill"],
)
def test_workers_exit_however_the_program_ends(end):
    program = textwrap.dedent(PROGRAM).format(root=str(ROOT), end=end)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        if "sleep" in end:
            # Workers ignore signals to the whole job; the program handles them.
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)
            assert all(map(is_running, pids))
            process.kill()
        assert ends(pids)
