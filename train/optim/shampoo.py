"""Shampoo: momentum that is multiplied by inverse roots of covariances; AdamW for all else.

Each matrix is cut into blocks of about equal sizes. For a block with gradient G and momentum M:

    L ← β₂ L + (1 - β₂) G Gᵀ
    R ← β₂ R + (1 - β₂) Gᵀ G
    D = L^(-1/4) M R^(-1/4)         the roots are computed every few updates, and stored

The blocks D of a matrix are joined, and its update is D scaled to the norm of AdamW's update
("grafting"), with AdamW's moments. So learning rates and decay of AdamW can be kept. A constant
factor of L, R or M, such as the correction of their bias, cancels in that scaling and is left out.

For a matrix of 3 × 2 blocks, whose rows and columns are padded with zeros to a multiple of 3 and 2:

    0 1
    2 3     blocks [6, rows, columns], L [6, rows, rows], R [6, columns, columns]
    4 5

Padding changes nothing: its rows of M are zero, and L and R are block-diagonal there.

The state of a stack is `[slots, *batch, blocks, ...]`. Devices divide the roots of these blocks,
and the products with them by whole matrices; see sharding/ops/matrices.py.

Source: Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization" (2018),
arXiv:1802.09568; Anil et al., "Scalable Second Order Optimization for Deep Learning" (2020),
arXiv:2002.09018; Shi et al., "A Distributed Data-Parallel PyTorch Implementation of the Distributed
Shampoo Optimizer" (2023), arXiv:2309.06497.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from sharding.ops.matrices import Arrays
from sharding.zero import spec_of_state
from train.optim.matrices import Matrices, Matrix, on_slots, path_names

Tree = Any

#: Share of a covariance's norm that is added to its eigenvalues.
RIDGE = 1e-6
#: Newton steps, after which eigenvalues from RIDGE to 1 are exact in float64.
_NUM_STEPS = 20
#: Largest eigenvalue that a Newton iteration starts with; all below 5 converge, this fast.
_LARGEST = 2.5
#: How many roots are computed at the same time: enough to fill a GPU, and little memory.
_NUM_AT_A_TIME = 8


class Statistics(NamedTuple):
    """Statistics of the blocks of a parameter, or a tree of them for each parameter.

    Attributes:
        left: covariances of the rows of each block, [*batch, blocks, rows, rows].
        right: covariances of the columns of each block, [*batch, blocks, columns, columns].
        left_root: inverse fourth roots of `left`, as of their last computation.
        right_root: inverse fourth roots of `right`, as of their last computation.
    """

    left: Tree
    right: Tree
    left_root: Tree
    right_root: Tree


class ShampooState(NamedTuple):
    """State of the parameters that are matrices."""

    adam: Any  # moments, and the number of updates
    statistics: Statistics


def scale_by_shampoo(
    matrices: Matrices,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    max_block: int,
    every: int,
) -> optax.GradientTransformationExtraArgs:
    """Multiply the momentum of matrices by inverse roots; give it the norm of Adam's update.

    Args:
        matrices: matrices of every parameter that it is called with.
        beta1: decay of the first moment.
        beta2: decay of the second moment and of the covariances.
        epsilon: added to the root of the second moment.
        max_block: largest number of rows and of columns of a block.
        every: number of updates from one computation of the roots to the next.
    """
    adam = optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon)

    def init(params: Tree) -> ShampooState:
        def zeros(path: tuple, x: jax.Array, *, side: int) -> jax.Array:
            blocks = _Blocks.of(matrices[path_names(path)], x.shape, max_block)
            dtype = jnp.promote_types(x.dtype, jnp.float32)
            return jnp.zeros(blocks.covariance_shapes[side], dtype)

        left, right = (
            jax.tree_util.tree_map_with_path(partial(zeros, side=side), params) for side in (0, 1)
        )
        return ShampooState(adam.init(params), Statistics(left, right, left, right))

    def update(
        updates: Tree, state: Any, params: Tree = None, param_layout: Tree = None, **_: Any
    ) -> tuple[Tree, ShampooState]:
        layouts = {} if param_layout is None else dict(jax.tree.leaves_with_path(param_layout))
        new_adam: Any
        targets, new_adam = adam.update(updates, state.adam, params)
        is_due = state.adam.count % every == 0

        def of_parameter(
            path: tuple, grad: jax.Array, moment: jax.Array, target: jax.Array, *old: jax.Array
        ) -> tuple[jax.Array, Statistics]:
            matrix = matrices[path_names(path)]
            blocks = _Blocks.of(matrix, grad.shape, max_block)
            on_blocks = _OnBlocks(blocks, _Specs.of(blocks, layouts.get(path)))
            statistics = on_blocks.updated(Statistics(*old), grad, beta2, is_due)
            direction = on_blocks.direction(moment, statistics)
            return _graft(matrix, direction, target), statistics

        results = jax.tree_util.tree_map_with_path(
            of_parameter, updates, new_adam.mu, targets, *state.statistics
        )
        directions, statistics = _separated(results, jax.tree.structure(updates))
        return directions, ShampooState(new_adam, statistics)

    return optax.GradientTransformationExtraArgs(init, update)


def _separated(results: Tree, structure: Any) -> tuple[Tree, Statistics]:
    """Return a tree of directions and trees of statistics, from a tree of pairs of them.

    Args:
        results: tree with a pair of (direction, statistics) for each parameter.
        structure: structure of the parameters.
    """
    pairs = structure.flatten_up_to(results)
    directions = structure.unflatten([direction for direction, _ in pairs])
    # By index, because zip would give nothing if all matrices are frozen.
    fields = range(len(Statistics._fields))
    trees = [structure.unflatten([statistics[i] for _, statistics in pairs]) for i in fields]
    return directions, Statistics(*trees)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blocks:
    """How the matrices of one layer's parameter are cut into blocks.

    Attributes:
        matrix: dims of the parameter.
        shape: its shape, with the dims in `matrix.order`.
        counts: numbers of blocks along the rows and along the columns.
        sizes: numbers of rows and of columns of a block.
    """

    matrix: Matrix
    shape: tuple[int, ...]
    counts: tuple[int, int]
    sizes: tuple[int, int]

    @staticmethod
    def of(matrix: Matrix, shape: tuple[int, ...], max_block: int) -> "_Blocks":
        """Return the blocks of a parameter of this shape, of sizes as equal as possible."""
        rows, columns = matrix.sizes(shape)
        counts = (-(-rows // max_block), -(-columns // max_block))
        sizes = (-(-rows // counts[0]), -(-columns // counts[1]))
        shape = tuple(shape[i] for i in matrix.order)
        return _Blocks(matrix=matrix, shape=shape, counts=counts, sizes=sizes)

    @property
    def covariance_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the covariances of rows and of columns."""
        lead = (*self.shape[: len(self.matrix.batch)], math.prod(self.counts))
        rows, columns = self.sizes
        return (*lead, rows, rows), (*lead, columns, columns)

    def cut(self, x: jax.Array) -> jax.Array:
        """Return the blocks [matrices, blocks, rows, columns] of [matrices, *inputs, *outputs]."""
        sizes = self.matrix.sizes(self._in_original_order)
        x = x.reshape(len(x), *sizes)
        padding = [n * k - size for n, k, size in zip(self.counts, self.sizes, sizes, strict=True)]
        x = jnp.pad(x, ((0, 0), (0, padding[0]), (0, padding[1])))
        (num_rows, num_columns), (rows, columns) = self.counts, self.sizes
        x = x.reshape(len(x), num_rows, rows, num_columns, columns).swapaxes(2, 3)
        return x.reshape(len(x), num_rows * num_columns, rows, columns)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Return matrices [matrices, *inputs, *outputs] from their blocks."""
        (num_rows, num_columns), (rows, columns) = self.counts, self.sizes
        x = blocks.reshape(len(blocks), num_rows, num_columns, rows, columns).swapaxes(2, 3)
        x = x.reshape(len(blocks), num_rows * rows, num_columns * columns)
        num_rows, num_columns = self.matrix.sizes(self._in_original_order)
        x = x[:, :num_rows, :num_columns]
        return x.reshape(len(blocks), *self.shape[len(self.matrix.batch) :])

    @property
    def _in_original_order(self) -> tuple[int, ...]:
        return tuple(self.shape[i] for i in np.argsort(self.matrix.order))


class _Specs(NamedTuple):
    """How a stack's parameter, in `Matrix.order`, and its covariances are split over the mesh."""

    param: PartitionSpec
    left: PartitionSpec
    right: PartitionSpec

    @staticmethod
    def of(blocks: _Blocks, layout: jax.ShapeDtypeStruct | None) -> "_Specs":
        """Return the specs for a stack's parameter with this layout; None: nothing is split."""
        if layout is None:
            return _Specs(PartitionSpec(), PartitionSpec(), PartitionSpec())
        sharding: Any = layout.sharding
        left, right = (
            spec_of_state((layout.shape[0], *shape), layout.shape, sharding.spec, sharding.mesh)
            for shape in blocks.covariance_shapes
        )
        return _Specs(blocks.matrix.spec_in_order(sharding.spec), left, right)


