"""Logical axis names on activations: all that a model needs to know of sharding.

A model says `x = constrain(x, "batch", "seq", "act_embed")`. Outside a mesh this does nothing;
inside `axis_rules(rules)` each name becomes the mesh axes that the table in sharding/rules.py gives
it. Mesh axes that the caller already handles by hand (inside a `shard_map`) are left out.

What is split over the pipeline's stages is really a part: the vocab, where they share the embedding
and the head. A function over the vocab says so with `offset`, `sum_over` and `max_over`; they do
nothing where the whole vocab is at hand.

A model's functions see the examples of one device. One that compares those of all devices with each
other says so with `gather_batch`, `first_example` and `sum_over_batch`.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sharding.collectives import psum
from sharding.mesh import REPLICA_AXES

Rules = Mapping[str, tuple[str, ...]]

_active_rules: contextvars.ContextVar[Rules | None] = contextvars.ContextVar("rules", default=None)
_alone: contextvars.ContextVar[str] = contextvars.ContextVar("alone", default="")


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
    free = _automatic(mesh)
    parts = [part if isinstance(part, tuple) else (part,) for part in to_spec(axes, rules)]
    parts = [tuple(axis for axis in part if axis in free) or None for part in parts]
    if not any(parts):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*parts)))


def automatic_axes(name: str) -> tuple[str, ...]:
    """Returns the mesh axes of this logical axis over which XLA splits arrays by itself."""
    rules, mesh = _active_rules.get(), jax.sharding.get_abstract_mesh()
    if rules is None or mesh.empty:
        return ()
    free = _automatic(mesh)
    return tuple(axis for axis in rules.get(name, ()) if axis in free)


def _automatic(mesh: jax.sharding.AbstractMesh) -> set[str]:
    """Returns the axes of more than one device that no enclosing `shard_map` handles by hand."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, kind in kinds if kind == AxisType.Auto and mesh.shape[axis] > 1}


@contextlib.contextmanager
def runs_alone(function: str) -> Iterator[None]:
    """Makes it an error to ask other stages for their parts: they do not run this function."""
    token = _alone.set(function)
    try:
        yield
    finally:
        _alone.reset(token)


def axes_by_hand(name: str) -> tuple[str, ...]:
    """Returns the mesh axes of this logical axis over which the caller's arrays are parts.

    That is the pipeline, if any: over the other axes that are handled by hand the executor puts
    parameters together before use, and devices hold other examples.

    Raises:
      ValueError: the other stages do not run what asks; see `runs_alone`.
    """
    rules, axes = _active_rules.get(), ()
    if rules is not None and "pipeline" in rules.get(name, ()):
        axes = _by_hand(("pipeline",))
    if axes and _alone.get():
        raise ValueError(
            f"{_alone.get()} uses the {name}, of which pipeline.share_vocab=True gives every stage "
            "a part, and one stage alone runs it; use it in embed or head, or set "
            "pipeline.share_vocab=False"
        )
    return axes


def _by_hand(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the mesh axes that are handled by hand and have more devices than one."""
    mesh = jax.sharding.get_abstract_mesh()
    if _active_rules.get() is None or mesh.empty:
        return ()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(a for a in axes if kinds[a] == AxisType.Manual and mesh.shape[a] > 1)


def offset(name: str, size: int) -> jax.Array | int:
    """Returns the number of the first of the `size` entries of a logical axis that are here."""
    axes = axes_by_hand(name)
    return jax.lax.axis_index(axes) * size if axes else 0


def sum_over(name: str, x: jax.Array) -> jax.Array:
    """Returns the sum of the parts' `x`, the same for all; each gets the gradient of the sum."""
    axes = axes_by_hand(name)
    return _sum(axes, x) if axes else x


def max_over(name: str, x: jax.Array) -> jax.Array:
    """Returns the largest of the parts' `x`; no gradient flows through it."""
    axes, x = axes_by_hand(name), jax.lax.stop_gradient(x)
    return jax.lax.pmax(x, axes) if axes else x


def gather_batch(x: jax.Array) -> jax.Array:
    """Returns `x`, [B, ...] of this device's examples, of all devices' examples; no gradient."""
    axes, x = _by_hand(REPLICA_AXES), jax.lax.stop_gradient(x)
    return jax.lax.all_gather(x, axes, tiled=True) if axes else x


def first_example(size: int) -> jax.Array | int:
    """Returns the place of the first of a device's `size` examples in what `gather_batch` gives."""
    axes = _by_hand(REPLICA_AXES)
    return jax.lax.axis_index(axes) * size if axes else 0


def sum_over_batch(x: jax.Array) -> jax.Array:
    """Returns the sum of the devices' `x`, the same for all; each gets the gradient of all."""
    axes = _by_hand(REPLICA_AXES)
    return _sum_of_examples(axes, x) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return psum(x, axes)


_sum.defvjp(lambda axes, x: (_sum(axes, x), None), lambda axes, _, dy: (dy,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_examples(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return psum(x, axes)


# Every device has a loss of its own examples, and all of these hang on the sum.
_sum_of_examples.defvjp(
    lambda axes, x: (_sum_of_examples(axes, x), None), lambda axes, _, dy: (psum(dy, axes),)
)


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
