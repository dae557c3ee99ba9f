"""Config of a Swin: its sizes, and the sizes of its stages and windows (models/vision/swin.py)."""

import dataclasses
import math

from fields.numbers import MAX_LAYERS
from models.layers.activations import check_activation
from models.text.common import check_sizes
from models.vision.common import (
    HEADS,
    ImageInputConfig,
    check_patch_size,
)

MAX_STAGES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwinConfig(ImageInputConfig):
    """Sizes, regularization and head of a Swin."""

    patch_size: int = 4  # pixels per side
    embed_dim: int  # dims of the first stage
    depths: tuple[int, ...]  # number of blocks per stage, each of them even
    num_heads: tuple[int, ...]  # heads per stage
    window_size: int  # patches per side; stages with fewer patches have one smaller window
    mlp_ratio: float = 4.0
    version: int = 1  # 1 | 2
    #: Version 2: side of the windows in pre-training, per stage; 0 or () if it was the same.
    pretrained_windows: tuple[int, ...] = ()
    head: str = "labels"  # labels | none
    num_labels: int = 2  # for the head "labels"
    dropout: float = 0.0  # rate for embeddings and residual branches, in [0, 1)
    drop_path: float = 0.0  # rate of the last block's branches per image; grows linearly from 0
    label_smoothing: float = 0.0  # during training
    qkv_bias: bool = True
    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-5
    init_stddev: float = 0.02

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self, exclude=("num_heads",))
        check_patch_size(self)
        check_activation(self.activation)
        if self.head not in HEADS:
            raise ValueError(f"model.head={self.head!r} is unknown; choose {', '.join(HEADS)}")
        if self.version not in (1, 2):
            raise ValueError(f"model.version={self.version} is unknown; choose 1 or 2")
        if not 1 <= self.mlp_ratio * self.embed_dim < math.inf:
            raise ValueError(
                f"model.mlp_ratio={self.mlp_ratio} times model.embed_dim={self.embed_dim} must be "
                "at least 1 and finite; choose for example model.mlp_ratio=4.0"
            )
        self._check_stages()

    def _check_stages(self) -> None:
        if self.version == 1 and self.pretrained_windows:
            raise ValueError(
                f"model.pretrained_windows={self.pretrained_windows} needs model.version=2; "
                "leave it out"
            )
        if min(self.pretrained_windows, default=0) < 0:
            raise ValueError(
                f"model.pretrained_windows={self.pretrained_windows} must not be negative; choose "
                "0 for a stage whose windows had the same size in pre-training"
            )
        if not 1 <= len(self.depths) <= MAX_STAGES:
            raise ValueError(
                f"model.depths={self.depths} has {len(self.depths)} stages; choose from 1 to "
                f"{MAX_STAGES}"
            )
        for name in ("num_heads", *(["pretrained_windows"] if self.pretrained_windows else [])):
            of_stages = getattr(self, name)
            if len(of_stages) != len(self.depths):
                raise ValueError(
                    f"model.{name}={of_stages} and model.depths={self.depths} must both have a "
                    "number for each stage"
                )
        if sum(self.depths) > MAX_LAYERS:
            raise ValueError(
                f"model.depths={self.depths} has more than {MAX_LAYERS} blocks; choose fewer"
            )
        for depth in self.depths:
            if depth < 2 or depth % 2:
                raise ValueError(
                    f"model.depths={self.depths}: a stage consists of pairs of blocks, and {depth} "
                    "is not an even number of them; choose even numbers"
                )
        for stage, heads in enumerate(self.num_heads):
            if heads < 1 or self.width(stage) % heads:
                raise ValueError(
                    f"model.num_heads={self.num_heads}: {heads} must divide the "
                    f"{self.width(stage)} dims of stage {stage}, "
                    f"model.embed_dim={self.embed_dim} × {2**stage}"
                )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.depths)

    @property
    def windows(self) -> tuple[int, ...]:
        """Sides of the windows of all stages."""
        return tuple(self.window(stage)[0] for stage in range(self.num_stages))

    def width(self, stage: int) -> int:
        """Return the number of dims C of a stage."""
        return self.embed_dim * 2**stage

    def mlp_dim(self, stage: int) -> int:
        """Return the number of hidden dims of the MLPs of a stage, rounded down."""
        return int(self.mlp_ratio * self.width(stage))

    def side(self, stage: int) -> int:
        """Return the rows and columns of patches of a stage; incomplete patches are padded."""
        return -(-self.image_size // (self.patch_size * 2**stage))

    def window(self, stage: int) -> tuple[int, int]:
        """Return (side of a window, shift of the windows in the second block of a pair)."""
        side = self.side(stage)
        if self.version == 2:
            # Published code only counts complete patches here, although it pads incomplete ones.
            side = self.image_size // self.patch_size // 2**stage
        if side <= self.window_size:
            return max(side, 1), 0
        return self.window_size, self.window_size // 2