@dataclasses.dataclass(frozen=True)
class _OnBlocks:
    """Computations for one layer's parameter, or for all slots of a stack under `vmap`.

    Attributes:
        blocks: how the parameter is cut.
        specs: how the stack's arrays are split.
    """

    blocks: _Blocks
    specs: _Specs

    def updated(
        self, old: Statistics, grad: jax.Array, beta2: float, is_due: jax.Array
    ) -> Statistics:
        """Return the statistics after an update.

        Args:
            old: statistics before it.
            grad: gradient of the parameter.
            beta2: decay of the covariances.
            is_due: whether the roots are computed again.
        """

        def covariances(grad: jax.Array, left: jax.Array, right: jax.Array) -> Arrays:
            g = self.blocks.cut(grad).astype(left.dtype)
            rows = _product("...ij,...kj->...ik", g, g)
            columns = _product("...ji,...jk->...ik", g, g)
            return beta2 * left + (1 - beta2) * rows, beta2 * right + (1 - beta2) * columns

        def roots(left: jax.Array, right: jax.Array, *_: jax.Array) -> Arrays:
            # Blocks are divided instead of matrices, because there are more of them.
            num_batch = self._num_batch + 1
            return tuple(
                on_slots(inverse_fourth_roots, [spec], [spec], num_batch)(x)[0]
                for x, spec in zip((left, right), self._sides, strict=True)
            )

        def old_roots(*args: jax.Array) -> Arrays:
            return args[2:]

        specs = [self.specs.param, *self._sides]
        run = on_slots(covariances, specs, self._sides, self._num_batch)
        new = run(grad.transpose(self._order), old.left, old.right)
        return Statistics(*new, *jax.lax.cond(is_due, roots, old_roots, *new, *old[2:]))

    def direction(self, moment: jax.Array, statistics: Statistics) -> jax.Array:
        """Return the first moment, multiplied by the roots."""

        def precondition(moment: jax.Array, left_root: jax.Array, right_root: jax.Array) -> Arrays:
            m = self.blocks.cut(moment).astype(left_root.dtype)
            product = _product("...ij,...jk,...kl->...il", left_root, m, right_root)
            return (self.blocks.join(product),)

        param = self.specs.param
        run = on_slots(precondition, [param, *self._sides], [param], self._num_batch)
        roots = (statistics.left_root, statistics.right_root)
        (result,) = run(moment.transpose(self._order), *roots)
        return result.transpose(np.argsort(self._order)).astype(moment.dtype)

    @property
    def _sides(self) -> list[PartitionSpec]:
        return [self.specs.left, self.specs.right]

    @property
    def _order(self) -> tuple[int, ...]:
        return self.blocks.matrix.order

    @property
    def _num_batch(self) -> int:
        """Number of dims of a stack's parameter that count matrices."""
        return 1 + len(self.blocks.matrix.batch)


