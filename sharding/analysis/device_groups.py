"""The groups of devices in which a compiled program communicates, and the mesh axes they span."""

import math
import re
from collections.abc import Mapping

import numpy as np

Groups = list[tuple[int, ...]]


def parse(attributes: str, num_devices: int) -> Groups:
    """The groups of partitions among which a collective communicates.

    Args:
      attributes: an instruction's attributes, holding `replica_groups` or `source_target_pairs`.
      num_devices: partitions of the program; an empty list of groups means all of them together.

    Returns:
      One tuple of partition numbers per group, or per (source, target) pair.

    Raises:
      ValueError: the groups are spelled in none of the known ways.
    """
    # The sends into which XLA splits a permutation carry their pairs too, sometimes in quotes.
    found = re.search(r'(?:replica_groups|source_target_pairs)="?(.*)', attributes)
    if found is None:
        return [tuple(range(num_devices))]
    text = found[1]
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        shape = _integers(iota[1])
        # Any further dims than [groups, size] number the groups.
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
    """The mesh axes along which members of one group differ."""
    # A partition's number is its position in the mesh, whatever the ids of the mesh's devices are.
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
    """The device numbers of '[2,4]T(1,0)': 0, 1, ... in that shape, then transposed."""
    shape, _, permutation = text.partition("T")
    sizes = _integers(shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_integers(permutation)) if permutation else numbers


def _from_mesh(axes: str, device_ids: str | None, group_axes: str) -> Groups:
    """Groups written as axes of a mesh of XLA's own, as in mesh['a'=2,'b'=4] {'a','b':(2)2}."""
    names_sizes = re.findall(r"'?([^'=,\s]+)'?=(\d+)", axes)
    wanted = re.findall(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?", group_axes)
    # A part of an axis, 'b':(2)2, is the factor of size 2 behind a factor of size 2: split it out.
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
    rest = [dim for dim in range(len(dims)) if dim not in communicating]
    size = math.prod(dims[dim] for dim in communicating)
    groups = numbers.reshape(dims).transpose(rest + communicating).reshape(-1, size)
    return [tuple(group) for group in groups.tolist()]
