"""Traces a run's model for the facts that its steps are built from.

Each fact is found when it is first asked for, and kept. Nothing is computed: the arguments are the
shapes of one replica's microbatch and of the whole parameters, in the compute dtype.
"""

import dataclasses
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from models.check import check
from models.functions import ModelFunctions, named_activations
from models.layers.attention import SelectedKernel
from sharding.hardware import Hardware
from sharding.logical import Rules
from sharding.mesh import AnyMesh
from train.config.schema import RunConfig
from train.config.shapes import microbatch_shapes, param_shapes
from train.optim.layer_decay import Depths, depths_of
from train.run.attention_kernels import attention_kernels
from train.run.stage_balance import LayerCosts, count_work
from train.step.tracing import traced_for


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
        recomputes = self.config.pipeline.recomputes_chunks
        with self._tracing():
            return count_work(self.functions, self.params, self.microbatch, recomputes=recomputes)

    @cached_property
    def head_input_bytes(self) -> int:
        """The bytes of the head's input for a microbatch of one replica."""
        with self._tracing():
            parts = self.functions.split(self.params)
            types = self.functions.activation_types(parts["non_stack"], self.microbatch)
        (_, x) = [*types.values()][-1]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))

    @cached_property
    def depths(self) -> Depths:
        """The depth of every parameter between embedding and head."""
        with self._tracing():
            return depths_of(self.functions, self.params, self.microbatch)

    def attention_kernels(self, rules: Rules) -> tuple[SelectedKernel, ...]:
        """Return the attention kernels of the model's blocks; see attention_kernels.py.

        Args:
            rules: sharding rules.

        Raises:
            ValueError: plain attention would need too much memory for its scores.
        """
        return attention_kernels(
            self.functions,
            self.params,
            self.microbatch,
            self.mesh,
            rules,
            self.hardware,
            setting=self.config.model.attention,
        )

    def _tracing(self) -> AbstractContextManager[None]:
        return traced_for(self.hardware, self.config.model.attention)
