"""Logical axis names on activations: everything that a model needs to know about sharding.

A model calls `x = constrain(x, "batch", "seq", "act_embed")`. Outside a mesh this does nothing.
Within `axis_rules(rules)` each name is replaced by the mesh axes that the table in
sharding/rules.py gives for it. Axes that are manual in an enclosing `shard_map` are left out:

    rules       batch -> (data, fsdp), mlp -> (model,); the mesh is manual over data and fsdp
    call        constrain(x, "batch", "mlp")
    effect      with_sharding_constraint(x, PartitionSpec(None, "model"))

Between its branches (attention and MLP), a block may split the tokens over further axes, which is
Megatron's sequence parallelism if the axis is `model`: norms, dropout and residuals are then not
repeated on all devices of the axis, and the sum that ends a branch becomes a reduce-scatter:

    tokens / model --norm--> gather_tokens --branch, over heads or mlp--> scatter_tokens

If the pipeline stages share the vocabulary, each stage has only a part of it. A function over the
vocabulary accounts for that with `offset`, `sum_over` and `max_over`, which do nothing if the whole
vocabulary is present.

A model's functions see only the examples of one device. A function that compares examples of the
whole batch uses `gather_batch`, `first_example` and `sum_over_batch`.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sharding.collectives import psum
from sharding.context_values import bound
from sharding.mesh import BATCH_AXES, check_automatic
from sharding.spec import axes_of, restrict, spec_of

Rules = Mapping[str, tuple[str, ...]]

#: Logical axes that the first product of a branch adds to activations.
_BRANCH_NAMES = ("heads", "kv_heads", "mlp", "vocab")

_active_rules: contextvars.ContextVar[Rules | None] = contextvars.ContextVar("rules", default=None)
_alone: contextvars.ContextVar[str] = contextvars.ContextVar("alone", default="")


@contextlib.contextmanager
def axis_rules(rules: Rules) -> Iterator[Rules]:
    """Set the rules (logical axis -> mesh axes) that `constrain` follows within the block."""
    with bound(_active_rules, rules):
        yield rules


def active_rules() -> Rules:
    """Return the rules of the enclosing `axis_rules`; no rules outside of it."""
    return _active_rules.get() or {}


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain `x` to the sharding that the active rules give.

    Args:
        x: array of rank `len(axes)`.
        *axes: logical axis name per dimension, or None for a dimension that is not split.

    Raises:
        ValueError: the rank of `x` is not `len(axes)`, `to_spec` rejects the axes, or the mesh has
            explicit axes.
    """
    rules = _active_rules.get()
    mesh = jax.sharding.get_abstract_mesh()
    check_automatic(mesh)
    if rules is None or mesh.empty:
        return x
    if x.ndim != len(axes):
        raise ValueError(f"constrain{axes} names {len(axes)} axes, but x has shape {x.shape}")
    free = _automatic(mesh)
    spec = restrict(to_spec(axes, rules), free)
    if not axes_of(spec):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def constrain_branch(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain the output of a branch's first product, whose heads or mlp are split further.

    If activations are split over the axes of `act_embed`, which the product sums over, each device
    would otherwise have the same sums. They are split over the axes of `act_branch` instead, along
    the dim that kernels split. Before the branch's last product, `gather_branch` undoes this.

    Args:
        x: as for `constrain`.
        *axes: as for `constrain`; one of them is split over axes that XLA partitions.
    """
    added = automatic_axes("act_branch")
    if not added:
        return constrain(x, *axes)
    rules = active_rules()
    mesh = jax.sharding.get_abstract_mesh()
    for name, size in zip(axes, x.shape, strict=True):
        if name is None or name not in _BRANCH_NAMES:
            continue
        split = automatic_axes(name)
        if split and not size % math.prod(mesh.shape[axis] for axis in (*split, *added)):
            with axis_rules({**rules, name: (*rules[name], *added)}):
                return constrain(x, *axes)
    return constrain(x, *axes)


def gather_branch(x: jax.Array, *axes: str | None) -> jax.Array:
    """Gather the input of a branch's last product over the axes of `act_branch`, if there are any.

    Args:
        x: as for `constrain`.
        *axes: as for `constrain`.
    """
    return constrain(x, *axes) if automatic_axes("act_branch") else x


def constrain_residual(x_BTD: jax.Array) -> jax.Array:
    """Constrain activations between the branches of a block, or between blocks.

    With axes in the row `act_tokens` of the rules, they are split over these axes by tokens;
    otherwise like all other activations.
    """
    axes = _token_axes(x_BTD)
    return _over(x_BTD, axes) if axes else constrain(x_BTD, "batch", "seq", "act_embed")


def scatter_tokens(x_BTD: jax.Array) -> jax.Array:
    """Split the output of a branch over the axes of `act_tokens`; no change without such axes."""
    axes = _token_axes(x_BTD)
    return _over(x_BTD, axes) if axes else x_BTD


def gather_tokens(x_BTD: jax.Array) -> jax.Array:
    """Gather the input of a branch over the axes of `act_tokens`; no change without such axes."""
    return _over(x_BTD, ()) if _token_axes(x_BTD) else x_BTD


def on_whole_tokens(function: Callable[..., Any], *activations: Any) -> Any:
    """Return function(*activations), with tokens that are not split over the axes of `act_tokens`.

    For the functions outside all blocks, which may slice or join tokens. For split tokens XLA would
    exchange parts of them with a permutation. On CPUs a permutation waits for all devices, but only
    the devices of one stage run the function.

    Args:
        function: returns a tree of arrays.
        *activations: trees of arrays. The tokens of arrays [B, T, D] in them and in the result are
            gathered.
    """
    rules = _active_rules.get()
    if rules is None or not automatic_axes("act_tokens"):
        return function(*activations)

    def gathered(tree: Any) -> Any:
        return jax.tree.map(lambda x: gather_tokens(x) if x.ndim == 3 else x, tree)

    inputs = gathered(activations)
    with axis_rules({**rules, "act_tokens": ()}):
        result = function(*inputs)
    return gathered(result)


def _token_axes(x_BTD: jax.Array) -> tuple[str, ...]:
    """Return the axes that split the tokens of `x_BTD`: () if they do not divide their number.

    A sequence that `seq` splits stays as it is: its parts are not contiguous among all tokens.
    """
    axes = automatic_axes("act_tokens")
    if not axes or automatic_axes("seq"):
        return ()
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in (*automatic_axes("batch"), *axes))
    return () if math.prod(x_BTD.shape[:-1]) % count else axes


def _over(x_BTD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Split the tokens, [B·T], over the axes of the batch and over these axes.

    Products compute with all tokens in one dimension. XLA makes a reduce-scatter out of a sum and a
    split of the same dimension only.
    """
    mesh = jax.sharding.get_abstract_mesh()
    spec = spec_of([(*automatic_axes("batch"), *axes), automatic_axes("act_embed")])
    tokens = x_BTD.reshape(-1, x_BTD.shape[-1])
    tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, spec))
    return tokens.reshape(x_BTD.shape)


