"""Checks that a run fits into memory, and with `memory.placement=auto` makes it fit.

Memory is checked twice: as estimated from a trace of the step (`check_estimate`), and again after
it is compiled (`check_compiled`). The candidates that `search` chooses from are in
train/planning/memory/search.py.
"""

import itertools
import logging
from collections.abc import Callable

from predict.memory.memory_estimate import Needs
from sharding.memory import AUTO
from train.config.schema import RunConfig
from train.planning.memory.budget import (
    TOLERANCE,
    Budget,
    compiled_bytes,
    fits,
    needs_of,
    pressure_of,
    size,
    table,
)
from train.planning.memory.search import Candidate, MemorySearch, Setting
from train.run.run import Run
from train.run.run_facts import MemoryFacts, finite_or_none

#: How many candidates are compiled before the search gives up.
_MAX_COMPILED = 4

_log = logging.getLogger(__name__)


class MemoryFitter:
    """Checks runs against a memory budget, and searches for runs that fit.

    Args:
        assemble: builds the run of a config, or raises ValueError. The search calls it for every
            setting that it tries, and so does an error message that lists settings that fit.
        budget: memory that the run may use.

    Attributes:
        report: memory of the last run that was found to fit, and its settings, as text.
    """

    def __init__(self, assemble: Callable[[RunConfig], Run], budget: Budget):
        self._assemble = assemble
        self._budget = budget
        self.report = ""

    def check_estimate(self, run: Run) -> None:
        """Check the estimated memory of a run's training step.

        Args:
            run: run that need not be compiled.

        Raises:
            ValueError: the estimate exceeds the budget by more than TOLERANCE. The message lists
                settings that would fit, if there are any.
        """
        needs = needs_of(run, self._budget)
        # The compiler may need less device memory than estimated, so there is a tolerance. Host
        # memory is known exactly.
        if not fits(needs, self._budget, ratio=1 / (1 + TOLERANCE)):
            raise ValueError(self._refusal(run, None))
        self.report = table(needs, self._budget)

    def search(self, config: RunConfig) -> Run:
        """Return the run of the fastest candidate that fits, for `memory.placement=auto`.

        It assembles and traces many runs, and compiles those that fit by their estimate until one
        fits as compiled.

        Args:
            config: run's config, whose `memory.placement` is "auto".

        Raises:
            ValueError: no candidate fits.
        """
        assert config.memory.placement == AUTO
        search = MemorySearch(config, self._assemble, self._budget)
        for candidate in itertools.islice(search.fitting(), _MAX_COMPILED):
            compiled = compiled_bytes(candidate.run)
            ratio = 1.0 if compiled is None else compiled / candidate.needs.device_bytes
            if fits(candidate.needs, self._budget, ratio=ratio):
                description = self._describe(search, candidate)
                rows = table(candidate.needs, self._budget)
                self.report = f"plan    {description}\n{rows}"
                return candidate.run
            search.correction = max(search.correction, ratio)
        raise ValueError(self._nothing_fits(search))

    def check_compiled(self, run: Run) -> None:
        """Check the memory of compiled steps.

        Args:
            run: compiled run.

        Raises:
            ValueError: its steps exceed the budget.
        """
        compiled = compiled_bytes(run)
        if compiled is None:
            return
        _log.info("memory  %s a device, as compiled", size(compiled))
        if warning := pressure_of(run, self._budget):
            _log.warning("memory  %s", warning)
        if compiled > self._budget.device_bytes:
            raise ValueError(self._refusal(run, compiled))

    def remedies(self, run: Run, compiled: int) -> tuple[str, ...]:
        """Return settings with which a run would fit, as text; () if none are known.

        Args:
            run: run whose steps exceed the budget.
            compiled: bytes per device of its compiled steps.
        """
        search, candidates = self._fitting(run, compiled)
        return tuple(self._describe(search, candidate) for candidate in candidates)

    def facts(self, run: Run) -> MemoryFacts:
        """Return the memory of a compiled run for its record. All processes must call this."""
        needs = needs_of(run, self._budget)
        return MemoryFacts(
            planned_device={label: int(size) for label, size in needs.device.items()},
            planned_host={label: int(size) for label, size in needs.host.items()},
            compiled_device=compiled_bytes(run),
            device_budget=finite_or_none(self._budget.device_bytes),
        )

    def _refusal(self, run: Run, compiled: int | None) -> str:
        """Return the error message for a run that does not fit, with changes that would make it.

        Args:
            compiled: bytes per device of the compiled steps, if they are known.
        """
        search, candidates = self._fitting(run, compiled)
        if not candidates:
            return self._nothing_fits(search)
        needs = needs_of(run, self._budget)
        how = "" if compiled is None else f", and {size(compiled)} a device as compiled"
        _log.warning("%s", table(needs, self._budget))
        choices = "; ".join(self._describe(search, candidate) for candidate in candidates)
        return (
            f"a step takes more memory than there is, {self._compared(needs)}{how}; each of these "
            f"would fit: {choices}; memory.placement=auto chooses the fastest that fits, and "
            "memory.device_budget and memory.host_budget set the budget"
        )

    def _fitting(self, run: Run, compiled: int | None) -> tuple[MemorySearch, list[Candidate]]:
        """Return candidates with which a run would fit, and the search that found them.

        Arguments as for `_refusal`. Each candidate changes one lever, unless only several do.
        """
        search = MemorySearch(run.config, self._assemble, self._budget)
        if compiled is not None:
            needs = needs_of(run, self._budget)
            search.correction = max(1.0, compiled / needs.device_bytes)
        return search, search.single() or list(itertools.islice(search.fitting(), 1))

    def _nothing_fits(self, search: MemorySearch) -> str:
        leanest = search.leanest
        factor = search.correction
        reads_images = leanest.run.config.data.reads_images
        corrected = f", and compiled steps took {factor:.2f} times their estimate" * (factor > 1)
        is_host = leanest.needs.host_bytes > self._budget.host_bytes
        parts = leanest.needs.host if is_host else leanest.needs.device
        to_shrink = "images.size" if reads_images else "data.sequence_length"
        largest_part = (
            f"{max(parts, key=lambda k: parts[k])} {'in host memory' if is_host else ''}".strip()
        )
        _log.warning("%s", table(leanest.needs, self._budget))
        return (
            "no plan fits into memory; the leanest, "
            f"{_text(leanest.setting) or 'as configured'}, takes {self._compared(leanest.needs)}"
            f"{corrected}; the largest part is {largest_part}; use more devices (mesh.pipeline and "
            "mesh.model split the model, mesh.fsdp with memory.zero_stage=3 splits its state), a "
            f"smaller model, or a smaller {to_shrink} or data.global_batch_size"
        )

    def _compared(self, needs: Needs) -> str:
        """Return the memory that a step needs and its budget, per device and per host."""
        budget = self._budget
        return (
            f"{size(needs.device_bytes)} a device (budget: {size(budget.device_bytes)}) and "
            f"{size(needs.host_bytes)} a host (budget: {size(budget.host_bytes)})"
        )

    def _describe(self, search: MemorySearch, candidate: Candidate) -> str:
        slower = candidate.step_time_s / max(search.base.step_time_s, 1e-12)
        return (
            f"{_text(candidate.setting)}: {size(candidate.needs.device_bytes)} a device, "
            f"{slower:.2f} × the step time, by the rates of {search.machine.device_kind}"
        )


def _text(setting: Setting) -> str:
    return " ".join(f"--config.{key}={value}" for key, value in setting.items())
