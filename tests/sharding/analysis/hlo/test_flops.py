"""Tests of the FLOPs of an instruction."""

from sharding.analysis.hlo.flops import attention_flops
from sharding.analysis.hlo.instruction import Instruction
from sharding.analysis.hlo.parse import parse_modules
from tests.sharding.analysis.cost.programs import module


def attention(mask: str, window: int, *, backward: bool = False) -> Instruction:
    shape = "bf16[2,1000,8,64]{3,2,1,0}"
    target = "__cudnn$fmhaSoftmaxBackward" if backward else "__cudnn$fmhaSoftmax"
    entry = (
        f"  %q = {shape} parameter(1)\n  %k = bf16[2,1000,2,64]{{3,2,1,0}} parameter(2)\n"
        f"  %v = bf16[2,1000,2,64]{{3,2,1,0}} parameter(3)\n"
        f"  %a = ({shape}, u8[0]{{0}}) custom-call(%q, %k, %v), "
        f'custom_call_target="{target}", backend_config={{"cudnn_fmha_backend_config": '
        '{"intermediate_tensor_shape": {"element_type": "BF16", '
        '"dimensions": ["2", "8", "1000", "1000"], "tuple_shapes": []}, '
        f'"mask_type": "{mask}", "sliding_window_length": {window}}}}}\n'
    )
    (parsed,) = parse_modules(module("", entry))
    return parsed.computations["main"][-1]


def test_attention_flops_count_the_pairs_that_the_mask_shows():
    per_pair = 2 * 2 * 8 * (64 + 64)
    assert attention_flops(attention("NO_MASK", 0)) == per_pair * 1000 * 1000
    assert attention_flops(attention("CAUSAL", 0)) == per_pair * 1000 * 1001 // 2
    assert attention_flops(attention("PADDING_CAUSAL", 0)) == per_pair * 1000 * 1001 // 2
    windowed = sum(min(t + 1, 256) for t in range(1000))
    assert attention_flops(attention("CAUSAL", 256)) == per_pair * windowed
    backward = attention_flops(attention("NO_MASK", 0, backward=True))
    assert backward == 5 * per_pair * 1000 * 1000 // 2
