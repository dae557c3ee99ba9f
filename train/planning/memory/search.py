"""Searches for settings with which a run fits into memory (`memory.placement=auto`).

A *lever* is a list of settings, each needing less memory but more time than the previous one. There
are four: more microbatches, a higher ZeRO stage, more rematerialization, and host memory. A
*level* is a position on a lever; level 0 is the configured value. A *candidate* has one level per
lever:

    lever      microbatches   ZeRO stage   remat                       placement
    level 0    8              0            none                        device    (as configured)
    level 1    16             2            dots                        host, 0.5
    level 2    32             3            attention,...,qkv (names)   host, 1.0
    level 3                                attention,qkv               host, 1.0 and 0.5
    level 4                                attention                   host, 1.0 and 1.0
    level 5                                full

Here the candidate (1, 0, 5, 0) is 16 microbatches, ZeRO stage 0, remat=full, everything on the
device. If the configured `train.remat` begins with `stage`, so do all of its levels.

Memory and step time of a candidate are estimated from a trace of the step. Only chosen candidates
are compiled; see train/planning/memory/fitter.py.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from predict.machines.datasheets import datasheet_machine
from predict.memory.memory_estimate import Needs
from predict.time.traced_work import traced_work_s
from sharding.memory import AUTO
from train.config.remat import AUTO_REMAT, levels
from train.config.schema import RunConfig
from train.planning.memory.budget import Budget, fits, needs_of
from train.run.run import Run

_ON_DEVICE = {"memory.placement": "device", "memory.offload_parameters_fraction": 0.0}

#: Settings of a config, such as {"train.remat": "full"}.
Setting = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate that was traced: its settings, memory and time."""

    setting: Setting  # changes to the config
    run: Run
    needs: Needs  # estimated memory
    step_time_s: float  # predicted


