"""Tests of the table of collectives, on programs compiled for 8 simulated devices."""

import jax
import jax.numpy as jnp

from predict.program.collective_table import format_table, summary
from predict.program.communication import collectives
from tests.predict.mapped import ARRAY_BYTES, compile_mapped


def test_summary_groups_and_multiplies_by_trip_counts(mesh):
    def function(x):
        def body(x, _):
            x = jax.lax.psum(x, "model")
            return jax.lax.psum(jnp.sin(x), "model"), None

        x = jax.lax.scan(body, x, length=6)[0]
        return jax.lax.psum(x, "data")

    rows = summary(collectives(compile_mapped(function, mesh), mesh))
    assert [(row.axes, row.loop_depth, row.count) for row in rows] == [
        (("model",), 1, 2),
        (("data",), 0, 1),
    ]
    assert rows[0].bytes == 2 * ARRAY_BYTES
    assert rows[0].bytes_per_step == 12 * ARRAY_BYTES
    table = format_table(rows).splitlines()
    assert table[0].split() == ["collective", "axes", "loops", "count", "bytes", "bytes/step"]
    assert table[1].split() == ["all-reduce", "model", "1", "2", "512", "3,072"]
    assert len({len(line) for line in table}) == 1
