"""What a run decides about its memory."""

import dataclasses

ZERO_STAGES = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Where the training state lies, and how much of it at once."""

    zero_stage: int = 0  # one of ZERO_STAGES
    shard_parameters_fraction: float = 1.0  # of the stacks' bytes, what stage 3 holds for a layer
    # Names of activations that lie in host memory from a block's forward to its backward.
    offload_activations: tuple = ()

    def __post_init__(self):
        names = self.offload_activations
        names = (names,) if isinstance(names, str) else tuple(names)
        object.__setattr__(self, "offload_activations", names)
        if self.zero_stage not in ZERO_STAGES:
            raise ValueError(f"memory.zero_stage={self.zero_stage} is unknown; choose 0, 1, 2 or 3")
        if not 0 <= self.shard_parameters_fraction <= 1:
            raise ValueError(
                f"memory.shard_parameters_fraction={self.shard_parameters_fraction} must lie in "
                "0 .. 1"
            )
        if self.shard_parameters_fraction != 1 and self.zero_stage != 3:
            raise ValueError(
                f"memory.shard_parameters_fraction={self.shard_parameters_fraction} is for "
                f"memory.zero_stage=3 alone, which is {self.zero_stage}; set one of the two"
            )
