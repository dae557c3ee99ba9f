"""Scaling rules with which learning rates transfer between sizes of a model: μP and CompleteP.

Tune the learning rate and the initialization of a small base model, then train wider and deeper
models with the same values. With m_N = embed_dim / base_embed_dim and m_L = num_layers /
base_num_layers, the rules multiply these values of a config:

                                                mup             completep
    init_stddev of kernels in blocks            m_N^-1/2        m_N^-1/2
    output of attention and of the MLP          1               m_L^-1
    logits                                      m_N^-1          m_N^-1
    learning rate of kernels in blocks          m_N^-1          m_N^-1
    epsilon of parameters in blocks             m_N^-1          m_N^-1 m_L^-1
    epsilon of other parameters                 m_N^-1          m_N^-1

Nothing else changes: embeddings, biases and norms keep their learning rate. Weight decay is
multiplied by the unscaled learning rate, so that it does not become weaker in wide models. Scores
of attention are q · k √base_head_dim / head_dim. A model of the base sizes is the unscaled model.

The rule is a part of the model's config, because it determines the model's outputs.

Source: Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466), table 8; Dey et al. 2025, "Don't
be lazy: CompleteP enables compute-efficient deep transformers" (arXiv:2505.01618), table 1, α = 1.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax

from models.field_checks import check_choices

Tree = Any

#: Values of `model.scaling`.
SCALINGS = ("none", "mup", "completep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """Fields of the config of a model whose learning rate can transfer to other sizes."""

    scaling: str = "none"  # none | mup, over widths | completep, over widths and depths
    base_embed_dim: int | None = None  # embed_dim of the model that was tuned
    base_num_layers: int | None = None  # its num_layers; for completep
    base_head_dim: int | None = None  # its head_dim; None: the same

    def check_scaling(self) -> None:
        """Check these fields.

        Raises:
            ValueError: the rule is unknown, needs another field or does not read one.
        """
        check_choices(self, scaling=SCALINGS)
        read = {
            "base_embed_dim": self.scaling != "none",
            "base_num_layers": self.scaling == "completep",
            "base_head_dim": self.scaling != "none",
        }
        for name, is_read in read.items():
            value = getattr(self, name)
            if value is not None and not is_read:
                raise ValueError(
                    f"model.{name}={value} is not read with model.scaling={self.scaling!r}; set "
                    f"model.scaling='completep', or leave model.{name} out"
                )
            if value is None and is_read and name != "base_head_dim":
                raise ValueError(
                    f"model.scaling={self.scaling!r} needs model.{name}, the size of the model "
                    "that the learning rate was tuned for; set it"
                )
            if value is not None and value < 1:
                raise ValueError(f"model.{name}={value} must be at least 1")

    @property
    def width_ratio(self) -> float:
        """Width / base width, m_N; 1 without a rule."""
        config: Any = self
        return config.embed_dim / (self.base_embed_dim or config.embed_dim)

    @property
    def depth_ratio(self) -> float:
        """Depth / base depth, m_L; 1 without a rule for depths."""
        config: Any = self
        return config.num_layers / (self.base_num_layers or config.num_layers)

    @property
    def hidden_stddev(self) -> float:
        """Standard deviation of the initial kernels in blocks."""
        config: Any = self
        return config.init_stddev / math.sqrt(self.width_ratio)

    @property
    def branch_scale(self) -> float:
        """Factor of the output of attention and of the MLP."""
        return 1 / self.depth_ratio

    @property
    def readout_scale(self) -> float:
        """Factor of the logits."""
        return 1 / self.width_ratio

    def scaled_scores(self, head_dim: int) -> float:
        """Return the factor of queries · keys of heads of this size."""
        return math.sqrt((self.base_head_dim or head_dim) / head_dim) / math.sqrt(head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamScale:
    """Factors of hyperparameters of AdamW for one parameter."""

    rate: float  # factor of the learning rate
    epsilon: float  # factor of epsilon


#: Path of a parameter, as strings -> its factors.
ParamScales = Mapping[tuple[str, ...], ParamScale]


def param_scales(config: Any, params: Tree, stacks: Collection[str]) -> ParamScales | None:
    """Return the factors of every parameter of a model; None without a rule.

    Args:
        config: model's config.
        params: its parameters.
        stacks: names of its stacks.
    """
    if getattr(config, "scaling", "none") == "none":
        return None
    of_width = 1 / config.width_ratio
    scales = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        names = tuple(str(key.key) for key in path)
        in_block = names[0] in stacks
        is_kernel = in_block and names[-1] == "kernel"
        scales[names] = ParamScale(
            rate=of_width if is_kernel else 1.0,
            epsilon=of_width * (config.branch_scale if in_block else 1.0),
        )
    return scales
