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
      ValueError: a rank other than `len(axes)`, or one of the reasons of `to_spec`.
    """
    rules, mesh = _active_rules.get(), jax.sharding.get_abstract_mesh()
    if rules is None or mesh.empty:
        return x
    if x.ndim != len(axes):
        raise ValueError(f"constrain{axes} names {len(axes)} axes of an array of shape {x.shape}")
    free = {
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[axis] > 1
    }
    parts = [part if isinstance(part, tuple) else (part,) for part in to_spec(axes, rules)]
    parts = [tuple(axis for axis in part if axis in free) or None for part in parts]
    if not any(parts):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*parts)))


def to_spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Returns the PartitionSpec of a tensor whose dimensions have these logical names.

    Raises:
      ValueError: a name without a rule, or two dimensions split over the same mesh axis.
    """
    used: dict[str, str] = {}
    parts = []
    for name in axes:
        if name is not None and name not in rules:
            raise ValueError(
                f"logical axis {name!r} is in no rule; known: {', '.join(sorted(rules))}; "
                f"add a row such as config.rules.{name}='model'"
            )
        mesh_axes = rules[name] if name is not None else ()
        for axis in mesh_axes:
            if axis in used:
                raise ValueError(
                    f"logical axes {axes}: {used[axis]!r} and {name!r} are both split over mesh "
                    f"axis {axis!r}; a tensor can use a mesh axis once, so change one rule"
                )
            used[axis] = str(name)
        parts.append(mesh_axes if len(mesh_axes) > 1 else next(iter(mesh_axes), None))
    return PartitionSpec(*parts)
