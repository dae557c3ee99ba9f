"""Test configuration: eight simulated CPU devices, set before jax initializes its backends.

With TAIBAI_TEST_DEVICE=gpu, arrays are on real GPUs by default (`make test-device`).
"""

import collections
import ctypes
import gc
import logging
import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import hypothesis  # noqa: F401  before gc.freeze, after which it cannot register selenium's trio
import jax
import pytest
from jax._src import compilation_cache

from distributed.compilation_cache import use_compilation_cache
from distributed.variables import CPU_XLA_FLAGS
from fields.paths import cache_path
from tests.drawn import SEED, draw_cases, take_turns
from tests.hub import StandInHub, use_hub
from tests.runs import write_corpus
from tests.shared_steps import assemble_with_shared_steps
from untrusted import imports

# Compiled code runs only briefly in tests, but generating optimized machine code took two thirds of
# the total time. The XLA passes before that, which decide collectives, memory and FLOPs, still run.
_FLAGS = {**CPU_XLA_FLAGS, "xla_backend_optimization_level": 0}
if platform.machine() == "x86_64":
    # XLA's older emitters compile twice as fast. But they use fused multiply-adds in some programs
    # and not in others, so that the last bit of an initial value would depend on the mesh. Plain
    # AVX has no fused multiply-add.
    _FLAGS["xla_cpu_max_isa"] = "AVX"
    if jax.__version_info__ < (0, 11):  # later versions only have the new emitters
        _FLAGS["xla_cpu_use_fusion_emitters"] = "false"
_PLATFORMS = "cpu"
if os.environ.get("TAIBAI_TEST_DEVICE") == "gpu":
    _PLATFORMS = "cuda,cpu"
    _FLAGS = CPU_XLA_FLAGS
os.environ["XLA_FLAGS"] = " ".join(f"--{name}={value}" for name, value in _FLAGS.items())
os.environ["JAX_PLATFORMS"] = _PLATFORMS
# PyTorch's threads would wait for cores that the other worker uses.
os.environ.setdefault("OMP_NUM_THREADS", "1")
jax.config.update("jax_platforms", _PLATFORMS)
jax.config.update("jax_num_cpu_devices", 8)
# Recording the source lines of every operation takes a tenth of the time to trace a program.
jax.config.update("jax_traceback_in_locations_limit", 0)
# jax keeps millions of objects for its programs, which the garbage collector would scan repeatedly.
gc.set_threshold(100_000, 20, 100)
for _signal in (signal.SIGHUP, signal.SIGINT):
    # Programs that tests start would inherit ignored signals, which nohup and background jobs have.
    if signal.getsignal(_signal) == signal.SIG_IGN:
        signal.signal(_signal, lambda *_: None)
jax.devices()  # initialize now, before a command-line test can choose another number


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A stand-in for the Hugging Face hub, which huggingface_hub uses with an empty cache."""
    with StandInHub() as server:
        use_hub(monkeypatch, server.url, tmp_path / "hf_home")
        yield server


@pytest.fixture(scope="session")
def corpus_overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that train on a small text, with a cache of its own."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Caches compiled programs, so that tests that share a program compile it once.

    Both workers and the commands that tests start use the same directory. That is safe because
    files are written atomically, which jax's own cache does not do.
    """
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # of all workers
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
    use_compilation_cache(cache_path() / "xla")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """Keep compiled programs and data in `tmp_path/taibai`; undo the change of jax's cache."""
    config: Any = jax.config
    before = config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation_cache, "get_file_cache", compilation_cache.get_file_cache)
    compilation_cache.reset_cache()
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def shared_steps():
    """Let the runs of a file share traced and compiled steps with those of other files."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("train.build", "tests.runs"):
            patch.setattr(f"{module}.assemble_run", assemble_with_shared_steps)
        yield


@pytest.fixture(autouse=True)
def log_handlers():
    """Remove log handlers that a command line installed: they refer to a closed stream."""
    before = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = before


@pytest.fixture(autouse=True)
def import_record(monkeypatch):
    """Let each test begin with an empty record of the imports that the user allows."""
    monkeypatch.setattr(imports, "_record", imports._Record())


def case_of(item: pytest.Item) -> str | None:
    """Return the id of a parametrized test's case; None if it has no parameters."""
    return (
        item.callspec.id
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else None
    )


