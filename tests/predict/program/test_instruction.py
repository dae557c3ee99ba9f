"""Tests of the labels of loops."""

import pytest

from predict.program.instruction import Instruction, loop_label


@pytest.mark.parametrize(
    "op_name, label",
    [
        ("jit(f)/shard_map/pipeline_ticks/while", "pipeline_ticks"),
        ("jit(f)/ticks/while/body/closed_call/layers/while", "layers"),
        ("jit(f)/transpose(jvp(layers))/while", "layers"),
        ("jit(f)/shard_map/while/body/closed_call/jvp()/while", ""),
        ("jit(f)/while/body/eval_jaxpr/while", ""),
        ("", ""),
    ],
)
def test_loop_label_is_the_scope_of_the_loop(op_name, label):
    loop = Instruction(
        name="w",
        opcode="while",
        type=(),
        operands=(),
        operand_types=(),
        attributes="",
        called=(),
        op_name=op_name,
    )
    assert loop_label(loop) == label
