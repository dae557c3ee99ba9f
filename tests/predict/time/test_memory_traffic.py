"""Tests of the bytes that a kernel moves."""

import pytest

from predict.machines.machine import KERNEL_S
from predict.program.parse import parse_modules
from predict.time.memory_traffic import moved_bytes, scatters_in_place
from predict.time.prediction import predict
from tests.predict.time.programs import GATHERED, MACHINE, MESH, module


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


def scatter_program(target: str) -> str:
    fused = (
        "%fused (a: f32[32,1000], i: s32[2,1], new: f32[2,1,1000]) -> f32[32,1000] {\n"
        "  %a = f32[32,1000]{1,0} parameter(0)\n  %i = s32[2,1]{1,0} parameter(1)\n"
        "  %new = f32[2,1,1000]{2,1,0} parameter(2)\n  %zero = f32[] constant(0)\n"
        "  %zeros = f32[32,1000]{1,0} broadcast(%zero), dimensions={}\n"
        f"  ROOT %out = f32[32,1000]{{1,0}} scatter(%{target}, %i, %new), to_apply=%none\n}}\n\n"
    )
    entry = (
        "  %x = f32[32,1000]{1,0} parameter(1)\n  %i.1 = s32[2,1]{1,0} parameter(2)\n"
        "  %n = f32[2,1,1000]{2,1,0} parameter(3)\n"
        "  %f = f32[32,1000]{1,0} fusion(%x, %i.1, %n), kind=kInput, calls=%fused, "
        'backend_config={"reification_cost":[{"exec_time_us":500,"name":""}]}\n'
    )
    return module(fused, entry)


@pytest.mark.parametrize(
    ("target", "is_in_place", "num_bytes"),
    [("a", True, 2 * 8000 + 8), ("zeros", False, 8000 + 8 + 128_000)],
)
def test_scatter_into_an_operand_writes_only_its_updates(target, is_in_place, num_bytes):
    (parsed,) = parse_modules(scatter_program(target))
    fusion = parsed.computations["main"][-1]
    assert fusion.name == "f"
    assert scatters_in_place(parsed, fusion) == is_in_place
    assert moved_bytes(parsed, fusion) == num_bytes
    found = predict(scatter_program(target), MESH, MACHINE)
    assert found.step_s == pytest.approx(KERNEL_S if is_in_place else 500e-6)
