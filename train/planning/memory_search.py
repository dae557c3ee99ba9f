"""Searches for settings with which a run fits into memory (`memory.placement=auto`).

A *lever* is a list of settings of which each needs less memory, and more time, than the one before.
There are four: more microbatches, a higher ZeRO stage, more rematerialization, and host memory. A
*level* is a position on a lever; level 0 is the configured value. A *plan* has one level per lever:

    lever      microbatches   ZeRO stage   remat                       placement
    level 0    8              0            none                        device    (as configured)
    level 1    16             2            dots                        host, 0.5
    level 2    32             3            attention,...,qkv (names)   host, 1.0
    level 3                                full                        host, 1.0 and 0.5
    level 4                                                            host, 1.0 and 1.0

Here the plan (1, 0, 3, 0) is 16 microbatches, ZeRO stage 0, remat=full, everything on the device.

Memory and step time of a plan are estimated from a trace of the step. Only the chosen plan is
compiled.
"""

import bisect
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, cast

from sharding.estimate.memory_estimate import Needs
from sharding.memory import AUTO
from train.config.schema import RunConfig
from train.optim.optimizer import ELEMENTWISE
from train.planning.memory_budget import (
    TOLERANCE,
    Budget,
    compiled_bytes,
    excess,
    needs_of,
    pressure_of,
    size,
    table,
)
from train.planning.step_time import rates_of
from train.run.run import Run

_ON_DEVICE = {"memory.placement": "device", "memory.offload_parameters_fraction": 0.0}
#: How many plans are compiled before the search gives up.
_MAX_COMPILED = 4

_log = logging.getLogger(__name__)

#: Settings of a config, such as {"train.remat": "full"}.
Setting = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that was traced: its settings, memory and time."""

    setting: Setting  # changes to the config
    run: Run
    needs: Needs  # estimated memory
    step_time_s: float  # predicted


class MemoryPlanner:
    """Builds runs that fit into memory, or explains why a run does not.

    Args:
        make: builds the run of a config, or raises ValueError.
        budget: memory that the run may use.
    """

    def __init__(self, make: Callable[[RunConfig], Run], budget: Budget):
        self._make = make
        self._budget = budget
        self.report = ""  # the chosen plan and its memory, as text

    def plan(self, config: RunConfig) -> Run:
        """Return the run of a config; with `memory.placement=auto`, of the fastest fitting plan.

        Args:
            config: the run's config.

        Raises:
            ValueError: the run exceeds the budget by more than TOLERANCE, or no plan fits. The
                message lists settings that would fit, if there are any.
        """
        if config.memory.placement != AUTO:
            run = self._make(config)
            needs = needs_of(run, self._budget)
            # The compiler may need less device memory than estimated, so there is a tolerance.
            # Host memory is known exactly.
            if excess(needs, self._budget, device_bytes=needs.device_bytes / (1 + TOLERANCE)) > 1:
                raise ValueError(self._refusal(run, None))
            self.report = table(needs, self._budget)
            return run
        search = _Search(config, self._make, self._budget)
        for candidate in itertools.islice(search.fitting(), _MAX_COMPILED):
            compiled = compiled_bytes(candidate.run)
            over = excess(candidate.needs, self._budget, device_bytes=compiled)
            if over <= 1:
                way = self._describe(search, candidate)
                rows = table(candidate.needs, self._budget)
                self.report = f"plan    {way}\n{rows}"
                return candidate.run
            if compiled is not None:
                search.correction = max(search.correction, compiled / candidate.needs.device_bytes)
        raise ValueError(self._nothing_fits(search))

    def check(self, run: Run) -> None:
        """Check the memory of compiled steps.

        Args:
            run: a compiled run.

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

    def _refusal(self, run: Run, compiled: int | None) -> str:
        """Return the error message for a run that does not fit, with changes that would make it.

        Args:
            run: the run.
            compiled: bytes per device of the compiled steps, if they are known.
        """
        needs = needs_of(run, self._budget)
        how = ""
        search = _Search(run.config, self._make, self._budget)
        if compiled is not None:
            search.correction = max(1.0, compiled / needs.device_bytes)
            how = f": {size(compiled)} a device, as compiled"
        found = search.single()
        if not found:
            found = list(itertools.islice(search.fitting(), 1))
        if not found:
            return self._nothing_fits(search)
        ways = "\n".join(f"  {self._describe(search, candidate)}" for candidate in found)
        return (
            f"a step takes more memory than there is{how}\n{table(needs, self._budget)}\n"
            f"Each of these would fit:\n{ways}\n"
            "memory.placement=auto chooses the fastest that fits; memory.device_budget and "
            "memory.host_budget set the budget"
        )

    def _nothing_fits(self, search: "_Search") -> str:
        leanest = search.leanest
        factor = search.correction
        reads_images = leanest.run.config.data.reads_images
        corrected = f"Compiled steps took {factor:.2f} times their estimate.\n" * (factor > 1)
        is_host = leanest.needs.host_bytes > self._budget.host_bytes
        parts = leanest.needs.host if is_host else leanest.needs.device
        most = f"{max(parts, key=lambda k: parts[k])} {'in host memory' if is_host else ''}".strip()
        return (
            "no plan fits into memory; the leanest, "
            f"{_text(leanest.setting) or 'as configured'}, takes\n"
            f"{table(leanest.needs, self._budget)}\n{corrected}"
            f"The largest part is: {most}. Use more devices (mesh.pipeline and mesh.model split "
            "the model, mesh.fsdp with memory.zero_stage=3 splits its state), a smaller model, or "
            f"a smaller {'images.size' if reads_images else 'data.sequence_length'} or "
            "data.global_batch_size"
        )

    def _describe(self, search: "_Search", candidate: Candidate) -> str:
        slower = candidate.step_time_s / max(search.base.step_time_s, 1e-12)
        return (
            f"{_text(candidate.setting)}: {size(candidate.needs.device_bytes)} a device, "
            f"{slower:.2f} × the step time, by the rates of {search.rates.device_kind}"
        )


