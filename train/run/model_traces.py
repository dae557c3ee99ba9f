"""What a run must know about its model before it builds a step, found by tracing the model.

Each fact is found when it is first asked for, and kept. Nothing is computed: the arguments are the
shapes of one replica's microbatch and of the whole parameters, in the compute dtype.
"""

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from flax import nnx

from models.functions import ModelFunctions, check, named_activations
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


class ModelTraces:
    """Traces the functions of a model for the hardware and the attention setting of a run.

    Args:
        config: the run's config.
        mesh: the mesh.
        hardware: the devices of the mesh.
        model: the model; it may be abstract.
        functions: the model's functions.

    Attributes:
        params: shapes of the whole parameters, in the compute dtype.
        microbatch: shapes and dtypes of one replica's microbatch.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: AnyMesh,
        hardware: Hardware,
        model: nnx.Module,
        functions: ModelFunctions,
    ):
        self._config = config
        self._mesh = mesh
        self._hardware = hardware
        self._model = model
        self._functions = functions
        self.params: Any = param_shapes(config, model)
        self.microbatch = microbatch_shapes(config, mesh)

    def check(self) -> None:
        """Check that the model's functions fit together; see models.functions.check.

        Raises:
            ValueError: they do not.
            KeyError: they read an array that the batch does not have.
        """
        with self._tracing():
            check(self._functions, self.params, self.microbatch)

    @cached_property
    def activation_names(self) -> set[str]:
        """The names that the model's blocks give to activations."""
        with self._tracing():
            return named_activations(self._model, self.params, self.microbatch)

    @cached_property
    def work(self) -> LayerCosts:
        """The FLOPs of a microbatch of one replica."""
        recomputes = self._config.pipeline.recomputes_chunks
        with self._tracing():
            return count_work(self._functions, self.params, self.microbatch, recomputes=recomputes)

    @cached_property
    def depths(self) -> Depths:
        """The depth of every parameter between embedding and head."""
        with self._tracing():
            return depths_of(self._functions, self.params, self.microbatch)

    def attention_kernels(self, rules: Rules) -> tuple[SelectedKernel, ...]:
        """Return the attention kernels of the model's blocks; see attention_kernels.py.

        Args:
            rules: sharding rules.

        Raises:
            ValueError: plain attention would need too much memory for its scores.
        """
        return attention_kernels(
            self._functions,
            self.params,
            self.microbatch,
            self._mesh,
            rules,
            self._hardware,
            setting=self._config.model.attention,
        )

    def _tracing(self) -> AbstractContextManager[None]:
        return traced_for(self._hardware, self._config.model.attention)