def automatic_axes(name: str) -> tuple[str, ...]:
    """Return the automatic mesh axes of a logical axis: XLA splits arrays over them itself."""
    rules = _active_rules.get()
    mesh = jax.sharding.get_abstract_mesh()
    if rules is None or mesh.empty:
        return ()
    free = _automatic(mesh)
    return tuple(axis for axis in rules.get(name, ()) if axis in free)


def _automatic(mesh: jax.sharding.AbstractMesh) -> set[str]:
    """Return the axes with more than one device that are not manual in an enclosing `shard_map`."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, kind in kinds if kind == AxisType.Auto and mesh.shape[axis] > 1}


def runs_alone(function: str) -> contextlib.AbstractContextManager:
    """Make it an error to communicate with other stages, which do not run this function."""
    return bound(_alone, function)


def manual_axes(name: str) -> tuple[str, ...]:
    """Return the manual mesh axes over which the caller holds only a part of a logical axis.

    This is at most `pipeline`. Over the other manual axes the executor gathers parameters before
    use, and devices hold different examples.

    Raises:
        ValueError: only one stage runs the caller; see `runs_alone`.
    """
    rules = _active_rules.get()
    axes = ()
    if rules is not None and "pipeline" in rules.get(name, ()):
        axes = manual_mesh_axes(("pipeline",))
    if axes and _alone.get():
        raise ValueError(
            f"{_alone.get()} uses the {name}, which pipeline.share_vocab=True splits over the "
            "stages, but only one stage runs this function; use it in embed or head, or set "
            "pipeline.share_vocab=False"
        )
    return axes


def manual_mesh_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given mesh axes that are manual and have more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if _active_rules.get() is None or mesh.empty:
        return ()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(a for a in axes if kinds[a] == AxisType.Manual and mesh.shape[a] > 1)


def offset(name: str, size: int) -> jax.Array | int:
    """Return the index of this device's first entry of a logical axis, given its `size` entries."""
    axes = manual_axes(name)
    return jax.lax.axis_index(axes) * size if axes else 0


