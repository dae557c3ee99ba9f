"""Tests of the FLOPs of an instruction."""

from predict.program.instruction import Instruction
from predict.program.instruction_work import attention_work
from predict.program.parse import parse_modules
from tests.predict.time.programs import module


def attention(mask: str, window: int) -> Instruction:
    shape = "bf16[2,1000,8,64]{3,2,1,0}"
    entry = (
        f"  %q = {shape} parameter(1)\n  %k = bf16[2,1000,2,64]{{3,2,1,0}} parameter(2)\n"
        f"  %v = bf16[2,1000,2,64]{{3,2,1,0}} parameter(3)\n"
        f"  %a = ({shape}, u8[0]{{0}}) custom-call(%q, %k, %v), "
        f'custom_call_target="__cudnn$fmhaSoftmax", backend_config={{"cudnn_fmha_backend_config": '
        '{"intermediate_tensor_shape": {"element_type": "BF16", '
        '"dimensions": ["2", "8", "1000", "1000"], "tuple_shapes": []}, '
        f'"mask_type": "{mask}", "sliding_window_length": {window}}}}}\n'
    )
    (parsed,) = parse_modules(module("", entry))
    return parsed.computations["main"][-1]


def test_attention_work_counts_the_tiles_that_the_mask_shows():
    """1000 tokens are 8 tiles of 128, the last of which is not full."""

    def num_tiles(mask: str, window: int = 0) -> float:
        work = attention_work(attention(mask, window))
        assert (work.num_queries, work.head_dim) == (2 * 8 * 1000, 64)
        return work.num_pairs / (2 * 8 * 128**2)

    assert num_tiles("NO_MASK") == 8 * 8
    assert num_tiles("CAUSAL") == num_tiles("PADDING_CAUSAL") == 8 * 9 / 2
    # The first query of a tile sees 255 earlier keys, in two tiles; with one key more, in three.
    assert num_tiles("CAUSAL", 256) == 1 + 2 + 6 * 3
    assert num_tiles("CAUSAL", 258) == 1 + 2 + 3 + 5 * 4
    assert num_tiles("CAUSAL", 1) == 8
