"""Choosing what a run keeps, recomputes, shares out and moves to the host, so that it fits.

A lever is a list of settings, each leaner and slower than the one before: more microbatches, a
stage of ZeRO, a level of rematerialisation, a placement. What one step on one lever changes is
estimated from a trace; of all combinations those that should fit are then estimated themselves, in
the order of the step time that they should have, and only the one that is taken is compiled.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from sharding.memory import AUTO
from train.config import RunConfig
from train.setup import Run, activation_names
from train.step_time import Rates, rates_of
from train.verdict import (
    TOLERANCE,
    Budget,
    Needs,
    compiled_bytes,
    excess,
    needs_of,
    size,
    table,
)

#: How many combinations are estimated beside the single steps, and how many are compiled.
_MAX_ESTIMATED, _MAX_COMPILED = 24, 4
#: What a combination may seem to need by its single steps, and still be estimated itself.
_SLACK = 1.1

_log = logging.getLogger(__name__)

#: Settings of a config, such as {"train.remat": "full"}.
Setting = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run as some settings make it, and what it takes."""

    setting: Setting
    run: Run
    needs: Needs
    step_time_s: float  # predicted


class Planner:
    """Makes runs that fit.

    Args:
        make: config -> the run, or a ValueError.
        budget: that it has to fit.
    """

    def __init__(self, make: Callable[[RunConfig], Run], budget: Budget):
        self._make, self._budget = make, budget

    def plan(self, config: RunConfig) -> Run:
        """Returns the run of a config; with `memory.placement=auto`, of the fastest plan that fits.

        Raises:
            ValueError: it takes more than there is, and nothing, or something else, would fit.
        """
        if config.memory.placement != AUTO:
            run = self._make(config)
            needs = needs_of(run, self._budget)
            if excess(needs, self._budget) > 1 + TOLERANCE:
                raise ValueError(self._refusal(config, needs, "estimated from shapes"))
            _log.info("%s", table(needs, self._budget))
            return run
        search = _Search(config, self._make, self._budget)
        for candidate in itertools.islice(search.fitting(), _MAX_COMPILED):
            compiled = compiled_bytes(candidate.run)
            over = excess(candidate.needs, self._budget, device_bytes=compiled)
            if over <= 1:
                _log.info("%s", self._description(search, candidate))
                return candidate.run
            search.correction *= over
        raise ValueError(self._nothing_fits(search))

    def check(self, run: Run) -> None:
        """Checks a run that is compiled.

        Raises:
            ValueError: its steps take more than there is.
        """
        needs, compiled = needs_of(run, self._budget), compiled_bytes(run)
        if compiled is not None:
            _log.info("memory  %s a device, as compiled", size(compiled))
        if excess(needs, self._budget, device_bytes=compiled) > 1:
            needed = "estimated" if compiled is None else f"{size(compiled)} a device as compiled"
            raise ValueError(self._refusal(run.config, needs, needed))

    def _refusal(self, config: RunConfig, needs: Needs, how: str) -> str:
        """Returns what a run takes, and the smallest changes that would make it fit."""
        search = _Search(config, self._make, self._budget)
        found = search.single()
        if not found:
            found = list(itertools.islice(search.fitting(), 1))
        if not found:
            return self._nothing_fits(search)
        ways = "\n".join(f"  {self._way(search, candidate)}" for candidate in found)
        return (
            f"a step takes more memory than there is ({how}):\n{table(needs, self._budget)}\n"
            f"Each of these would fit:\n{ways}\n"
            "memory.placement=auto takes the fastest that fits; memory.device_budget and "
            "memory.host_budget say what there is"
        )

    def _nothing_fits(self, search: "_Search") -> str:
        leanest = search.leanest
        most = max(leanest.needs.device.items(), key=lambda item: item[1])[0]
        return (
            "no plan fits the memory that there is; the leanest, "
            f"{_text(leanest.setting) or 'as configured'}, takes\n"
            f"{table(leanest.needs, self._budget)}\n"
            f"The largest part are {most}. Use more devices (mesh.pipeline and mesh.model split "
            "the model, mesh.fsdp with memory.zero_stage=3 what lies of it), a smaller model, or "
            "a smaller data.sequence_length or data.global_batch_size"
        )

    def _way(self, search: "_Search", candidate: Candidate) -> str:
        slower = candidate.step_time_s / search.base.step_time_s
        return (
            f"{_text(candidate.setting)}: {size(candidate.needs.device_bytes)} a device, "
            f"{slower:.2f} × the step time, by the rates of {search.rates.device_kind}"
        )

    def _description(self, search: "_Search", candidate: Candidate) -> str:
        change = self._way(search, candidate) if candidate.setting else "as configured, which fits"
        return f"plan    {change}\n{table(candidate.needs, self._budget)}"


def _text(setting: Setting) -> str:
    return " ".join(f"--config.{key}={value}" for key, value in setting.items())