def _graft(matrix: Matrix, direction: jax.Array, target: jax.Array) -> jax.Array:
    """Return `direction`, scaled to the norm of `target` in each matrix."""

    def norm(x: jax.Array) -> jax.Array:
        dims = (*matrix.inputs, *matrix.outputs)
        return jnp.sqrt(jnp.square(x).sum(dims, keepdims=True))

    length = norm(direction)
    is_zero = length == 0
    return direction * jnp.where(is_zero, 0, norm(target) / jnp.where(is_zero, 1, length))


def inverse_fourth_roots(x: jax.Array) -> tuple[jax.Array]:
    """Return (x + RIDGE × its norm × I)^(-1/4) of covariances `[matrices, n, n]`, in a tuple.

    The norm is Frobenius's, which no eigenvalue exceeds. The root of zeros is the identity: of an
    expert without tokens, for example.

    A coupled Newton iteration needs only products of matrices, unlike an eigendecomposition, whose
    many dependent steps take long on GPUs. With I for the root R and A for M at first, each step is

        T = 5/4 I - 1/4 M,   R <- R T,   M <- T^4 M        M = R^4 A at any time

    An eigenvalue of M grows 2.4-fold as long as it is small, and then becomes 1.

    Source: Guo and Higham, "A Schur-Newton method for the matrix pth root and its inverse" (2006),
    as in Anil et al. (2020).
    """

    def root(x: jax.Array) -> jax.Array:
        identity = jnp.eye(len(x), dtype=x.dtype)
        norm = jnp.sqrt(jnp.square(x).sum())
        is_zero = norm < jnp.finfo(x.dtype).tiny / RIDGE
        scale = jnp.where(is_zero, 1, norm)
        # Eigenvalues from RIDGE to 1 become those from 2.5 RIDGE to 2.5, for which it converges.
        factor = _LARGEST / (1 + RIDGE)
        matrix = factor * jnp.where(is_zero, identity, x / scale + RIDGE * identity)

        def step(_: int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            root, matrix = carry
            change = 1.25 * identity - 0.25 * matrix
            squared = _product("ij,jk->ik", change, change)
            fourth = _product("ij,jk->ik", squared, squared)
            return _product("ij,jk->ik", root, change), _product("ij,jk->ik", fourth, matrix)

        root, _ = jax.lax.fori_loop(0, _NUM_STEPS, step, (identity, matrix))
        return root * (factor / scale) ** 0.25

    return (jax.lax.map(root, x, batch_size=_NUM_AT_A_TIME),)


def _product(subscripts: str, *arrays: jax.Array) -> jax.Array:
    """Return an einsum without reduced precision, which eigenvalues of 1e-6 would not survive."""
    return jnp.einsum(subscripts, *arrays, precision=jax.lax.Precision.HIGHEST)
