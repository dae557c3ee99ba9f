"""Tests of reading and building PartitionSpecs."""

import pytest
from jax.sharding import PartitionSpec as P

from sharding.spec import axes_by_dim, axes_of, is_spec, restrict, spec_of, without

MIXED = P("pipeline", None, ("data", "fsdp"))


@pytest.mark.parametrize(
    ("spec", "rank", "expected"),
    [
        (MIXED, 4, (("pipeline",), (), ("data", "fsdp"), ())),
        (MIXED, 3, (("pipeline",), (), ("data", "fsdp"))),
        (MIXED, 0, (("pipeline",), (), ("data", "fsdp"))),
        (MIXED[1:], 0, ((), ("data", "fsdp"))),
        (P(), 2, ((), ())),
        (P(("model",), ()), 2, (("model",), ())),
        (P(P.UNCONSTRAINED, "model"), 2, ((), ("model",))),
    ],
)
def test_axes_by_dim_of_every_spelling(spec, rank, expected):
    assert axes_by_dim(spec, rank) == expected


def test_axes_of_a_spec_and_of_a_part_of_it():
    assert axes_of(MIXED) == {"pipeline", "data", "fsdp"}
    assert axes_of(MIXED[:1]) == {"pipeline"}
    assert axes_of(P()) == axes_of(P(None)) == set()


@pytest.mark.parametrize("spec", [MIXED, P(), P(None, "model"), P("data", None)])
def test_spec_of_undoes_axes_by_dim(spec):
    assert spec_of(axes_by_dim(spec)) == spec


def test_spec_of_spells_single_axes_as_names():
    assert tuple(spec_of([("model",), (), ("data", "fsdp")])) == ("model", None, ("data", "fsdp"))


def test_restricted_keeps_the_rank_and_the_order_of_axes():
    assert restrict(MIXED, {"fsdp"}) == P(None, None, "fsdp")
    assert restrict(MIXED, ("fsdp", "data")) == P(None, None, ("data", "fsdp"))
    assert len(restrict(MIXED, ())) == len(MIXED)


def test_without_leaves_axes_out_of_every_dim():
    axes = (("pipeline",), (), ("data", "fsdp"))
    assert without(axes, {"pipeline", "data"}) == ((), (), ("fsdp",))


def test_is_spec_tells_specs_from_the_tuples_that_they_hold():
    assert is_spec(P("data")) and is_spec(P())
    assert not is_spec(("data",)) and not is_spec(None)