class _Search:
    """The plans that there are for a config, and what they take."""

    def __init__(self, config: RunConfig, make: Callable[[RunConfig], Run], budget: Budget):
        if config.memory.placement == AUTO:
            memory = dataclasses.replace(config.memory, placement="device")
            config = dataclasses.replace(config, memory=memory)
        self._config, self._make, self._budget = config, make, budget
        self.correction = 1.0  # of estimates, by what was compiled
        self._known: dict[tuple[int, ...], Candidate | None] = {}

    @cached_property
    def base(self) -> Candidate:
        """The run as configured, on the device."""
        run = self._make(self._config)
        return self._candidate({}, run)

    @cached_property
    def rates(self) -> Rates:
        kind = self.base.run.mesh.devices.flat[0].device_kind
        return rates_of(kind, self._config.precision.compute)

    @cached_property
    def levers(self) -> list[list[Setting]]:
        return [
            self._microbatches(),
            self._zero_stages(),
            self._remat_levels(),
            self._placements(),
        ]

    @property
    def leanest(self) -> Candidate:
        """The leanest plan that there is, whether or not it fits."""
        found = self._at(tuple(len(lever) for lever in self.levers)) or self.base
        return min((found, *self._tried()), key=lambda c: c.needs.device_bytes)

    def single(self) -> list[Candidate]:
        """Returns, for every lever on which one step would do, the first one that does."""
        found = []
        for i, lever in enumerate(self.levers):
            for level in range(1, len(lever) + 1):
                candidate = self._at(self._step(i, level))
                if candidate is not None and self._fits(candidate):
                    found.append(candidate)
                    break
        return sorted(found, key=lambda c: c.step_time_s)

    def fitting(self) -> Iterator[Candidate]:
        """Yields plans that fit by their estimates, by the time that single steps add up to."""
        if self._fits(self.base):
            yield self.base
        num_estimated = 0
        for levels in self._ranking():
            if num_estimated == _MAX_ESTIMATED:
                break
            if self._excess(self._guess(levels)) > _SLACK:
                continue
            num_estimated += levels not in self._known
            candidate = self._at(levels)
            if candidate is not None and self._fits(candidate):
                yield self._eased(levels, candidate)
        else:
            return
        if self._fits(self.leanest):
            yield self.leanest

    def _eased(self, levels: tuple[int, ...], candidate: Candidate) -> Candidate:
        """Returns the fastest plan that fits between a combination and what is configured."""
        for i, level in enumerate(levels):
            eased = (*levels[:i], level - 1, *levels[i + 1 :])
            better = self._at(eased) if level else None
            is_faster = better is not None and better.step_time_s < candidate.step_time_s
            if better is not None and is_faster and self._fits(better):
                return self._eased(eased, better)
        return candidate

    def _fits(self, candidate: Candidate) -> bool:
        return self._excess(candidate.needs) <= 1

    def _excess(self, needs: Needs) -> float:
        return excess(needs, self._budget) * self.correction

    def _tried(self) -> list[Candidate]:
        return [candidate for candidate in self._known.values() if candidate is not None]

    def _step(self, lever: int, level: int) -> tuple[int, ...]:
        return tuple(level if i == lever else 0 for i in range(len(self.levers)))

    def _ranking(self) -> list[tuple[int, ...]]:
        """Returns all combinations, by their step time as single steps add up to it."""
        every = itertools.product(*(range(len(lever) + 1) for lever in self.levers))
        return sorted((c for c in every if any(c)), key=lambda c: (self._time(c), c))

    def _singles(self, levels: tuple[int, ...]) -> list[Candidate]:
        steps = (self._at(self._step(i, level)) for i, level in enumerate(levels) if level)
        return [candidate for candidate in steps if candidate is not None]

    def _time(self, levels: tuple[int, ...]) -> float:
        base = self.base.step_time_s
        return base + sum(c.step_time_s - base for c in self._singles(levels))

    def _guess(self, levels: tuple[int, ...]) -> Needs:
        """Returns what a combination should take: each label changes as by the single steps."""
        device: dict[str, float] = dict(self.base.needs.device)
        host: dict[str, float] = dict(self.base.needs.host)
        for single in self._singles(levels):
            for label, before in self.base.needs.device.items():
                device[label] *= single.needs.device.get(label, 0) / before if before else 1
            for label, num_bytes in single.needs.host.items():
                host[label] = max(host.get(label, 0), num_bytes)
        return Needs(device=device, host=host)

    def _at(self, levels: tuple[int, ...]) -> Candidate | None:
        """Returns the candidate of a combination; None where the run cannot be made so."""
        if not any(levels):
            return self.base
        if levels not in self._known:
            pairs = zip(self.levers, levels, strict=True)
            chosen = [lever[level - 1] for lever, level in pairs if level]
            setting = {key: value for part in chosen for key, value in part.items()}
            try:
                run = self._make(_changed(self._config, setting))
                self._known[levels] = self._candidate(setting, run)
            except ValueError:
                self._known[levels] = None
        return self._known[levels]

    def _candidate(self, setting: Setting, run: Run) -> Candidate:
        kind = run.mesh.devices.flat[0].device_kind
        rates = rates_of(kind, run.config.precision.compute)
        return Candidate(
            setting=setting,
            run=run,
            needs=needs_of(run, self._budget),
            step_time_s=rates.step_time_s(run.estimate.work),
        )

    # The levers: settings beside the configured ones, each leaner than the one before.

    def _microbatches(self) -> list[Setting]:
        config = self._config
        replicas = config.mesh.data * config.mesh.fsdp
        settings, count = [], 2 * config.train.num_microbatches
        while config.data.global_batch_size % (count * replicas) == 0:
            settings.append({"train.num_microbatches": count})
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
        names = sorted(activation_names(run) - {"mlp"})
        levels = ["none", "dots", *([",".join(names)] if names else []), "full"]
        now = self._config.train.remat
        first = levels.index(now) + 1 if now in levels else len(levels) - 1
        return [{"train.remat": level} for level in levels[first:]]

    def _placements(self) -> list[Setting]:
        memory = self._config.memory
        settings = []
        if self._config.optimizer.name != "adamw":
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
    """Returns the config with other values of some fields."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in setting.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    changed = {k: dataclasses.replace(getattr(config, k), **v) for k, v in sections.items()}
    return dataclasses.replace(config, **changed)
