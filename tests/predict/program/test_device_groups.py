"""Tests of all spellings of device groups that XLA is known to print, on a mesh of (2, 2, 2)."""

import pytest

from predict.program import device_groups

MESH = {"pipeline": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("data",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("pipeline",)),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("pipeline", "data")),
        ("replica_groups={{0,1,4,5},{2,3,6,7}}", ("pipeline", "model")),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("replica_groups={}", ("pipeline", "data", "model")),
        ("dimensions={0}", ("pipeline", "data", "model")),
        ("replica_groups=[4,2]<=[8]", ("model",)),
        ("replica_groups=[2,4]<=[8]", ("data", "model")),
        ("replica_groups=[1,8]<=[8]", ("pipeline", "data", "model")),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("pipeline",)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("data",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("pipeline", "data")),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("pipeline", "model")),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b'}", ("data",)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=1,'d'=2] {'a','d'}", ("pipeline", "model")),
        ("replica_groups=@mesh<a=2,b=2,c=2>{a}", ("pipeline",)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ("data",)),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", ("pipeline", "model")),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("model",)),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=(0,1,4,5,2,3,6,7) {'a'}",
            ("pipeline", "data"),
        ),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,1,4,5,2,3,6,7) {'a'}", ("data",)),
        ("source_target_pairs={{0,4},{4,0},{1,5},{5,1}}", ("pipeline",)),
        ("source_target_pairs={{0,0},{1,2},{2,1},{3,3}}", ("data", "model")),
        ('frontend_attributes={_xla_send_recv_source_target_pairs="{{0,4},{1,5}}"}', ("pipeline",)),
        ("frontend_attributes={_xla_send_recv_source_target_pairs={{0,4},{1,5}}}", ("pipeline",)),
    ],
)
def test_axes_of_every_spelling(text, axes):
    groups = device_groups.parse(f"channel_id=1, {text}, use_global_device_ids=true", 8)
    assert device_groups.axes_of(groups, MESH) == axes


def test_parse_keeps_the_members_of_each_group():
    assert device_groups.parse("replica_groups={{0,2},{1,3}}, dimensions={0}", 4) == [
        (0, 2),
        (1, 3),
    ]
    assert device_groups.parse("replica_groups=[2,4]<=[4,2]T(1,0)", 8) == [
        (0, 2, 4, 6),
        (1, 3, 5, 7),
    ]
    assert device_groups.parse("replica_groups=mesh['a'=8] {'a':(2)2}", 8) == [
        (0, 2),
        (1, 3),
        (4, 6),
        (5, 7),
    ]


def test_parse_rejects_unknown_spellings():
    with pytest.raises(ValueError, match="unknown spelling of device groups: '<0-7>'"):
        device_groups.parse("replica_groups=<0-7>", 8)


def test_axes_of_rejects_devices_outside_the_mesh():
    with pytest.raises(ValueError, match="device 8, but the mesh .* has 8 devices"):
        device_groups.axes_of([(0, 8)], MESH)
