"""Which attention kernel a run's blocks use on its mesh, found by tracing them."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers import attention
from models.layers.attention import Choice
from models.stack import Parts, one_layer
from sharding.hardware import Hardware
from sharding.logical import Rules, axis_rules
from sharding.mesh import AnyMesh, use_mesh
from train.config.schema import RunConfig
from train.config.shapes import microbatch
from train.step.tracing import traced_for

#: Scores of one attention that may exist at once on a device, unless the config asks for it.
MAX_SCORES_BYTES = 2**30


def attention_choices(
    config: RunConfig,
    mesh: AnyMesh,
    device: Hardware,
    rules: Rules,
    model: nnx.Module,
    parts: Parts,
) -> tuple[Choice, ...]:
    """Returns the kernels of all attention in the model's stacks; () if there is none.

    Raises:
        ValueError: plain attention would make more than MAX_SCORES_BYTES of scores at once, and
            `model.attention` does not ask for it.
    """
    params, batch = microbatch(config, mesh, model)
    cut = parts.split(params)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    # The microbatch is one device's already: only what is within an example is split here.
    of_example = {**rules, "batch": ()}
    with (
        attention.recorded_choices() as found,
        traced_for(device, config.attention),
        use_mesh(mesh),
        axis_rules(of_example),
    ):
        for stack, (_, x) in parts.types(cut["ends"], batch).items():
            jax.eval_shape(parts.blocks[stack], one_layer(cut["layers"][stack]), x, batch, number)
    for choice in found:
        is_asked_for = config.attention == "plain"
        if choice.kernel != "plain" or is_asked_for or choice.scores_bytes <= MAX_SCORES_BYTES:
            continue
        raise ValueError(
            f"attention would be {choice}, which makes {choice.scores_bytes / 2**30:.1f} GiB of "
            "scores at once on each device; set precision.compute=bfloat16 where that is why, take "
            "more microbatches or a shorter sequence, or ask for it with model.attention=plain"
        )
    return tuple(found)