def _text(setting: Setting) -> str:
    return " ".join(f"--config.{key}={value}" for key, value in setting.items())


class _Search:
    """All plans for a config, traced on demand."""

    def __init__(self, config: RunConfig, make: Callable[[RunConfig], Run], budget: Budget):
        # Plans start from the configured placement. With placement=auto, and if the configured
        # placement exceeds host memory, they start with everything on the device.
        is_open = config.memory.placement == AUTO
        self._start = {} if config.memory.placement == "device" else _ON_DEVICE
        if not is_open and needs_of(make(config), budget).host_bytes <= budget.host_bytes:
            self._start = {}
        self._config = _changed(config, self._start)
        self._make = make
        self._budget = budget
        self.rates = rates_of(budget.device_kind, config.precision.compute)
        self.correction = 1.0  # factor on estimates of device memory, learnt from compiled steps
        self._known: dict[tuple[int, ...], Candidate | None] = {}  # by levels

    @cached_property
    def base(self) -> Candidate:
        """The plan with level 0 on every lever."""
        return self._candidate(self._start, self._make(self._config))

    @cached_property
    def levers(self) -> list[list[Setting]]:
        """The settings of every lever, from level 1 on."""
        return [
            self._microbatches(),
            self._zero_stages(),
            self._remat_levels(),
            self._placements(),
        ]

    @property
    def leanest(self) -> Candidate:
        """The plan that needs the least memory, relative to the budget, whether or not it fits."""
        leanest = self._at(tuple(len(lever) for lever in self.levers)) or self.base
        known = (candidate for candidate in self._known.values() if candidate is not None)
        return min((leanest, *known), key=lambda c: excess(c.needs, self._budget))

    def single(self) -> list[Candidate]:
        """Return plans that fit and change a single lever, as little as possible; fastest first.

        A base plan that fits is included, if it differs from the configured run.
        """
        found = [self.base] * (self._start != {} and self._fits(self.base))
        for i, lever in enumerate(self.levers):
            for level in range(1, len(lever) + 1):
                candidate = self._at(self._step(i, level))
                if candidate is not None and self._fits(candidate):
                    found.append(candidate)
                    break
        return sorted(found, key=lambda c: c.step_time_s)

    def fitting(self) -> Iterator[Candidate]:
        """Yield plans that fit, first the base plan if it does.

        The search starts from the leanest plan, or, if that exceeds host memory, from the leanest
        plan with less in host memory. Then it eases one lever after another: each time the one that
        makes the step fastest, as far as memory allows. If the caller increases `correction` after
        compiling a plan, the next plan is leaner.
        """
        if self._fits(self.base):
            yield self.base
        while True:
            *leanest, placement = (len(lever) for lever in self.levers)
            starts = ((*leanest, level) for level in range(placement, -1, -1))
            levels = next((start for start in starts if self._fits(self._at(start))), None)
            if levels is None:
                return
            while (eased := self._eased(levels)) is not None:
                levels = eased
            yield cast(Candidate, self._at(levels))

    def _eased(self, levels: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the fastest fitting plan that eases one lever; None if none is faster."""
        options = {levels: cast(Candidate, self._at(levels)).step_time_s}
        for i, level in enumerate(levels):

            def at(level, i=i):
                return (*levels[:i], level, *levels[i + 1 :])

            def fits(level, at=at):
                return self._fits(self._at(at(level)))

            first = bisect.bisect_left(range(level), True, key=fits)
            candidate = self._at(at(first))
            if first < level and candidate is not None:
                options[at(first)] = candidate.step_time_s
        best = min(options, key=lambda levels: (options[levels], levels))
        return None if best == levels else best

    def _fits(self, candidate: Candidate | None) -> bool:
        if candidate is None:
            return False
        device_bytes = candidate.needs.device_bytes * self.correction
        return excess(candidate.needs, self._budget, device_bytes=device_bytes) <= 1

    def _step(self, lever: int, level: int) -> tuple[int, ...]:
        return tuple(level if i == lever else 0 for i in range(len(self.levers)))

    def _at(self, levels: tuple[int, ...]) -> Candidate | None:
        """Return the candidate for one level per lever; None if such a run cannot be built."""
        if not any(levels):
            return self.base
        if levels not in self._known:
            pairs = zip(self.levers, levels, strict=True)
            chosen = [lever[level - 1] for lever, level in pairs if level]
            setting = {key: value for part in (self._start, *chosen) for key, value in part.items()}
            try:
                run = self._make(_changed(self._config, setting))
                self._known[levels] = self._candidate(setting, run)
            except (ValueError, TypeError):  # e.g. replicated parameters cannot be on the host
                self._known[levels] = None
        return self._known[levels]

    def _candidate(self, setting: Setting, run: Run) -> Candidate:
        return Candidate(
            setting=setting,
            run=run,
            needs=needs_of(run, self._budget),
            step_time_s=self.rates.step_time_s(run.estimate_memory().work),
        )

    # The levers: settings from level 1 on, each of which needs less memory than the one before.

    def _microbatches(self) -> list[Setting]:
        config = self._config
        replicas = config.mesh.data * config.mesh.fsdp
        settings = []
        count = 2 * config.train.num_microbatches
        while config.data.global_batch_size % (count * replicas) == 0:
            setting = {"train.num_microbatches": count}
            try:
                self._make(_changed(config, setting))
            except (ValueError, TypeError):  # e.g. a .csv schedule is for a fixed number
                break
            settings.append(setting)
            count *= 2
        return settings

    def _zero_stages(self) -> list[Setting]:
        config = self._config
        if config.mesh.data * config.mesh.fsdp == 1:
            return []
        stages = [stage for stage in (2, 3) if stage > config.memory.zero_stage]
        return [{"memory.zero_stage": stage} for stage in stages]

    def _remat_levels(self) -> list[Setting]:
        run = self.base.run
        names = sorted(run.activation_names - {"mlp"})
        levels = ["none", "dots", *([",".join(names)] if names else []), "full"]
        now = self._config.train.remat
        first = levels.index(now) + 1 if now in levels else len(levels) - 1
        return [{"train.remat": level} for level in levels[first:]]

    def _placements(self) -> list[Setting]:
        memory = self._config.memory
        settings = []
        if self._config.optimizer.name not in ELEMENTWISE:
            return settings
        for optimizer, parameters in ((0.5, 0.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0)):
            now = (memory.optimizer_fraction, memory.offload_parameters_fraction)
            if (optimizer, parameters) > now:
                settings.append(
                    {
                        "memory.placement": "host",
                        "memory.offload_optimizer_fraction": optimizer,
                        "memory.offload_parameters_fraction": parameters,
                    }
                )
        return settings


def _changed(config: RunConfig, setting: Setting) -> RunConfig:
    """Return the config with the fields of a setting replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in setting.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    changed = {k: dataclasses.replace(getattr(config, k), **v) for k, v in sections.items()}
    return dataclasses.replace(config, **changed)
