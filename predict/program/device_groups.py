"""Parses the device groups of a collective, and finds the mesh axes that they span.

On a mesh of data=2 × model=4, devices are numbered 0 to 7, and the groups {{0,1,2,3},{4,5,6,7}}
differ only along `model`. XLA writes the same groups in three ways:

    {{0,1,2,3},{4,5,6,7}}           explicit lists; also (source, target) pairs of a permutation
    [2,4]<=[8]                      0..7 reshaped to [groups, size]; T(1,0) adds a transpose
    mesh['a'=2,'b'=4] {'b'}         named axes of a mesh that XLA defines for itself
"""

import math
import re
from collections.abc import Mapping

import numpy as np

Groups = list[tuple[int, ...]]


def parse(attributes: str, num_devices: int) -> Groups:
    """Return the groups of devices among which a collective communicates.

    Args:
        attributes: instruction's attributes, with `replica_groups` or `source_target_pairs`.
        num_devices: number of partitions of the program; an empty list of groups means one group
            with all of them.

    Returns:
        One tuple of partition numbers per group, or per (source, target) pair.

    Raises:
        ValueError: if the groups are not written in a known way.
    """
    # When XLA splits a permutation, its sends carry the pairs too, sometimes in quotes.
    match = re.search(r'(?:replica_groups|source_target_pairs)="?(.*)', attributes)
    if match is None:
        return [tuple(range(num_devices))]
    text = match[1]
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        shape = _integers(iota[1])
        # The last dim is the group size; all dims before it number the groups.
        return [tuple(group) for group in _iota(iota[2]).reshape(-1, shape[-1]).tolist()]
    if mesh := re.match(
        r"@?mesh[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,]*)\))?"
        r"\s*\{([^}]*)\}",
        text,
    ):
        return _from_mesh(mesh[1], mesh[2], mesh[3])
    if lists := re.match(r"\{\s*(?:\{[\d,\s]*\}[,\s]*)*\}", text):
        groups = [tuple(_integers(group)) for group in re.findall(r"\{([\d,\s]*)\}", lists[0])]
        groups = [group for group in groups if group]
        return groups or [tuple(range(num_devices))]
    raise ValueError(
        f"unknown spelling of device groups: {text[:120]!r}; expected one like {{{{0,1}},{{2,3}}}},"
        " [4,2]<=[8] or mesh['a'=2,'b'=4] {'a'}; extend device_groups.parse"
    )


def axes_of(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the members of a group differ.

    Args:
        groups: partition numbers of each group.
        mesh_shape: sizes of the mesh axes, in mesh order.

    Raises:
        ValueError: if a group has a device that is not in the mesh.
    """
    # A partition's number is its position in the mesh; the ids of the mesh's devices may differ.
    shape = tuple(mesh_shape.values())
    largest = max((device for group in groups for device in group), default=0)
    if largest >= math.prod(shape):
        raise ValueError(
            f"the program communicates with device {largest}, but the mesh {dict(mesh_shape)} has"
            f" {math.prod(shape)} devices; pass the mesh that the program was compiled for"
        )
    differs = np.zeros(len(shape), bool)
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.array(group), shape))
        differs |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(axis for axis, differ in zip(mesh_shape, differs, strict=True) if differ)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Return the device numbers of '[2,4]T(1,0)': 0..7 in that shape, then transposed."""
    shape, _, permutation = text.partition("T")
    sizes = _integers(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_integers(permutation)) if permutation else numbers


def _from_mesh(axes: str, device_ids: str | None, group_axes: str) -> Groups:
    """Return groups that are written as mesh axes, as in mesh['a'=2,'b'=4] {'a','b':(2)2}."""
    names_sizes = re.findall(r"'?([^'=,\s]+)'?=(\d+)", axes)
    wanted = re.findall(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?", group_axes)
    # A group may use a part of an axis. 'b':(2)2 with b=4 splits b into dims of 2 and 2, and uses
    # the second one: "(2)" is the product of the factors before it, "2" its own size.
    dims: list[int] = []
    communicating: list[int] = []
    for name, size in ((name, int(size)) for name, size in names_sizes):
        parts = sorted((int(pre), int(part)) for n, pre, part in wanted if n == name and pre)
        if any(n == name and not pre for n, pre, _ in wanted):
            parts = [(1, size)]
        done = 1
        for pre, part in parts:
            dims.append(pre // done)
            communicating.append(len(dims))
            dims.append(part)
            done = pre * part
        dims.append(size // done)
    if device_ids and device_ids.startswith("["):
        numbers = _iota(device_ids)
    else:
        numbers = np.array(_integers(device_ids)) if device_ids else np.arange(math.prod(dims))
    other_dims = [dim for dim in range(len(dims)) if dim not in communicating]
    size = math.prod(dims[dim] for dim in communicating)
    groups = numbers.reshape(dims).transpose(other_dims + communicating).reshape(-1, size)
    return [tuple(group) for group in groups.tolist()]
