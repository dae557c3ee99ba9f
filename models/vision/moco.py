"""MoCo v3: learns to recognize the other view of an image among all images of the batch.

    view 0  --encoder--projector--predictor-->  query 0  --+
                                                           +-- cross-entropy over all keys 1
    view 1  --teacher's encoder--projector-->   key 1    --+

and the same with the views exchanged. The teacher (the paper's momentum encoder) is the average of
the parameters that `train.ema_decay` keeps.

The batch is as in models/vision/common.py, without labels but with two views per image:

- `images`: `[B, V, H, W, C]`.
- `keys`: float32[B, V, P], only in `head`: the output of `teach` for these views.

B batch, V = 2 views, T patches and a class token, D embed, F hidden, P projection.

Source: Chen et al. 2021 (arXiv:2104.02057), algorithm 1 and section 4.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.basic import BatchNorm, Linear, unit_length
from models.layers.dropout import dropout
from models.vision.vit import ImageEncoder, PreTrainingConfig, ViTBlock
from sharding.logical import constrain_residual, first_example, gather_batch

NUM_VIEWS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoCoConfig(PreTrainingConfig):
    """Sizes and regularization of a MoCo v3."""

    hidden_dim: int  # hidden dim of projector and predictor
    projection_dim: int  # dim of queries and keys
    temperature: float = 0.2
    positions: str = "sincos"
    layer_norm_epsilon: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(
                f"model.temperature={self.temperature} must be above 0; choose for example 0.2"
            )


class ViewsBlock(ViTBlock):
    """ViT's block applied to several views of each image, `[B, V, T, D]`."""

    def __call__(self, x_BVTD: jax.Array, batch: dict, keys: jax.Array | None) -> jax.Array:
        """Apply the block to each view by itself; arguments as in models/stack.py."""
        views = jnp.arange(x_BVTD.shape[1])
        if keys is not None:
            of_views = jax.vmap(jax.random.fold_in, (None, 0))
            keys = jax.vmap(of_views, (0, None))(keys, views).reshape(-1)
        flat = x_BVTD.reshape(-1, *x_BVTD.shape[2:])
        flat = constrain_residual(super().__call__(flat, batch, keys))
        return flat.reshape(x_BVTD.shape)


class NormalisedLinear(nnx.Module):
    """A linear layer without bias, whose outputs are normalized over the batch.

    Args:
        inputs: logical name -> size, as for `Linear`.
        outputs: logical name -> size, as for `Linear`.
        learns: whether the normalization has a scale and a bias.
        rngs: random keys for the initialization.
    """

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        learns: bool = True,
        rngs: nnx.Rngs,
    ):
        (size,) = inputs.values()
        ((name, features),) = outputs.items()
        # The deviation of a uniform fan-in initialization, as in the paper's code.
        stddev = (3 * size) ** -0.5
        self.linear = Linear(inputs, outputs, stddev=stddev, use_bias=False, rngs=rngs)
        axis = "mlp" if name == "mlp" else None
        self.norm = BatchNorm(features, axis, learns=learns, rngs=rngs)

    def __call__(self, x: jax.Array, weights_B: jax.Array) -> jax.Array:
        """Return `[B, ..., outputs]`; `weights_B` as for `BatchNorm`."""
        return self.norm(self.linear(x), weights_B)


