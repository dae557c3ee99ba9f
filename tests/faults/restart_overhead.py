"""Measures starts of a run with a cold and with a warm compilation cache."""

import shutil
import statistics

from tests.faults.runs import DisturbedRun, Reference, Setting
from tests.faults.start import say

NUM_OVERHEAD_ROUNDS = 3


def restart_overhead(setting: Setting) -> dict[str, dict[str, float | None]]:
    """Measure the time from the start of a process to its first step.

    The run starts from scratch each time, so no checkpoint is restored.

    Args:
        setting: setting of the runs.

    Returns:
        State of the compilation cache, "cold" or "warm" -> median, min and max in seconds.
    """
    times_s: dict[str, list[float]] = {"cold": [], "warm": []}
    for i in range(NUM_OVERHEAD_ROUNDS):
        shutil.rmtree(setting.cache / "xla", ignore_errors=True)
        for cache, found_s in times_s.items():
            directory = setting.scratch / f"overhead_{cache}_{i}"
            directory.mkdir()
            empty = Reference(trajectory={}, digests={}, start_s=0.0, save_s=0.0)
            start = DisturbedRun(setting, empty, directory).start()
            try:
                start.wait_for_step(2)  # by then, the compiled step is in the cache
            finally:
                start.kill()
            assert start.first_step_s is not None
            found_s.append(start.first_step_s)
            say(f"first step after {start.first_step_s:.1f} s, {cache} compilation cache")
            shutil.rmtree(directory)
    return {
        cache: {"median": statistics.median(found_s), "min": min(found_s), "max": max(found_s)}
        for cache, found_s in times_s.items()
    }
