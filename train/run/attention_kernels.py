"""Finds the attention kernels that a run's blocks use on its mesh, by tracing the blocks."""

from typing import Any

import jax
import jax.numpy as jnp

from models.functions import ModelFunctions, one_layer
from models.layers import attention
from models.layers.attention import SelectedKernel
from sharding.hardware import Hardware
from sharding.logical import Rules, axis_rules
from sharding.mesh import AnyMesh, use_mesh
from train.step.tracing import traced_for

Tree = Any

#: Largest array of attention scores on a device, unless the config asks for plain attention.
MAX_SCORES_BYTES = 2**30


def attention_kernels(
    functions: ModelFunctions,
    params: Tree,
    microbatch: Tree,
    mesh: AnyMesh,
    rules: Rules,
    hardware: Hardware,
    *,
    setting: str,
) -> tuple[SelectedKernel, ...]:
    """Return the kernels of all attention in the model's stacks; () if there is none.

    Args:
        functions: model's functions.
        params: shapes of the whole parameters, in the compute dtype.
        microbatch: shapes of one replica's microbatch.
        rules: sharding rules.
        hardware: devices of the mesh.
        setting: `model.attention`.

    Raises:
        ValueError: plain attention would need more than MAX_SCORES_BYTES for its scores, and
            `model.attention` does not ask for it.
    """
    parts = functions.split(params)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    # The microbatch belongs to one replica already, so its batch axis must not be split again.
    per_example_rules = {**rules, "batch": ()}
    with (
        attention.recorded_kernels() as kernels,
        traced_for(hardware, setting),
        use_mesh(mesh),
        axis_rules(per_example_rules),
    ):
        for stack, (_, x) in functions.activation_types(parts["non_stack"], microbatch).items():
            layer = one_layer(parts["stacks"][stack])
            jax.eval_shape(functions.blocks[stack], layer, x, microbatch, number)
    for selected in kernels:
        is_large = selected.kernel == "plain" and selected.scores_bytes > MAX_SCORES_BYTES
        if not is_large or setting == "plain":
            continue
        raise ValueError(
            f"attention would be {selected}, which needs {selected.scores_bytes / 2**30:.1f} GiB "
            "for its scores on each device; set precision.compute=bfloat16 if that is the reason, "
            "use more microbatches or a shorter sequence, or accept it with model.attention=plain"
        )
    return tuple(kernels)
