"""Initializes the training state in place on the mesh, shard by shard and layer by layer.

No device ever holds more than its shards of the state, plus one layer of a stack in host memory:

- Everything in device memory comes from one jitted function, whose output shardings make XLA
  initialize each shard on its own device.
- Stacks in host memory are initialized one layer at a time and copied to the host.
- Moments in host memory are zeros, and the average is a copy; both are created there directly.

The parameters are bitwise equal on every mesh.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from models.stack import only_layers
from pipeline.stack_layout import StackLayout
from sharding.memory import HOST, in_device_memory, is_on_host, to_device
from train.optim.ema import with_average
from train.optim.freeze import trained_params
from train.precision import LossScale, PrecisionConfig
from train.state.train_state import (
    Spikes,
    TrainState,
    copy_of,
    is_for_host,
    merge,
    shardings_of,
    zeros_of,
)

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpec:
    """Defines the contents of a training state, apart from its layout."""

    model: nnx.Module  # model, abstract
    build: Callable[[], nnx.Module]  # initializes the model from a fixed seed
    optimizer: optax.GradientTransformation
    # dtype of the master weights, and whether the state has a `loss_scale`
    precision: PrecisionConfig
    tracks_spikes: bool = False  # whether the state has `spikes`; see train/step/train_step.py
    # returns the first `amax_history`; None: the state has none. See amax_history.py
    empty_history: Callable[[], Tree] | None = None
    # bool per parameter, whether it is hidden from the optimizer; None: no parameter
    frozen: Tree = None

    def trained(self, params: Tree) -> Tree:
        """Replace frozen parameters, or the corresponding leaves of a similar tree, by None."""
        return trained_params(params, self.frozen)

    def params(self) -> Tree:
        """Initialize the model's parameters; stacks are `[layers, ...]`."""
        params: Any = nnx.to_pure_dict(nnx.split(self.build())[1])
        # Random numbers are drawn in float32, whatever the dtype of the master weights.
        return jax.tree.map(lambda x, dtype: x.astype(dtype), params, self._dtypes(params))

    def _dtypes(self, params: Tree) -> Tree:
        """Return the dtype of every parameter."""
        dtype = self.precision.params
        if self.frozen is None:
            return jax.tree.map(lambda _: dtype, params)
        frozen_dtype = self.precision.frozen or dtype
        return jax.tree.map(lambda is_frozen: frozen_dtype if is_frozen else dtype, self.frozen)

    def state(self, params: Tree) -> TrainState:
        """Return the initial state for these parameters, which have the dtype of `params()`."""
        wide = jax.tree.map(lambda x: x.astype(self.precision.update), params)
        count = jnp.zeros((), jnp.int32)
        spikes = Spikes(
            norm_mean=jnp.zeros((), self.precision.update), num_norms=count, num_in_a_row=count
        )
        return TrainState(
            step=count,
            num_skipped=count,
            num_nonfinite_in_a_row=count,
            params=params,
            opt_state=self.optimizer.init(self.trained(wide)),
            spikes=spikes if self.tracks_spikes else None,
            loss_scale=LossScale.initial() if self.precision.scales_loss else None,
            amax_history=None if self.empty_history is None else self.empty_history(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateInit:
    """Creates initial states in place."""

    spec: StateSpec
    layouts: Mapping[str, StackLayout]  # stack -> its layout
    layout_of: TrainState  # layout of every leaf of the state
    abstract: TrainState  # shapes and shardings of the state for the step; see state_layout.py
    portable: TrainState  # shapes and shardings of the state in a checkpoint

    def from_scratch(self) -> TrainState:
        """Return the initial state with newly initialized parameters."""
        state = self.initialize_at_once()
        streamed = {name: self._initialize_on_host(name) for name in self.layouts}
        stacks = {name: merge(state.params[name], part) for name, part in streamed.items()}
        return self._with_moments(dataclasses.replace(state, params={**state.params, **stacks}))

    def from_params(self, params: Tree) -> TrainState:
        """Return the initial state for given parameters.

        Args:
            params: parameters in the portable layout; they are deleted.
        """
        state = self._initialize_from(params)
        jax.tree.map(lambda x: x.is_deleted() or x.delete(), params)
        return self._with_moments(state)

    @functools.cached_property
    def initialize_at_once(self) -> Callable[[], TrainState]:
        """The jitted initial state, with None for stacks and moments in host memory."""
        params = {
            name: jax.tree.map(is_for_host if name in self.layouts else _false, part)
            for name, part in self.abstract.params.items()
        }
        return self._jitted(lambda: self.spec.state(self.spec.params()), params)

    @functools.cached_property
    def _initialize_from(self) -> Callable[[Tree], TrainState]:
        def make(params):
            layers = self.spec.state(jax.tree.map(to_device, params))
            # Parameters that are already in host memory in the right form are not copied back.
            unchanged = jax.tree.map(
                lambda x, layout: x if is_on_host(x) and layout.is_plain else None,
                params,
                self.layout_of.params,
            )
            return dataclasses.replace(layers, params=merge(unchanged, layers.params))

        return self._jitted(make, jax.tree.map(_false, self.abstract.params))

    def _jitted(self, make_layers: Callable[..., TrainState], elsewhere: Tree) -> Callable:
        """Jit a function that creates the state, with None for leaves that are created elsewhere.

        Args:
            make_layers: creates the state in its portable form; its argument is donated.
            elsewhere: bool per parameter: whether it is created elsewhere. In the optimizer
                state, all arrays in host memory are.
        """
        moments = jax.tree.map(is_for_host, self.abstract.opt_state)

        def without_elsewhere(state: TrainState) -> TrainState:
            def leave_out(x, is_out):
                return None if is_out else x

            return dataclasses.replace(
                state,
                params=jax.tree.map(leave_out, state.params, elsewhere),
                opt_state=jax.tree.map(leave_out, state.opt_state, moments),
            )

        def make(*args):
            layers = make_layers(*args)
            if not is_plain:
                # Permute layers into slots while every device has all layers, but only a slice of
                # each (see StateLayout._portable_spec).
                on_device = jax.tree.map(in_device_memory, shardings_of(self.portable))
                layers = jax.lax.with_sharding_constraint(layers, on_device)
            slots = jax.tree.map(lambda x, layout: layout.to_slots(x), layers, self.layout_of)
            return without_elsewhere(slots)

        # An argument can only be donated if the result has the same form.
        is_plain = all(layout.is_plain for layout in self.layouts.values())
        out_shardings = without_elsewhere(shardings_of(self.abstract))
        return jax.jit(make, out_shardings=out_shardings, donate_argnums=(0,) * is_plain)

    def _with_moments(self, state: TrainState) -> TrainState:
        """Add the optimizer state in host memory: moments are zeros, the average is a copy."""

        def copied(param: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array | None:
            return copy_of(param, target) if is_for_host(target) else None

        def zeros(target: jax.ShapeDtypeStruct) -> jax.Array | None:
            return zeros_of(target) if is_for_host(target) else None

        targets = self.abstract.opt_state
        params = self.spec.trained(state.params)
        without = with_average(targets, lambda average: jax.tree.map(lambda _: None, average))
        moments = merge(state.opt_state, jax.tree.map(zeros, without))
        average = with_average(targets, lambda average: jax.tree.map(copied, params, average))
        return dataclasses.replace(state, opt_state=merge(moments, average))

    def _initialize_on_host(self, stack: str) -> Tree:
        """Create a stack's parameters in host memory, with None for parameters on the device.

        Every stage initializes one layer at a time and copies it to its slot. The computation runs
        outside of `shard_map`, because XLA rounds differently within it; only the copy is inside.
        """
        targets = self.abstract.params[stack]
        on_host = jax.tree.map(lambda t: t if is_for_host(t) else None, targets)
        filled = jax.tree.map(zeros_of, on_host)
        if not jax.tree.leaves(filled):
            return filled

        def layers(numbers: jax.Array) -> Tree:
            with only_layers(jnp.maximum(numbers, 0)):
                params = self.spec.params()[stack]
            for leaf in jax.tree.leaves(params):
                if len(leaf) != len(numbers):
                    raise ValueError(
                        f"the model made {len(leaf)} layers of {stack!r} instead of "
                        f"{len(numbers)}, because its constructor changes all layers at once; let "
                        "each block make its own parameters, or set memory.placement=device"
                    )

            def of_slot(x: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array | None:
                used = numbers.reshape(-1, *[1] * (x.ndim - 1)) >= 0
                return jnp.where(used, x, jnp.zeros((), x.dtype)) if is_for_host(target) else None

            return jax.tree.map(of_slot, params, targets)

        def put(filled: Tree, layers: Tree, slot: jax.Array) -> Tree:
            def written(x: jax.Array, layer: jax.Array) -> jax.Array:
                layer = jax.device_put(layer, HOST)
                return jax.lax.dynamic_update_slice_in_dim(x, layer, slot, 0)

            return jax.tree.map(written, filled, layers)

        shardings = shardings_of(on_host)
        make = jax.jit(layers, out_shardings=jax.tree.map(in_device_memory, shardings))
        by_stage = PartitionSpec("pipeline")
        mesh = jax.tree.leaves(shardings)[0].mesh
        write = jax.shard_map(
            put,
            mesh=mesh,
            in_specs=(by_stage, by_stage, PartitionSpec()),
            out_specs=by_stage,
            axis_names={"pipeline"},
            check_vma=False,
        )
        write = jax.jit(write, out_shardings=shardings, donate_argnums=0)
        numbers = self.layouts[stack].layer_of_slot.reshape(mesh.shape["pipeline"], -1)
        for slot in range(numbers.shape[1]):
            filled = write(filled, make(numbers[:, slot]), np.int32(slot))
        return filled


def _false(_: Any) -> bool:
    return False
