"""Modes of tensor parallelism: how the devices of `mesh.model` are divided further.

A product of activations [tokens, D] and a kernel [D, F] can be split along its three dims. A mode
chooses how many devices split each; the rules (sharding/rules.py) are the same for all modes:

    axis      splits                                      1d    2d    2.5d    3d    2d_stationary
    depth     tokens                                      1     1     d       1     1
    row       tokens; kernels at rest, along D            1     q     q       p     1
    hidden    activations between branches and            1     1     1       p     h
              kernels, along D
    model     kernels along F; activations of a branch    n     q     q       p     n / h
              along F; those between branches by tokens

    devices of mesh.model                                 n     q²    d·q²    p³    n

A device gathers kernels over `row`, and activations over `model`, and then multiplies. With
`hidden`, the product is only a part of the sum over D, which is reduce-scattered over it. The
gradients take the same way back. In `2d_stationary`, kernels stay where they are, and a device
receives tokens · (D / h + F · h / n) elements for a product: the fewest with h = √(n · D / F), or
√n / 2 for F = 4 · D. A device receives as many elements as in the papers:

    2d     Xu and You 2021 (arXiv:2104.05343): SUMMA on a grid of q × q devices
    2.5d   Wang et al. 2021 (arXiv:2105.14500): d grids, which have different examples
    3d     Bian et al. 2021 (arXiv:2105.14450): a cube of p × p × p devices
    2d_stationary   Pope et al. 2022 (arXiv:2211.05102), section 3.2.2, for generation
"""

import dataclasses
import math

from fields.field import field
from fields.numbers import shown
from fields.section import Section

#: Mesh axes over which a mode divides the devices of `mesh.model`, outermost first.
FACTORS = ("depth", "row", "hidden", "model")
MODES = ("1d", "2d", "2.5d", "3d", "2d_stationary")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorConfig(Section, section="tensor"):
    """How `mesh.model` divides its devices; see docs/tensor_parallelism.md."""

    mode: str = field(
        "1d",
        "`1d` splits heads, mlp and vocab, as Megatron does. `2d` also splits the examples and the "
        "parameters over the rows of a square of devices, `2.5d` has several such squares, and "
        "`3d` a cube, over whose third edge the hidden dimension is split. `2d_stationary` splits "
        "the hidden dimension instead of the examples, for generation: no kernel is gathered.",
        choices=MODES,
    )
    depth: int = field(1, "With `2.5d`: number of squares, which have different examples.", ge=1)

    def __post_init__(self):
        super().__post_init__()
        if self.depth != 1 and self.mode != "2.5d":
            raise ValueError(
                f"tensor.depth={self.depth} is only for tensor.mode='2.5d', but it is "
                f"{self.mode!r}; set tensor.mode='2.5d', or tensor.depth=1"
            )

    def factors(self, num_devices: int) -> dict[str, int]:
        """Return axis of FACTORS -> size.

        Args:
            num_devices: `mesh.model`; -1 is allowed for `1d`.

        Raises:
            ValueError: it is not a square, a square times the depth, or a cube, as the mode needs.
        """
        if self.mode == "1d":
            return dict(zip(FACTORS, (1, 1, 1, num_devices), strict=True))
        if self.mode == "2d_stationary":
            hidden = _stationary_hidden(num_devices)
            if num_devices < 1 or hidden == num_devices > 1:
                raise ValueError(
                    f"tensor.mode={self.mode!r}: mesh.model={shown(num_devices)} must be a product "
                    "of two numbers of at least 2; choose for example 4 or 8"
                )
            return dict(zip(FACTORS, (1, 1, hidden, num_devices // hidden), strict=True))
        power = 3 if self.mode == "3d" else 2
        of_grid, rest = divmod(num_devices, self.depth)
        edge = round(max(of_grid, 0) ** (1 / power))
        if rest or num_devices < 1 or edge**power != of_grid:
            raise ValueError(self._problem(num_devices, power))
        hidden = edge if self.mode == "3d" else 1
        return dict(zip(FACTORS, (self.depth, edge, hidden, edge), strict=True))

    def _problem(self, num_devices: int, power: int) -> str:
        form = {"2d": "a square", "2.5d": f"tensor.depth={self.depth} × a square", "3d": "a cube"}
        sizes = [self.depth * edge**power for edge in range(1, 9)]
        nearest = sorted(sizes, key=lambda size: abs(size - num_devices))[:2]
        return (
            f"tensor.mode={self.mode!r}: mesh.model={shown(num_devices)} must be "
            f"{form[self.mode]}; choose for example {' or '.join(map(str, sorted(nearest)))}"
        )

    def num_replicas(self, num_devices: int) -> int:
        """Return the number of groups of the devices of `mesh.model` that have different examples.

        Raises:
            ValueError: as for `factors`.
        """
        factors = self.factors(num_devices)
        return math.prod(factors[axis] for axis in ("depth", "row"))


def modes_of(num_devices: int) -> list[TensorConfig]:
    """Return the modes for training that can divide the devices of `mesh.model`.

    Args:
        num_devices: `mesh.model`.
    """
    depths = [depth for depth in range(2, num_devices + 1) if num_devices % depth == 0]
    several_depths = [(depth, "2.5d") for depth in depths]
    modes = [TensorConfig()]
    for depth, mode in [(1, "2d"), *several_depths, (1, "3d")]:
        config = TensorConfig(mode=mode, depth=depth)
        try:
            factors = config.factors(num_devices)
        except ValueError:
            continue
        if factors["model"] > 1:
            modes.append(config)
    return modes


def _stationary_hidden(num_devices: int) -> int:
    """Return h of `2d_stationary`: at most √n / 2, or else the least divisor of at least 2."""
    divisors = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
    fewest = [n for n in divisors if 4 * n * n <= num_devices]
    return max(fewest, default=min(divisors, default=1))
