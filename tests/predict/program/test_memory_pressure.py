"""Tests of XLA's memory limit and its recomputations, on stand-ins for compiled steps."""

import types
from typing import Any

import pytest

from predict.program.memory_pressure import memory_pressure

GIB = 2**30
TEXT = """HloModule jit_step
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %loop_add_fusion.3 = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
"""


def compiled(temp_bytes: int, text: str = TEXT) -> Any:
    stats = types.SimpleNamespace(
        argument_size_in_bytes=10 * GIB,
        output_size_in_bytes=10 * GIB,
        alias_size_in_bytes=10 * GIB,
        temp_size_in_bytes=temp_bytes,
    )
    return types.SimpleNamespace(memory_analysis=lambda: stats, as_text=lambda: text)


@pytest.mark.parametrize(("temp_gib", "is_over"), [(51, False), (52, True)])
def test_limit_equals_the_limit_of_xla(temp_gib, is_over):
    """XLA plans with 64 of 80 GiB; arguments take 10, and of the other 54 it uses 51.3."""
    found = memory_pressure(compiled(temp_gib * GIB), device_bytes=80 * GIB)
    assert found is not None
    assert found.limit_bytes == pytest.approx((10 + 0.95 * (64 - 10)) * GIB)
    assert found.is_over == is_over
    assert ("61.3 GiB that XLA tried to keep to" in str(found)) == is_over


def test_limit_of_installed_gpus_is_their_whole_memory():
    found = memory_pressure(compiled(52 * GIB), device_bytes=80 * GIB, is_described=False)
    assert found is not None
    assert not found.is_over and str(found) == ""


def test_recomputed_instructions_are_counted_once_per_definition():
    more = """  %fusion.7.remat = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %copy.remat2.1 = f32[4]{0} copy(%fusion.7.remat)
  ROOT %premature = f32[4]{0} add(%copy.remat2.1, %fusion.7.remat)
"""
    found = memory_pressure(compiled(GIB, TEXT + more), device_bytes=80 * GIB)
    assert found is not None
    assert found.num_recomputed == 2
    assert str(found).startswith("XLA recomputes 2 instructions")


def test_pressure_is_unknown_if_the_compiler_reports_no_memory():
    silent: Any = types.SimpleNamespace(memory_analysis=lambda: None, as_text=lambda: TEXT)
    assert memory_pressure(silent, device_bytes=80 * GIB) is None
