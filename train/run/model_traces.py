"""Traces a run's model for the facts that its steps are built from, and balances pipeline stages.

Each fact is found when it is first asked for, and kept. Nothing is computed: the arguments are the
shapes of one replica's microbatch and of the whole parameters, in the compute dtype.

All stages wait for the busiest one. With a large vocabulary, the head can take as long as several
layers, so the last stage should have fewer layers. `LayerCosts` counts the FLOPs of every layer,
and cuts the layers so that the busiest virtual stage (pipeline/schedules/table.py) has least work.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from models.check import check
from models.flops import traced_flops
from models.functions import ModelFunctions, functions_of, named_activations, one_layer
from models.layers import attention
from models.layers.attention import AttentionCall, SelectedKernel
from pipeline.runtime.trees import total_of
from pipeline.stack_layout import balanced_cut
from sharding.hardware import Hardware
from sharding.logical import Rules, axis_rules
from sharding.mesh import AnyMesh, use_mesh
from sharding.ops.sequence import AXIS, WHOLE, SequenceSplit
from train.config.schema import RunConfig
from train.config.shapes import microbatch_shapes, param_shapes
from train.optim.layer_decay import Depths, depths_of
from train.step.tracing import traced_for

Tree = Any

#: Largest array of attention scores on a device, unless the config asks for plain attention.
MAX_SCORES_BYTES = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """FLOPs of the matrix products of one microbatch, forward and backward."""

    layers: tuple[int, ...]  # per layer, over all stacks
    recomputed: tuple[int, ...]  # per layer, additional FLOPs of recomputation; 0: none
    embed: int
    head: int

    def per_virtual_stage(self, counts: Sequence[int], *, shares_vocab: bool) -> list[float]:
        """Return the FLOPs of every virtual stage, with its share of embedding and head.

        Args:
            counts: number of layers of each virtual stage.
            shares_vocab: embedding and head are split over all virtual stages.
        """
        bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
        cost = self._cost(len(counts), shares_vocab)
        return [cost(v, first, stop) for v, (first, stop) in enumerate(bounds)]

    def balanced(self, num_virtual_stages: int, *, shares_vocab: bool) -> list[int]:
        """Return the most even cut: the number of layers of each virtual stage."""
        cost = self._cost(num_virtual_stages, shares_vocab)
        return balanced_cut(len(self.layers), num_virtual_stages, cost)

    def _cost(
        self, num_virtual_stages: int, shares_vocab: bool
    ) -> Callable[[int, int, int], float]:
        layers = [*itertools.accumulate(self.layers, initial=0)]
        recomputed = [*itertools.accumulate(self.recomputed, initial=0)]

        def cost(v: int, first: int, stop: int) -> float:
            is_last = v == num_virtual_stages - 1
            work = float(layers[stop] - layers[first])
            if shares_vocab:
                work += (self.embed + self.head) / num_virtual_stages
            else:
                work += self.embed * (v == 0) + self.head * is_last
            # If only the last virtual stage computes the head, its forward pass runs only once, as
            # a part of its backward pass, so nothing is recomputed.
            recomputes = not is_last or shares_vocab
            return work + recomputes * (recomputed[stop] - recomputed[first])

        return cost


def count_work(
    functions: ModelFunctions,
    params: Tree,
    batch: dict[str, jax.ShapeDtypeStruct],
    *,
    recomputes: bool,
) -> LayerCosts:
    """Count the matrix products of a model's functions by tracing them.

    Args:
        params: model's parameters in the compute dtype; ShapeDtypeStructs suffice.
        batch: one microbatch; ShapeDtypeStructs suffice.
        recomputes: backward pass of a chunk runs its forward pass again.
    """
    parts = functions.split(params)
    types = functions.activation_types(parts["non_stack"], batch)
    layers: list[int] = []
    recomputed: list[int] = []
    for name, num_layers in functions.num_layers.items():
        layer = one_layer(parts["stacks"][name])
        (_, x) = types[name]
        block = functions.blocks[name]
        arguments = (layer, x, batch, jax.ShapeDtypeStruct((), jnp.int32))
        layers += [traced_flops(_with_backward(block, 2), *arguments, x)] * num_layers
        recomputed += [recomputes * traced_flops(block, *arguments)] * num_layers
    (embedded, _) = [*types.values()][0]
    (_, x) = [*types.values()][-1]

    def loss(non_stack_params: Tree, x: Tree, batch: Tree) -> jax.Array:
        return total_of(functions.head(non_stack_params, x, batch)[0])

    head = jax.grad(loss, argnums=(0, 1))
    head_batch = functions.with_teacher_output_types(parts["non_stack"], x, batch)
    return LayerCosts(
        layers=tuple(layers),
        recomputed=tuple(recomputed),
        embed=traced_flops(_with_backward(functions.embed, 1), parts["non_stack"], batch, embedded),
        head=traced_flops(head, parts["non_stack"], x, head_batch),
    )


def _with_backward(function: Callable, num_inputs: int) -> Callable:
    """Return `f(*args, dy)`: the gradients of the first `num_inputs` arguments."""

    def run(*args):
        inputs = args[:num_inputs]
        other_args = args[num_inputs:-1]
        dy = args[-1]
        return jax.vjp(lambda *inputs: function(*inputs, *other_args), *inputs)[1](dy)

    return run


@dataclasses.dataclass(frozen=True)
class ModelTraces:
    """Traces the functions of a model for the hardware and the attention setting of a run."""

    config: RunConfig
    mesh: AnyMesh
    hardware: Hardware  # the devices of the mesh
    model: nnx.Module  # may be abstract
    functions: ModelFunctions

    @cached_property
    def params(self) -> Any:
        """The shapes of the whole parameters, in the compute dtype."""
        return param_shapes(self.config, self.model)

    @cached_property
    def microbatch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of one replica's microbatch."""
        return microbatch_shapes(self.config, self.mesh)

    def check(self) -> None:
        """Check that the model's functions fit together; see models.check.check.

        Raises:
            ValueError: they do not.
            KeyError: they read an array that the batch does not have.
        """
        with self._tracing():
            check(self.functions, self.params, self.microbatch)

    @cached_property
    def activation_names(self) -> set[str]:
        """The names that the model's blocks give to activations."""
        with self._tracing():
            return named_activations(self.model, self.params, self.microbatch)

    @cached_property
    def work(self) -> LayerCosts:
        """The FLOPs of a microbatch of one replica."""
        recomputes = self.config.train.parsed_remat.recomputes_stages
        with self._tracing():
            return count_work(self.functions, self.params, self.microbatch, recomputes=recomputes)

    @cached_property
    def head_input_bytes(self) -> int:
        """The bytes of the head's input for a microbatch of one replica."""
        (_, x) = [*self._activation_types.values()][-1]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))

    @cached_property
    def depths(self) -> Depths:
        """The depth of every parameter between embedding and head."""
        with self._tracing():
            return depths_of(self.functions, self.params, self.microbatch)

    @cached_property
    def attention_calls(self) -> tuple[AttentionCall, ...]:
        """The different attentions in the model's stacks; () if there is none."""
        # Not the run's own functions: jax remembers what it has traced, and would not trace again.
        functions = functions_of(self.model, remat=None)
        with attention.recorded_calls() as calls, self._tracing():
            _run_blocks(functions, functions.split(self.params), self.microbatch)
        return tuple(calls)

    @cached_property
    def row_lengths(self) -> set[int]:
        """The numbers of tokens of the sequences that the model's stacks work on."""
        leaves = jax.tree.leaves([x for _, x in self._activation_types.values()])
        return {leaf.shape[1] for leaf in leaves if leaf.ndim == 3}

    def attention_kernels(
        self, rules: Rules, sequence: SequenceSplit
    ) -> tuple[SelectedKernel, ...]:
        """Return the kernels of all attention in the model's stacks; () if there is none.

        Args:
            rules: sharding rules.
            sequence: how sequences are divided over `context`.

        Raises:
            ValueError: plain attention would need more than MAX_SCORES_BYTES for its scores, and
                `model.attention` does not ask for it.
        """
        run = partial(_run_blocks, self.functions)
        if sequence.num_devices > 1:
            everywhere = PartitionSpec()
            run = jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=everywhere,
                out_specs=everywhere,
                axis_names={AXIS},
                check_vma=False,
            )
        microbatch = {
            name: sequence.on_one_device(name, leaf) for name, leaf in self.microbatch.items()
        }
        with (
            attention.recorded_kernels() as kernels,
            self._tracing(sequence),
            use_mesh(self.mesh),
            # The microbatch belongs to one replica already: do not split its batch axis again.
            # Parameters are whole, so that all experts are here.
            axis_rules({**rules, "batch": (), "experts": ()}),
        ):
            jax.eval_shape(run, self.functions.split(self.params), microbatch)
        for selected in kernels:
            is_large = selected.kernel == "plain" and selected.scores_bytes > MAX_SCORES_BYTES
            if is_large and self.config.model.attention != "plain":
                raise ValueError(
                    f"attention would be {selected}, which needs "
                    f"{selected.scores_bytes / 2**30:.1f} GiB for its scores on each device; set "
                    "precision.compute=bfloat16 if that is the reason, use more microbatches or a "
                    "shorter sequence, or accept it with model.attention=plain"
                )
        return tuple(kernels)

    @cached_property
    def _activation_types(self) -> Mapping[str, tuple[Tree, Tree]]:
        """Types before and in each stack, as from `ModelFunctions.activation_types`."""
        with self._tracing():
            non_stack_params = self.functions.split(self.params)["non_stack"]
            return self.functions.activation_types(non_stack_params, self.microbatch)

    def _tracing(self, sequence: SequenceSplit = WHOLE) -> AbstractContextManager[None]:
        return traced_for(self.hardware, self.config.model.attention, sequence)


def _run_blocks(functions: ModelFunctions, parts: Tree, microbatch: Tree) -> None:
    """Trace one block of each stack."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    types = functions.activation_types(parts["non_stack"], microbatch)
    for stack, (_, x) in types.items():
        layer = one_layer(parts["stacks"][stack])
        jax.eval_shape(functions.blocks[stack], layer, x, microbatch, number)