class Projector(nnx.Module):
    """Two or three normalized linear layers, with ReLU in between.

    Args:
        inputs: size of the input.
        hidden: F, size of all layers except the last.
        outputs: P, size of the last layer, whose normalization has no parameters.
        is_deep: whether there are three layers.
        rngs: random keys for the initialization.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, *, is_deep: bool, rngs: nnx.Rngs):
        split = {"mlp": hidden}
        whole = {"embed": hidden}
        last = {"_projection": outputs}
        self.first = NormalisedLinear({"embed": inputs}, split, rngs=rngs)
        self.middle = NormalisedLinear(split, whole, rngs=rngs) if is_deep else None
        self.last = NormalisedLinear(whole if is_deep else split, last, learns=False, rngs=rngs)

    def __call__(self, x: jax.Array, weights_B: jax.Array) -> jax.Array:
        """Return `[B, ..., P]` for x `[B, ..., inputs]`; `weights_B` as for `BatchNorm`."""
        x = jax.nn.relu(self.first(x, weights_B))
        if self.middle is not None:
            x = jax.nn.relu(self.middle(x, weights_B))
        return self.last(x, weights_B)


class MoCo(ImageEncoder):
    """An image encoder that learns from pairs of views."""

    Config = MoCoConfig
    objectives = ("image_contrast",)
    sees_whole_batch = True

    def __init__(self, config: MoCoConfig, *, rngs: nnx.Rngs):
        super().__init__(config, block=ViewsBlock, rngs=rngs)
        self.config = config
        hidden = config.hidden_dim
        outputs = config.projection_dim
        self.projector = Projector(config.embed_dim, hidden, outputs, is_deep=True, rngs=rngs)
        self.predictor = Projector(outputs, hidden, outputs, is_deep=False, rngs=rngs)

    def embed(self, batch: dict) -> jax.Array:
        """Return activations `[B, V, 1 + T, D]`, the class token first."""
        images = batch["images"]
        flat = images.reshape(-1, *images.shape[2:])
        x = jnp.concatenate(self.tokens(flat), axis=1)
        x = constrain_residual(x)
        x_BVTD = x.reshape(*images.shape[:2], *x.shape[1:])
        return dropout(x_BVTD, self.config.dropout, batch.get("dropout_keys"))

    def teach(self, x_BVTD: jax.Array, batch: dict) -> dict[str, jax.Array]:
        """Return `keys`, float32[B, V, P] of unit length."""
        return {"keys": unit_length(self._projections(x_BVTD, batch))}

    def head(self, x_BVTD: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array, dict]:
        """Return (sum of weighted losses, sum of weights, sums of metrics).

        Each view of an image has to find the key of the image's other view among all keys of the
        batch. The loss is the cross-entropy, summed over both views, times 2 × temperature. The
        metric `contrast_accuracy` is the share of views for which the right key is the nearest.
        """
        projections = self._projections(x_BVTD, batch)
        queries_BVP = unit_length(self.predictor(projections, batch["weights"]))
        keys_SVP = gather_batch(batch["keys"])
        weights_S = gather_batch(batch["weights"])
        size = len(queries_BVP)
        temperature = self.config.temperature
        own_B = first_example(size) + jnp.arange(size)
        losses_B = jnp.zeros(size)
        hits_B = jnp.zeros(size)
        for view in range(NUM_VIEWS):
            cosines = queries_BVP[:, view] @ keys_SVP[:, 1 - view].T
            # Rows that only pad the batch have no keys.
            logits_BS = jnp.where(weights_S > 0, cosines / temperature, -jnp.inf)
            log_shares = jax.nn.log_softmax(logits_BS)
            own_log_shares_B = jnp.take_along_axis(log_shares, own_B[:, None], axis=1)[:, 0]
            losses_B -= 2 * temperature * jnp.where(batch["weights"] > 0, own_log_shares_B, 0)
            hits_B += (jnp.argmax(logits_BS, axis=1) == own_B) / NUM_VIEWS
        weights_B = batch["weights"].astype(losses_B.dtype)
        metrics = {"contrast_accuracy": jnp.sum(hits_B * weights_B)}
        return jnp.sum(losses_B * weights_B), jnp.sum(weights_B), metrics

    def _projections(self, x_BVTD: jax.Array, batch: dict) -> jax.Array:
        """Return the projections of class tokens, `[B, V, P]`."""
        return self.projector(self.final_norm(x_BVTD[:, :, 0]), batch["weights"])
