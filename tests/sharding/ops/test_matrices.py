"""Functions of whole matrices on a mesh: what each device gets, and what comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding.mesh import MeshConfig, make_mesh, use_mesh
from sharding.ops.matrices import on_whole_matrices
from sharding.spec import axes_by_dim

#: spec of matrices [layers, 3, 4, 8], spec of a second array [layers, 3, 4, 4]
SPECS = {
    "inner dims and layers": (
        PartitionSpec("pipeline", None, "data", "model"),
        PartitionSpec(("pipeline", "data", "model")),
    ),
    "inner dims and one dim": (
        PartitionSpec("pipeline", None, "data", "model"),
        PartitionSpec("pipeline", None, None, ("data", "model")),
    ),
    "another order": (
        PartitionSpec("pipeline", None, "data", "model"),
        PartitionSpec("pipeline", None, "model", "data"),
    ),
    "an order that no chunk has": (
        PartitionSpec("pipeline", None, "data", "model"),
        PartitionSpec("pipeline", None, None, ("model", "data")),
    ),
    "a part": (
        PartitionSpec("pipeline", None, "data", "model"),
        PartitionSpec("pipeline", None, None, "model"),
    ),
    "copies and layers": (
        PartitionSpec("pipeline", None, "data"),
        PartitionSpec(("pipeline", "data")),
    ),
    "copies": (PartitionSpec("pipeline"), PartitionSpec("pipeline")),
    "layers without pipeline": (PartitionSpec(None, None, "model"), PartitionSpec("model")),
}


CASES = [
    (name, num_layers)
    for name, specs in SPECS.items()
    for num_layers in (8, 6)
    # JAX splits an argument into equal parts only.
    if all(num_layers % 2 ** len(axes_by_dim(spec)[0]) == 0 for spec in specs)
]


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("name", "num_layers"), CASES)
def test_each_matrix_is_computed_once(name, num_layers):
    """With a second argument and result that are split in another way."""
    specs = SPECS[name]
    mesh = make_mesh(MeshConfig(pipeline=2, data=2, model=2), jax.devices())
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(num_layers, 3, 4, n)) for n in (8, 4)]
    shapes = []

    def function(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        shapes.append((x.shape, y.shape))
        return jnp.flip(x, 1) * y.sum((1, 2), keepdims=True), y + x.sum((1, 2), keepdims=True)

    shardings = [NamedSharding(mesh, spec) for spec in specs]
    with jax.enable_x64(True), use_mesh(mesh):
        run = jax.jit(
            lambda *args: on_whole_matrices(function, args, specs, specs, 2),
            out_shardings=tuple(shardings),
        )
        results = run(*map(jax.device_put, arrays, shardings))
    num_stages = 2 if specs[0][0] == "pipeline" else 1
    num_matrices = -(-num_layers * 3 // num_stages // 4)  # data=2 and model=2 divide them
    assert shapes == [((num_matrices, 4, 8), (num_matrices, 4, 4))]
    x, y = arrays
    wanted = x[:, :, ::-1] * y.sum((2, 3), keepdims=True), y + x.sum((2, 3), keepdims=True)
    # Rounding in float64; sums of about 5 can cancel.
    np.testing.assert_allclose(results[0], wanted[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(results[1], wanted[1], rtol=1e-12, atol=1e-13)
