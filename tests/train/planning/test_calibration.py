"""Rates of the devices that are present: measured, stored, and used."""

import dataclasses
import json
import math

import jax
import pytest

from predict.machines.datasheets import machine_of_devices
from train.planning import calibration
from train.planning.calibration import Calibration, calibrate, use_calibration

RATES = Calibration(
    device_kind="cpu",
    num_devices=8,
    flops_per_s=7e9,
    memory_bytes_per_s=9e9,
    link_bytes_per_s=3e9,
    kernel_s=1e-6,
    collective_latency_s=1e-4,
    allocation_s_per_byte=1e-9,
)


@pytest.fixture
def machine():
    return machine_of_devices(jax.devices()[:8], 8)


def stored(directory, values: dict) -> None:
    (directory / "machine.json").write_text(json.dumps(values))


def test_measured_rates_are_stored_and_used_for_the_same_devices(tmp_path, machine, monkeypatch):
    for sizes in (
        calibration._WIDTH,
        calibration._STREAMED,
        calibration._REDUCED,
        calibration._WIDTH_BEFORE,
    ):
        monkeypatch.setitem(sizes, "cpu", 64)
    monkeypatch.setattr(calibration, "_ALLOCATED", 2**12)
    monkeypatch.setattr(calibration, "_TURNS", 3)
    devices = jax.devices()[:8]
    assert use_calibration(machine, devices, tmp_path) == machine  # nothing is stored yet
    found = calibrate(devices, tmp_path / "cache")
    assert all(0 < v < math.inf for k, v in vars(found).items() if k.endswith("_s"))
    used = use_calibration(machine, devices, tmp_path / "cache")
    assert used == found.applied(machine)
    assert used.kernel_s == found.kernel_s
    assert use_calibration(machine, devices[:4], tmp_path / "cache") == machine


def test_products_of_all_types_are_as_much_faster_as_those_of_float32(machine):
    used = RATES.applied(machine)
    assert used.peak_flops_per_s("f32") == pytest.approx(1e10)  # 70 % of which are measured
    assert used.peak_flops_per_s("f64") == pytest.approx(0.5e10)
    assert used.memory_bytes_per_s == pytest.approx(1e10)
    assert used.link_bytes_per_s == pytest.approx(4e9)
    assert used.allocation_s_per_byte == 1e-9
    assert used.shares_cores


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel_s": 0.0}, "kernel_s=0.0 must be positive"),
        ({"allocation_s_per_byte": -1e-9}, "allocation_s_per_byte=-1e-09 must be positive"),
        ({"kernel_s": "fast"}, "machine.json"),
    ],
)
def test_damaged_rates_are_refused(change, message, tmp_path, machine):
    stored(tmp_path, dataclasses.asdict(RATES) | change)
    with pytest.raises(ValueError, match=message):
        use_calibration(machine, jax.devices()[:8], tmp_path)
