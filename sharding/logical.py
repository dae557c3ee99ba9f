"""Logical axis names on activations: all that a model needs to know of sharding.

A model says `x = constrain(x, "batch", "seq", "act_embed")`. Outside a mesh this does nothing;
inside `axis_rules(rules)` each name becomes the mesh axes that the table in sharding/rules.py gives
it. Mesh axes that the caller already handles by hand (inside a `shard_map`) are left out.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Rules = Mapping[str, tuple[str, ...]]

_active_rules: contextvars.ContextVar[Rules | None] = contextvars.ContextVar("rules", default=None)


@contextlib.contextmanager
def axis_rules(rules: Rules) -> Iterator[None]:
    """Makes `rules` (logical axis -> mesh axes) the ones that `constrain` follows."""
    token = _active_rules.set(rules)
    try:
        yield
    finally:
        _active_rules.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Returns `x` laid out over the mesh as the rules say.

    Args:
      x: array of rank `len(axes)`.
      *axes: a logical axis name per dimension, or None for a dimension that is not split.

    Raises:
      ValueError: an unknown name, or a rank other than `len(axes)`.
    """
    rules, mesh = _active_rules.get(), jax.sharding.get_abstract_mesh()
    if rules is None or mesh.empty:
        return x
    if x.ndim != len(axes):
        raise ValueError(f"constrain{axes} names {len(axes)} axes of an array of shape {x.shape}")
    spec = PartitionSpec(*(_mesh_axes(name, rules, mesh) for name in axes))
    if all(part is None for part in spec):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _mesh_axes(name: str | None, rules: Rules, mesh) -> tuple[str, ...] | None:
    if name is None:
        return None
    if name not in rules:
        raise ValueError(f"logical axis {name!r} is in no rule; known: {', '.join(sorted(rules))}")
    free = {
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[axis] > 1
    }
    return tuple(axis for axis in rules[name] if axis in free) or None
