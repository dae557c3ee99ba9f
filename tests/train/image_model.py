"""A tiny image classifier that several tests train: patches, residual blocks, mean, classes."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.basic import LayerNorm, Linear
from models.stack import Stack
from sharding.logical import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchesConfig:
    image_size: int
    num_channels: int
    num_labels: int
    num_layers: int = 2
    embed_dim: int = 16
    patch_size: int = 4


class Block(nnx.Module):
    def __init__(self, config: PatchesConfig, *, rngs: nnx.Rngs):
        embed = {"embed": config.embed_dim}
        mlp = {"mlp": 2 * config.embed_dim}
        self.norm = LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.up = Linear(embed, mlp, stddev=0.1, rngs=rngs)
        self.down = Linear(mlp, embed, stddev=0.1, rngs=rngs)

    def __call__(self, x, batch, keys):
        h = jax.nn.gelu(self.up(self.norm(x)))
        return x + self.down(constrain(h, "batch", "seq", "mlp"))


class Patches(nnx.Module):
    """Classifies images by the mean of their patches' activations."""

    Config = PatchesConfig
    objectives = ("image_classification",)

    def __init__(self, config: PatchesConfig, *, rngs: nnx.Rngs):
        self.config = config
        values = config.patch_size**2 * config.num_channels
        embed = {"embed": config.embed_dim}
        self.patches = Linear({"_values": values}, embed, stddev=0.1, rngs=rngs)
        self.blocks = Stack(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs)
        self.classifier = Linear(embed, {"_labels": config.num_labels}, stddev=0.1, rngs=rngs)

    def embed(self, batch):
        size = self.config.patch_size
        side = self.config.image_size // self.config.patch_size
        dtype = self.patches.kernel[...].dtype
        images = batch["images"].astype(dtype) / 127.5 - 1
        cut = images.reshape(-1, side, size, side, size, self.config.num_channels)
        return self.patches(cut.swapaxes(2, 3).reshape(len(images), side * side, -1))

    def head(self, x, batch):
        logits = self.classifier(x.mean(axis=1)).astype(jnp.float32)
        log_shares = jax.nn.log_softmax(logits)

        def of(targets):
            return jnp.take_along_axis(log_shares, targets[:, None], axis=1)[:, 0]

        loss = -of(batch["targets"])
        weights = batch["weights"]
        if "other_targets" in batch:
            shares = batch["target_shares"]
            loss = shares * loss - (1 - shares) * of(batch["other_targets"])
        right = logits.argmax(axis=1) == batch["targets"]
        return (loss * weights).sum(), weights.sum(), {"accuracy": (right * weights).sum()}
