"""Compiles and analyzes a training step; the report of `train.compile`, as text and as JSON."""

import dataclasses
import math
import time
from typing import Any

import jax

from predict.machines.datasheets import peak_flops_per_s
from predict.machines.machine import Machine
from predict.program.memory import Memory, memory
from predict.time.prediction import Prediction, format_prediction, predict
from predict.time.ticks import Ticks
from sharding.compiler_options import as_dict
from sharding.mesh import describe as describe_mesh
from train.planning.memory.budget import Budget, needs_of, pressure_of, size
from train.reporting.throughput import mfu
from train.run.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A training step compiled for devices that may be absent, and its analysis.

    Attributes:
        run: run of the config.
        devices: name of the devices that the step was compiled for.
        compiled: compiled step.
        budget: memory that a step may use.
        assumed: assumptions about values that the data would determine, as text.
        trace_s: seconds spent tracing on this machine.
        compile_s: seconds spent compiling on this machine.
        memory: memory of the compiled step on one device.
        prediction: predicted time of the step.
        expert_load: load of experts of `skewed`; see predict/time/prediction.py.
        skewed: predicted time with this load; None without one.
        remedies: settings with which a step that does not fit would, as text.
    """

    run: Run
    devices: str
    compiled: jax.stages.Compiled
    budget: Budget
    assumed: tuple[str, ...]
    trace_s: float
    compile_s: float
    memory: Memory
    prediction: Prediction
    expert_load: float = 1.0
    skewed: Prediction | None = None
    remedies: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the compiled step fits into the budget of a device."""
        compiled = self.memory.in_all
        return compiled is not None and compiled <= self.budget.device_bytes

    @property
    def units_per_s(self) -> float:
        """Predicted tokens or images per second, over all devices."""
        return self.run.units_per_step / self.prediction.step_s

    @property
    def mfu(self) -> float | None:
        """Predicted model FLOPs utilization, from 0 to 1; None if the GPU's peak is unknown."""
        return self._mfu_at(self.units_per_s)

    def _mfu_at(self, units_per_s: float) -> float | None:
        peak = peak_flops_per_s(
            self.run.hardware.device_kind, self.run.config.precision.compute_dtype
        )
        return mfu(self.run.flops_per_unit * units_per_s, self.run.mesh.size, peak)

    def to_json(self) -> dict[str, Any]:
        """Return the report of `--json`; docs/before_you_rent.md lists the keys."""
        run = self.run
        prediction = self.prediction
        estimated = run.estimate_memory().device_bytes
        compiled = self.memory.in_all
        per_host = self.budget.devices_per_host
        collectives = [dataclasses.asdict(row) for row in prediction.collectives]
        return {
            "target": self.devices,
            "mesh": {axis: n for axis, n in run.mesh.shape.items() if n > 1},
            "num_devices": run.mesh.size,
            "num_params": run.num_params,
            "assumed": list(self.assumed),
            "attention": [dataclasses.asdict(choice) for choice in run.attention_kernels],
            "trace_s": self.trace_s,
            "compile_s": self.compile_s,
            "memory": {
                "compiled_bytes": compiled,
                "estimated_bytes": estimated,
                "ratio": estimated / compiled if compiled else None,
                "device_bytes": _known_bytes(self.budget.limit_bytes),
                "budget_bytes": _known_bytes(self.budget.device_bytes),
                "warning": pressure_of(run, self.budget),
                "fits": self.fits,
                "remedies": list(self.remedies),
                "host_bytes": (self.memory.host_bytes or 0) * per_host,
                "estimated_host_bytes": needs_of(run, self.budget).host_bytes,
            },
            "collectives": collectives,
            "predicted": self._times(prediction),
            **self._skewed_to_json(),
            "compiler_options": as_dict(run.compiler_options()),
            "versions": {"jax": jax.__version__},
        }

    def _times(self, prediction: Prediction) -> dict[str, Any]:
        units_per_s = self.run.units_per_step / prediction.step_s
        return {
            "step_time_s": prediction.step_s,
            "matmul_s": prediction.matmul_s,
            "attention_s": prediction.attention_s,
            "other_kernels_s": prediction.other_s,
            "communication_s": prediction.communication_s,
            "exposed_communication_s": prediction.exposed_communication_s,
            "host_copy_s": prediction.host_s,
            "exposed_host_copy_s": prediction.exposed_host_s,
            "bubble_s": prediction.bubble_s,
            f"{self.run.unit}s_per_s": units_per_s,
            "mfu": self._mfu_at(units_per_s),
        }

    def _skewed_to_json(self) -> dict[str, Any]:
        if self.skewed is None:
            return {}
        return {"skewed": {"expert_load": self.expert_load} | self._times(self.skewed)}

    def to_text(self) -> str:
        """Return the report as text."""
        run = self.run
        figures = self.to_json()
        memory = figures["memory"]
        fits = "fits" if self.fits else "does not fit"
        lines = [
            f"target     {figures['target']}: {run.mesh.size} × {run.hardware.device_kind}",
            f"mesh       {describe_mesh(run.mesh)}",
            f"model      {type(run.model).__name__}, {run.num_params:,} parameters",
            *(f"assumed    {line}" for line in self.assumed),
            *([f"context    {run.sequence}"] if run.sequence.num_devices > 1 else []),
            *(f"attention  {choice}" for choice in run.attention_kernels),
            f"compiled   {self.trace_s:.1f} s tracing, {self.compile_s:.1f} s compiling",
            f"memory     {size(memory['compiled_bytes'])} per device compiled, "
            f"{size(memory['estimated_bytes'])} estimated ({memory['ratio']:.2f}); {fits} into the "
            f"budget of {size(memory['budget_bytes'])}",
            f"           {size(memory['host_bytes'])} per host",
            *([f"warning    {memory['warning']}"] if memory["warning"] else []),
            *(f"would fit  {remedy}" for remedy in self.remedies),
            "",
            format_prediction(self.prediction),
            "",
            f"predicted: {self._summary(self.prediction)}",
        ]
        if self.skewed is not None:
            more = self.skewed.step_s / self.prediction.step_s - 1
            lines.append(
                f"predicted with --expert_load={self.expert_load:g}: "
                f"{self._summary(self.skewed)}; {more:+.1%} time, the same memory"
            )
        return "\n".join(lines)

    def _summary(self, prediction: Prediction) -> str:
        """Return time, speed and utilization of a predicted step."""
        units_per_s = self.run.units_per_step / prediction.step_s
        known = self._mfu_at(units_per_s)
        utilization = "not known" if known is None else f"{known:.1%}"
        return (
            f"{prediction.step_s * 1e3:,.1f} ms per step, {units_per_s:,.0f} {self.run.unit}s/s, "
            f"MFU {utilization}"
        )


