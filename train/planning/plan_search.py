"""Searches for the fastest plan that fits into memory, and compiles the best few whole.

    space of plans ── composed cost ──> most promising ── compile their layers ──> costs again
                                              │
                                              └──> estimate memory ── compile whole ──> ranking

Composed costs only decide which plans are compiled. The ranking uses the predicted time and the
memory of whole compiled steps.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from models.functions import can_share_vocab
from sharding.mesh import MeshConfig
from train.config.schema import RunConfig
from train.planning.finalists import Choice, Finalists
from train.planning.fitting import (
    FittingRuns,
    Selection,
    leanest,
    may_fit,
    promising,
    rank,
    step_s,
    with_leaner,
)
from train.planning.layer_times import ReplicaStep, Split
from train.planning.memory.budget import Needs, needs_of
from train.planning.parallel_plan import ParallelPlan, PlanSpace, with_open_choices
from train.planning.plan_cost import Costed, PlanCost, PlanCosts
from train.planning.plan_devices import Compilations, PlanDevices
from train.planning.plan_limits import (
    DoesNotFit,
    NotCompiled,
    Request,
    first_tried,
    may_use_host_memory,
    no_division,
    no_memory,
)
from train.planning.scaled_times import ScaledTimes
from train.run.compatibility import MOST_UNROLLED
from train.run.run import Run

_NUM_THREADS = os.cpu_count() or 1
NUM_PLANS = 5  # that are listed
#: How many plans are compiled in other ZeRO stages of the best.
_NUM_VARIANTS = 2
#: Another ZeRO stage is compiled if its composed time is less than this times the best's.
_LEAST_GAIN = 0.995
#: How many modes of tensor parallelism are compiled, for a plan that takes at most this times the
#: fastest one's time: in its best mode, LLaMA-2-7B on 8 H100s takes 0.78 of its time in `1d`.
_NUM_MODES = 4
_MODE_MARGIN = 1.3
_MAX_PARTS = 8  # that are compiled, not counting the base parts that others are scaled from
_NUM_KNOWN = 8  # of the most promising plans, before the search ends
_NUM_LEAN = 4  # of the leanest plans, which are compiled if none of these fits
#: The composed memory of a plan may exceed the budget by this factor; its estimate decides.
_MEMORY_TOLERANCE = 1.15

_log = logging.getLogger(__name__)


class PlanSearch:
    """Searches the plans of a config for some devices.

    Args:
        fixed: keys of the config that stay as they are.
        max_microbatches: largest number of microbatches to try; None: any.

    Attributes:
        plans: all plans, after the search.
    """

    def __init__(
        self,
        config: RunConfig,
        devices: PlanDevices,
        fixed: Collection[str],
        max_microbatches: int | None = None,
    ):
        config, fixed = with_open_choices(config, fixed)
        self._max_microbatches = max_microbatches
        self._devices = devices
        self._fixed = fixed
        self._budget = devices.budget
        self._sure_bytes = devices.budget.device_bytes / _MEMORY_TOLERANCE
        # The smallest split that any plan has.
        self._layers = ScaledTimes(
            config,
            devices,
            split=Split(
                context=max(1, config.mesh.context),
                expert=max(1, config.mesh.expert),
                model=max(1, config.mesh.model),
            ),
            remat=config.train.parsed_remat.layers if "train.remat" in fixed else "none",
        )
        self.plans: list[ParallelPlan] = []
        self._legal: dict[Split, bool] = {}
        self._pairs: list[Costed] = []
        self._compiles = Compilations(_NUM_THREADS)
        self._started = time.monotonic()
        self._use(config)

    def best(self) -> list[Choice]:
        """Return the best plans that were compiled whole, the fastest first.

        They have different meshes, schedules or numbers of microbatches, except for other ZeRO
        stages of the best.

        Raises:
            ValueError: no plan divides the model and the batch, or none fits into memory.
        """
        with self._compiles:
            self._start()
            try:
                choices = self._finalists()
            except DoesNotFit as error:
                if not may_use_host_memory(self._config, self._fixed, self._devices.machine):
                    raise ValueError(no_memory(self._request(), error)) from None
                self._place_in_host_memory()
                try:
                    choices = self._finalists()
                except DoesNotFit as again:
                    raise ValueError(no_memory(self._request(), again)) from None
        return choices[:NUM_PLANS]

    def _finalists(self) -> list[Choice]:
        """Return the most promising plans that fit, and the best of them in other ZeRO stages.

        Raises:
            DoesNotFit: no plan fits into memory.
            ValueError: no plan is legal.
        """
        self._pairs = with_leaner(self._refine(), self._sure_bytes)
        self._say("compiles the best plans whole")
        choices = self._compiled.compile_promising(self._pairs)
        if not choices:
            lean = leanest(self._costs, self.plans)
            only_one = Selection(count=1, trusts_composed=False)
            for pair in lean[:_NUM_LEAN]:
                choices = self._compiled.compile([pair], only_one)
                if choices:
                    break
            if choices:  # others may be faster
                lean.sort(key=step_s)
                choices = self._compiled.compile(lean, Selection(count=_NUM_LEAN, of_each_shape=2))
        if not choices:
            raise self._compiled.error()
        variants = self._zero_variants(choices[0])
        choices = self._compiled.compile(variants, Selection(count=_NUM_VARIANTS, of_each_shape=4))
        choices = self._compiled.compile(self._in_other_modes(choices), Selection(count=_NUM_MODES))
        return self._compiled.compile(self._unrolled(choices[0]), Selection(count=1))

    def _in_other_modes(self, choices: Sequence[Choice]) -> list[Costed]:
        """Return the fastest plan with `mesh.model` in other modes, if it is nearly the fastest.

        They get the composed costs of this plan, because costs only know the mode of the config.

        Args:
            choices: plans that were compiled, the fastest first.
        """
        if "tensor.mode" in self._fixed:
            return []
        bound_s = _MODE_MARGIN * choices[0].step.prediction.step_s
        near = [choice for choice in choices if choice.step.prediction.step_s < bound_s]
        for plan, cost in ((choice.plan, choice.cost) for choice in near):
            others = plan.in_other_modes(self._config.data.global_batch_size)
            if pairs := [Costed(other, cost) for other in others]:
                return pairs
        return []

    def _unrolled(self, best: Choice) -> list[Costed]:
        """Return the best plan with layers that are not a loop, if that may be faster on a GPU.

        It is not if layers keep no activations, which a loop would copy. The plan gets the composed
        cost of the loop. A run's own check refuses plans that cannot be unrolled.
        """
        plan = best.plan
        base = self._layers.compiled(self._layers.base).run
        are_few = sum(base.functions.num_layers.values()) <= MOST_UNROLLED
        may_pay = plan.remat.layers != "full" and not self._devices.machine.shares_cores
        if not (may_pay and are_few) or "train.unroll" in self._fixed:
            return []
        return [Costed(dataclasses.replace(plan, unroll=True), best.cost)]

    def _zero_variants(self, best: Choice) -> list[Costed]:
        """Return plans that differ from the best only in the ZeRO stage, if they may be faster."""
        others = {dataclasses.replace(best.plan, zero_stage=stage) for stage in range(4)}
        ranked = rank(self._costs, [plan for plan in self.plans if plan in others - {best.plan}])
        return [pair for pair in ranked if pair.cost.step_s < _LEAST_GAIN * best.cost.step_s]

    def _place_in_host_memory(self) -> None:
        """Continue with the same plans, but with optimizer state in host memory."""
        self._say("no plan fits into device memory; places optimizer state in host memory")
        self._use(self._config.with_values({"memory.placement": "host"}))
        self.plans = [dataclasses.replace(plan, placement="host") for plan in self.plans]

    def _use(self, config: RunConfig) -> None:
        """Forget what is known about whole plans, and go on with those of a config."""
        self._config = config
        self._costs = PlanCosts(config, self._devices.machine, self._layers)
        self._runs = FittingRuns(config, self._devices)
        self._compiled = Finalists(self._runs, self._devices, self._compiles, self._say)

    def cost(self, plan: ParallelPlan) -> PlanCost:
        """Return the composed cost of a plan, corrected by the plans that were compiled."""
        return self._costs.cost(plan).scaled(self._compiled.factor(plan))

    def runners_up(self, choices: Sequence[Choice]) -> list[NotCompiled]:
        """Return plans that complete the list, after the search; composed times rule them out.

        Args:
            choices: plans from `best`.
        """
        compiled = {choice.plan.shape for choice in choices}
        least_s = choices[0].step.prediction.step_s
        pairs_by_shape: dict[Any, Costed] = {}
        for plan, _ in self._pairs:
            if plan.shape not in compiled and plan not in self._runs.excluded:
                pairs_by_shape.setdefault(plan.shape, Costed(plan, self.cost(plan)))
        others = [pair for pair in pairs_by_shape.values() if pair.cost.step_s >= least_s]
        others.sort(key=step_s)
        return [
            NotCompiled(mesh=plan.mesh, plan=plan, cost=cost)
            for plan, cost in others[: max(0, NUM_PLANS - len(choices))]
        ]

    def first_tried(self) -> list[NotCompiled]:
        """Return the meshes that one would try first, after the search."""
        return first_tried(
            self.plans,
            self.cost,
            num_devices=self._devices.count,
            per_host=self._devices.machine.gpus_per_host,
            budget_bytes=self._budget.device_bytes,
        )

    def _start(self) -> None:
        """Find all plans, and compile the parts that others are scaled from."""
        layers = self._layers
        count = self._devices.count
        self.plans = [*self._space(self._config, count)]
        if not self.plans:
            raise ValueError(no_division(self._request()))
        self._say(f"{len(self.plans):,} plans; compiles the layers of one device")
        size = self._config.data.global_batch_size
        sizes = [plan.microbatch_size(size) for plan in self.plans]
        parts = layers.parts_of_base(min(sizes), max(sizes))
        running = [self._submit(part) for part in parts]
        splits = {layers.with_split(plan.mesh) for plan in self.plans} - {layers.base}
        if len(splits) == 1:  # it will be needed, and a thread may be idle
            self._submit(*splits)
        for compiled in running:
            compiled.result()
        layers.measure_base(parts)

    def _space(self, config: RunConfig, num_devices: int) -> PlanSpace:
        """Return the plans of a config, which differs from the run's only in its batch size.

        Raises:
            ValueError: the model cannot be split as the fixed keys say.
        """
        base = self._layers.compiled(self._layers.base).run
        kept_axes = {axis for count in self._layers.params for axis in count.kept_axes}
        if unknown := kept_axes - {*Split._fields}:
            raise ValueError(
                f"rules.experts={base.rules['experts']}: plans do not know the costs of experts "
                f"that {min(unknown)!r} divides; choose from {', '.join(Split._fields)}, or "
                "choose the mesh yourself, and check it with python -m train.compile"
            )
        return PlanSpace(
            config=config,
            num_devices=num_devices,
            fixed=self._fixed,
            num_layers=sum(base.functions.num_layers.values()),
            layer_remats=self._layer_remats(base),
            allows=self._allows,
            has_experts="expert" in kept_axes,
            sees_whole_batch=getattr(base.model, "sees_whole_batch", False),
            can_share_vocab=can_share_vocab(base.model),
            cuts=functools.cache(self._layers.cuts_to_try),
            max_microbatches=self._max_microbatches,
        )

    def _refine(self) -> list[Costed]:
        """Return the plans that may fit, the fastest first; compile parts of the most promising.

        Whenever a part has been compiled, the plans are ranked again to choose the next one. If no
        plan may fit, the leanest are returned.
        """
        pending: dict[concurrent.futures.Future, ReplicaStep] = {}
        num_parts = num_early = 0
        most_bytes = _MEMORY_TOLERANCE * self._budget.device_bytes
        plans = [plan for plan in self.plans if may_fit(self._costs, plan, most_bytes)]
        if not plans:
            return leanest(self._costs, self.plans)
        while True:
            ranked = rank(self._costs, plans)
            best = promising(ranked, self._sure_bytes)[:_NUM_KNOWN]
            front = [part for _, cost in best for part in cost.unknown]
            for part in dict.fromkeys(front):
                running = pending.values()
                is_free = len(running) < _NUM_THREADS and num_parts < _MAX_PARTS
                if is_free and part not in running and not self._layers.is_between(part, running):
                    self._say(f"compiles the layers with {part}")
                    pending[self._submit(part)] = part
                    num_parts += 1
            if 0 < len(pending) < _NUM_THREADS:  # a thread is idle
                known = [pair for pair in best if not pair.cost.unknown]
                self._compiled.start(known[: not num_early], Selection(count=1))
                num_early += 1
            if not pending:  # a plan whose times are only assumed comes last
                return sorted(ranked, key=lambda pair: len(pair.cost.unknown) > 0)
            for done in concurrent.futures.wait(pending, return_when="FIRST_COMPLETED").done:
                done.result()
                self._layers.measure([pending.pop(done)])

    def _request(self) -> Request:
        return Request(
            config=self._config,
            fixed=self._fixed,
            num_devices=self._devices.count,
            budget=self._budget,
            space_of=self._space,
            cost=self._costs.cost,
            needs_with=self._needs_with,
        )

    def _needs_with(
        self, plan: ParallelPlan, num_devices: int, values: Mapping[str, Any]
    ) -> Needs | None:
        """Return the estimated memory of a plan for a number of devices, with values of its config.

        None if it cannot be estimated, because so many devices are neither described nor present.
        """
        if num_devices > self._devices.count and not self._devices.are_described:
            return None
        config = plan.applied(self._config).with_values(values)
        return needs_of(self._devices.assemble_part(config, num_devices), self._budget)

    def _submit(self, part: ReplicaStep) -> concurrent.futures.Future:
        """Compile a part in a thread."""
        compiled = self._layers.compiled(part)
        _ = compiled.run.trace_train_step()  # tracing holds the interpreter's lock
        return self._compiles.start(part, lambda: compiled.times)

    def _allows(self, mesh: MeshConfig) -> bool:
        """Return whether the model can be split over the axes of a part."""
        part = self._layers.with_split(mesh)
        split = part.split
        if split not in self._legal:
            refused = [other for other, is_legal in self._legal.items() if not is_legal]
            self._legal[split] = False
            # Multiples of an illegal split are illegal, too.
            if not any(_are_multiples(split, other) for other in refused):
                with contextlib.suppress(ValueError):
                    _ = self._layers.compiled(part).run
                    self._legal[split] = True
        return self._legal[split]

    def _layer_remats(self, run: Run) -> tuple[str, ...]:
        configured_remat = self._config.train.parsed_remat.layers
        if "train.remat" in self._fixed:
            return (configured_remat,)
        names = [name for name in ("mlp", "attention") if name in run.traces.activation_names]
        return tuple(dict.fromkeys(["none", ",".join(names) or "none", "full", configured_remat]))

    def _say(self, text: str) -> None:
        _log.info("plan    %4.0f s  %s", time.monotonic() - self._started, text)


def _are_multiples(split: Split, other: Split) -> bool:
    """Return whether every size of a split is a multiple of the other split's size."""
    return all(size % divisor == 0 for size, divisor in zip(split, other, strict=True))
