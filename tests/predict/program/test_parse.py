"""Tests of parsing a program's text."""

import pytest

from predict.program.instruction import arrays_of
from predict.program.parse import parse_modules, parse_type


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("f32[4,16]{1,0}", 256),
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(5)}", 12),
        ("f8e4m3fn[10]{0}", 10),
        ("s4[5]{0}", 3),
        ("c128[2]{0}", 32),
        ("f32[0,7]{1,0}", 0),
        ("f32[<=5]{0}", 20),
        ("(f32[2]{0}, (u32[], token[]), s8[3]{0})", 15),
        ("()", 0),
    ],
)
def test_parse_type_counts_bytes(text, bytes_):
    assert sum(array.bytes for array in arrays_of(parse_type(text))) == bytes_


def test_parse_modules_rejects_other_text():
    with pytest.raises(ValueError, match="'module @jit_f' has none"):
        parse_modules("module @jit_f")