def compile_and_predict(
    run: Run,
    devices: str,
    machine: Machine,
    budget: Budget,
    *,
    assumed: tuple[str, ...] = (),
    expert_load: float | None = None,
) -> CompiledStep:
    """Compile the training step of a run, and predict its time.

    Args:
        devices: name of its devices, for reports.
        machine: their rates.
        budget: memory that a step may use.
        assumed: assumptions about values that the data would determine, as text.
        expert_load: load of experts to predict in addition to an even one; see
            predict/time/prediction.py.
    """
    start = time.perf_counter()
    _ = run.trace_train_step()
    traced = time.perf_counter()
    compiled = run.compile_train_step()
    compile_s = time.perf_counter() - traced
    text = compiled.as_text() or ""
    used = memory(compiled)

    def predict_with(load: float) -> Prediction:
        shape = dict(run.mesh.shape)
        temp_bytes = used.temp_bytes or 0
        return predict(text, shape, machine, _ticks(run), temp_bytes, expert_load=load)

    return CompiledStep(
        run=run,
        devices=devices,
        compiled=compiled,
        budget=budget,
        assumed=assumed,
        trace_s=traced - start,
        compile_s=compile_s,
        memory=used,
        prediction=predict_with(1.0),
        expert_load=expert_load or 1.0,
        skewed=None if expert_load is None else predict_with(expert_load),
    )


def _ticks(run: Run) -> Ticks | None:
    """Return the work of each pipeline stage in each tick; None without a pipeline."""
    if run.schedule.num_stages == 1 and run.schedule.num_microbatches == 1:
        return None
    return Ticks.of_program(run.tick_program(), run.layouts)


def _known_bytes(num_bytes: float) -> int | None:
    """Return a number of bytes; None if it is unlimited."""
    return None if math.isinf(num_bytes) else int(num_bytes)
