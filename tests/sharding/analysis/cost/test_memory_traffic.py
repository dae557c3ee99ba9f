"""Tests of the bytes that a kernel moves."""

from sharding.analysis.cost.memory_traffic import moved_bytes
from sharding.analysis.hlo.parse import parse_modules
from tests.sharding.analysis.cost.programs import GATHERED, module


def test_moved_bytes_of_slices_and_updates_count_only_the_slice():
    fused = (
        "%fused (a: f32[32,1000], b: f32[32,1000], i: s32[]) -> f32[32,1000] {\n"
        "  %a = f32[32,1000]{1,0} parameter(0)\n  %b = f32[32,1000]{1,0} parameter(1)\n"
        "  %i = s32[] parameter(2)\n  %zero = s32[] constant(0)\n"
        "  %part = f32[1,1000]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,1000}\n"
        "  ROOT %new = f32[32,1000]{1,0} dynamic-update-slice(%b, %part, %i, %zero)\n}\n\n"
    )
    entry = (
        "  %x = f32[32,1000]{1,0} parameter(1)\n  %i.1 = s32[] parameter(2)\n"
        "  %f = f32[32,1000]{1,0} fusion(%x, %x, %i.1), kind=kLoop, calls=%fused\n"
        "  %s = ((f32[32,1000]{1,0}, s32[]), f32[32,1000]{1,0}, u32[]) "
        "fusion-start(%x, %x, %i.1), kind=kLoop, calls=%fused\n"
        f"  %c = {GATHERED} copy(%p)\n"
    )
    (parsed,) = parse_modules(module(fused, entry))
    *_, update, start, copy = parsed.computations["main"]
    assert moved_bytes(parsed, update) == 2 * 4000 + 4  # reads and writes a row, reads the index
    assert moved_bytes(parsed, start) == 2 * 4000 + 4
    assert moved_bytes(parsed, copy) == 160_000_000 + 32