def _memory_in_use() -> int:
    """Return the bytes of this process that are in memory; 0 where Linux does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


#: Bytes in use after which the programs of earlier tests are dropped.
_memory_limit = 3 * 2**30


def pytest_runtest_logstart() -> None:
    """Exclude the objects of earlier tests from garbage collection.

    Modules and the programs that jax keeps are millions of objects, and each full collection, which
    some of our code asks for, would scan them for seconds. Whenever they take 2 GiB more, they are
    dropped: the programs of thousands of tests do not fit into memory.
    """
    global _memory_limit
    if _memory_in_use() > _memory_limit:
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # return what was freed to the operating system
        _memory_limit = _memory_in_use() + 2 * 2**30
    gc.freeze()


#: Files whose tests send signals at a moment, or limit seconds, of processes that share the cores
#: with other tests. A failed test of these runs again, up to twice; the output tells.
_TIMED = {
    "test_campaign",
    "test_chat",
    "test_chat_limits",
    "test_failures",
    "test_handshake",
    "test_huge_configs",
    "test_launchers",
    "test_limited",
    "test_local",
    "test_local_signals",
    "test_mesh",
    "test_message_socket",
    "test_phases",
    "test_processes",
    "test_readers",
    "test_sbatch_script",
    "test_sbatch_signals",
    "test_server",
    "test_slurm",
    "test_stop_signals",
    "test_store_runs",
    "test_streams",
    "test_taibai",
    "test_watchdog",
    "test_workers",
}


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply the markers of tiers, and run the longest tests first.

    `thorough(but=ids)` names the cases of a parametrized test that stay among the quick tests,
    `slow(only=ids)` those that CI does not run, and `drawn(count)` how many of the others CI runs;
    thorough tests without a draw take turns (tests/drawn.py). If the longest tests ran last, one
    worker would still be busy when the others have finished.
    """
    for item in items:
        for marker in [*item.own_markers]:
            is_kept = case_of(item) in marker.kwargs.get("but", ())
            is_other = case_of(item) not in marker.kwargs.get("only", [case_of(item)])
            if (marker.name == "thorough" and is_kept) or (marker.name == "slow" and is_other):
                item.own_markers.remove(marker)
    draw_cases(items)
    take_turns(items)
    for item in items:
        if item.path.stem in _TIMED:
            item.add_marker(pytest.mark.flaky(reruns=2))
    longest = (
        "test_slurm",
        "test_stop_signals",
        "test_resume",
        "test_parity",
        "test_models",
        "test_executor",
    )
    items.sort(key=lambda item: item.path.stem not in longest)


def pytest_report_header() -> str:
    """Print the seed of the drawn cases."""
    return (
        f"cases of tests with many cases, and thorough tests: TAIBAI_TEST_SEED={SEED} "
        "(-m slow runs the others)"
    )


@pytest.fixture
def compilations():
    """The compile times in seconds of every program that is compiled during the test."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    monitoring: Any = jax.monitoring
    monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    monitoring.unregister_event_duration_listener(listen)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--budget`, with which the summary compares the time of the run."""
    parser.addoption("--budget", type=float, metavar="MINUTES", help="time that the tests may take")


_start = time.monotonic()
#: Test file -> seconds of its tests, with their fixtures, over all workers.
_seconds_of_files: dict[str, float] = collections.defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the time of each test file."""
    _seconds_of_files[report.location[0]] += report.duration


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the time of the run, its budget and the slowest files."""
    if (budget := config.getoption("--budget")) is None:
        return
    minutes = (time.monotonic() - _start) / 60
    terminalreporter.section(f"{minutes:.1f} minutes of a budget of {budget:g}; slowest files")
    slowest = sorted(_seconds_of_files.items(), key=lambda item: -item[1])
    for file, seconds in slowest[:10]:
        terminalreporter.line(f"{seconds:6.0f} s  {file}")


@pytest.fixture
def memory_store() -> Iterator[Any]:
    """The file system of fsspec in memory, which all code of a process shares; empty."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]