def sum_over(name: str, x: jax.Array) -> jax.Array:
    """Sum `x` over the parts of a logical axis; every part gets the gradient of the sum."""
    axes = manual_axes(name)
    return _sum(axes, x) if axes else x


def max_over(name: str, x: jax.Array) -> jax.Array:
    """Return the maximum of `x` over the parts of a logical axis; no gradient flows through it."""
    axes = manual_axes(name)
    x = jax.lax.stop_gradient(x)
    return jax.lax.pmax(x, axes) if axes else x


def gather_batch(x: jax.Array, *, keeps_gradient: bool = False) -> jax.Array:
    """Gather `x`, [B, ...] for this device's examples, over the whole batch.

    Args:
        x: array of one device's examples.
        keeps_gradient: whether a device gets the gradient of its examples from the losses of all
            devices, summed; otherwise no gradient flows.
    """
    axes = manual_mesh_axes(BATCH_AXES)
    x = x if keeps_gradient else jax.lax.stop_gradient(x)
    return jax.lax.all_gather(x, axes, tiled=True) if axes else x


def first_example(size: int) -> jax.Array | int:
    """Return the index of this device's first example in the output of `gather_batch`."""
    axes = manual_mesh_axes(BATCH_AXES)
    return jax.lax.axis_index(axes) * size if axes else 0


def sum_over_batch(x: jax.Array) -> jax.Array:
    """Sum `x` over all devices' examples; every device gets the gradient of the whole batch."""
    axes = manual_mesh_axes(BATCH_AXES)
    return sum_of_parts(axes, x) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return psum(x, axes)


# Each stage computes the same loss from the sum, so the cotangent is already complete.
_sum.defvjp(lambda axes, x: (_sum(axes, x), None), lambda axes, _, dy: (dy,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_of_parts(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Sum `x` over mesh axes whose devices each have a part of the loss; so is its gradient."""
    return psum(x, axes)


# Each device has the loss of its own examples or tokens only, and all of these losses depend on the
# sum, so their cotangents are summed.
sum_of_parts.defvjp(
    lambda axes, x: (sum_of_parts(axes, x), None), lambda axes, _, dy: (psum(dy, axes),)
)


def to_spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Return the PartitionSpec of a tensor whose dimensions have these logical names.

    Raises:
        ValueError: a name has no rule, or two dimensions are split over the same mesh axis.
    """
    used: dict[str, str] = {}
    parts = []
    for name in axes:
        if name is not None and name not in rules:
            raise ValueError(
                f"logical axis {name!r} has no rule; known: {', '.join(sorted(rules))}; "
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
        parts.append(mesh_axes)
    return spec_of(parts)