class MemorySearch:
    """All candidates for a config, traced on demand."""

    def __init__(self, config: RunConfig, assemble: Callable[[RunConfig], Run], budget: Budget):
        # Candidates start from the configured placement. With placement=auto, and if the configured
        # placement exceeds host memory, they start with everything on the device.
        is_open = config.memory.placement == AUTO
        self._start = {} if config.memory.placement == "device" else _ON_DEVICE
        if not is_open and needs_of(assemble(config), budget).host_bytes <= budget.host_bytes:
            self._start = {}
        if is_open and config.train.remat == AUTO_REMAT:
            self._start = {**self._start, "train.remat": "none"}
        self._config = config.with_values(self._start)
        self._assemble = assemble
        self._budget = budget
        self.machine = datasheet_machine(
            budget.device_kind, budget.devices_per_host, dtype=config.precision.compute_dtype
        )
        self.correction = 1.0  # factor on estimates of device memory, learnt from compiled steps
        self._known: dict[tuple[int, ...], Candidate | None] = {}  # by levels

    @cached_property
    def base(self) -> Candidate:
        """The candidate with level 0 on every lever."""
        return self._candidate(self._start, self._assemble(self._config))

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
        """The candidate that needs the least memory relative to the budget; it may not fit."""
        leanest = self._at(tuple(len(lever) for lever in self.levers)) or self.base
        known = (candidate for candidate in self._known.values() if candidate is not None)
        budget = self._budget

        def excess(candidate: Candidate) -> float:
            needs = candidate.needs
            return max(
                needs.device_bytes / budget.device_bytes, needs.host_bytes / budget.host_bytes
            )

        return min((leanest, *known), key=excess)

    def single(self) -> list[Candidate]:
        """Return candidates that fit and change one lever, as little as possible; fastest first.

        A base candidate that fits is included, if it differs from the configured run.
        """
        candidates = [self.base] * (self._start != {} and self._fits(self.base))
        for i, lever in enumerate(self.levers):
            for level in range(1, len(lever) + 1):
                candidate = self._at(self._step(i, level))
                if candidate is not None and self._fits(candidate):
                    candidates.append(candidate)
                    break
        return sorted(candidates, key=lambda c: c.step_time_s)

    def fitting(self) -> Iterator[Candidate]:
        """Yield candidates that fit: the base candidate, if it does, and then the fastest first.

        Each level costs time, so candidates are tried in the order of their step times: the fastest
        so far, and if it does not fit, those with one more level on one lever. Levels with which
        even the leanest other levels do not fit are left out. If the caller increases `correction`
        after compiling a candidate, the next candidate is leaner.
        """
        if self._fits(self.base):
            yield self.base
        # Levers on their last levels, unless that exceeds host memory.
        *last, placement = (len(lever) for lever in self.levers)
        leanest = ((*last, level) for level in range(placement, -1, -1))
        stop = next((levels for levels in leanest if self._fits(self._at(levels))), None)
        if stop is None:
            return
        start = tuple(self._first_that_fits(stop, lever) for lever in range(len(stop)))
        queue = [(0.0, start)]
        queued = {start}
        while queue and self._fits(self._at(stop)):
            step_time_s, levels = heapq.heappop(queue)
            candidate = self._at(levels)
            if candidate is not None and self._fits(candidate):
                yield candidate
            for i, level in enumerate(levels):
                leaner = (*levels[:i], level + 1, *levels[i + 1 :])
                if level < stop[i] and leaner not in queued:
                    queued.add(leaner)
                    candidate = self._at(leaner)
                    time_s = step_time_s if candidate is None else candidate.step_time_s
                    heapq.heappush(queue, (time_s, leaner))

    def _first_that_fits(self, leanest: tuple[int, ...], lever: int) -> int:
        """Return the first level of a lever that fits, if the other levers are as in `leanest`."""

        def has_fitting(level: int) -> bool:
            *levels, placement = (*leanest[:lever], level, *leanest[lever + 1 :])
            candidates = (self._at((*levels, n)) for n in range(placement, -1, -1))
            # Not every ZeRO stage can be combined with every placement.
            return self._fits(next((each for each in candidates if each is not None), None))

        return bisect.bisect_left(range(leanest[lever]), True, key=has_fitting)

    def _fits(self, candidate: Candidate | None) -> bool:
        return candidate is not None and fits(candidate.needs, self._budget, ratio=self.correction)

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
                run = self._assemble(self._config.with_values(setting))
                self._known[levels] = self._candidate(setting, run)
            except (ValueError, TypeError):  # e.g. replicated parameters cannot be on the host
                self._known[levels] = None
        return self._known[levels]

    def _candidate(self, setting: Setting, run: Run) -> Candidate:
        return Candidate(
            setting=setting,
            run=run,
            needs=needs_of(run, self._budget),
            step_time_s=traced_work_s(
                run.estimate_memory().work, self.machine, self._config.precision.compute_dtype
            ),
        )

    # The levers: settings from level 1 on, each of which needs less memory than the previous one.

    def _microbatches(self) -> list[Setting]:
        config = self._config
        replicas = config.num_replicas
        settings = []
        count = 2 * config.train.num_microbatches
        while config.data.global_batch_size % (count * replicas) == 0:
            setting = {"train.num_microbatches": count}
            try:
                self._assemble(config.with_values(setting))
            except (ValueError, TypeError):  # e.g. a .csv schedule is for a fixed number
                break
            settings.append(setting)
            count *= 2
        return settings

    def _zero_stages(self) -> list[Setting]:
        config = self._config
        if config.num_replicas * config.mesh.context == 1:
            return []
        stages = [stage for stage in (2, 3) if stage > config.memory.zero_stage]
        return [{"memory.zero_stage": stage} for stage in stages]

    def _remat_levels(self) -> list[Setting]:
        layers = levels(self.base.run.traces.activation_names)
        now = self.base.run.config.train.parsed_remat
        first = layers.index(now.layers) + 1 if now.layers in layers else len(layers) - 1
        remats = [dataclasses.replace(now, layers=level) for level in layers[first:]]
        return [{"train.remat": str(remat)} for remat in remats]

    def _placements(self) -> list[Setting]:
        memory = self._config.memory
        settings = []
        if not self._config.optimizer.can_be_sliced:
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
