"""Shampoo against a short reference in numpy, and on a mesh."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from data.corpus import load_corpus
from sharding.mesh import MeshConfig, make_mesh, use_mesh
from tests.runs import FLOAT64, TINY, digest, losses, make_run
from tests.train.optim.stacked import BASE, STACKS
from train.lifecycle.restore import RestoredRun, restore_or_initialize
from train.lifecycle.workdir import write_run_files
from train.optim.matrices import Matrix
from train.optim.optimizer import make_optimizer
from train.run.run import Run

SHAMPOO = dataclasses.replace(BASE, name="shampoo", shampoo_block=5, shampoo_every=2)
RATE = 0.25


def inverse_root(x: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(x)
    return vectors @ np.diag((values + 1e-6 * np.linalg.norm(x)) ** -0.25) @ vectors.T


def blocks_of(length: int, block: int) -> list[slice]:
    """Return slices of at most `block` elements, all but the last of the same length."""
    size = -(-length // -(-length // block))
    return [slice(start, start + size) for start in range(0, length, size)]


class Reference:
    """Shampoo of one matrix, with the bias corrections that the published algorithm has."""

    def __init__(self, shape: tuple[int, int], block: int, every: int):
        rows, columns = (blocks_of(length, block) for length in shape)
        self.every = every
        self.count = 0
        self.moment = np.zeros(shape)
        self.second_moment = np.zeros(shape)
        self.blocks = [(i, j) for i in rows for j in columns]
        self.left = [0.0 for _ in self.blocks]
        self.right = [0.0 for _ in self.blocks]
        self.roots: Any = None

    def direction(self, grad: np.ndarray) -> np.ndarray:
        b1, b2 = SHAMPOO.beta1, SHAMPOO.beta2
        self.count += 1
        self.moment = b1 * self.moment + (1 - b1) * grad
        self.second_moment = b2 * self.second_moment + (1 - b2) * grad**2
        grads = [grad[block] for block in self.blocks]
        self.left = [b2 * x + (1 - b2) * g @ g.T for x, g in zip(self.left, grads, strict=True)]
        self.right = [b2 * x + (1 - b2) * g.T @ g for x, g in zip(self.right, grads, strict=True)]
        bias1, bias2 = 1 - b1**self.count, 1 - b2**self.count
        if (self.count - 1) % self.every == 0:
            pairs = zip(self.left, self.right, strict=True)
            self.roots = [(inverse_root(x / bias2), inverse_root(y / bias2)) for x, y in pairs]
        direction = np.zeros_like(grad)
        for block, (left, right) in zip(self.blocks, self.roots, strict=True):
            direction[block] = left @ (self.moment[block] / bias1) @ right
        adam = self.moment / bias1 / (np.sqrt(self.second_moment / bias2) + SHAMPOO.epsilon)
        return direction * np.linalg.norm(adam) / np.linalg.norm(direction)


def fused(x: np.ndarray) -> list[np.ndarray]:
    """Return the matrices [8, 8] of fused queries, keys and values `[8, 3, 2, 4]`."""
    return [x[:, i].reshape(8, 8) for i in range(3)]


def unfused(matrices: list[np.ndarray]) -> np.ndarray:
    return np.stack([x.reshape(8, 2, 4) for x in matrices], axis=1)


def alone(x: np.ndarray) -> list[np.ndarray]:
    return [x]


def first(matrices: list[np.ndarray]) -> np.ndarray:
    return matrices[0]


KERNEL = Matrix(batch=(), inputs=(0,), outputs=(1,))
#: shape of one layer; its matrices; an array to its matrices, and back
CASES: dict[str, tuple[tuple[int, ...], Matrix, Callable, Callable]] = {
    "one block": ((5, 4), KERNEL, alone, first),
    "equal blocks": ((10, 15), KERNEL, alone, first),
    "unequal blocks": ((7, 12), KERNEL, alone, first),
    "experts": ((3, 6, 4), Matrix(batch=(0,), inputs=(1,), outputs=(2,)), list, np.stack),
    "fused": ((8, 3, 2, 4), Matrix(batch=(1,), inputs=(0,), outputs=(2, 3)), fused, unfused),
}


def optimizer_of(params: Any, matrix: Matrix, **changes: Any) -> Any:
    return make_optimizer(
        dataclasses.replace(SHAMPOO, **changes),
        lambda count: RATE,
        params=params,
        stacks=STACKS,
        matrices={("blocks", "kernel"): matrix},
    )


@pytest.mark.parametrize("name", CASES)
def test_shampoo_equals_a_reference(name):
    """Over five updates, of which the first, third and fifth compute the roots."""
    shape, matrix, split, join = CASES[name]
    num_slots = 2
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=(num_slots, *shape))
    references = [
        [Reference(x.shape, SHAMPOO.shampoo_block, SHAMPOO.shampoo_every) for x in split(layer)]
        for layer in wanted
    ]
    with jax.enable_x64(True):
        params: Any = {"blocks": {"kernel": jnp.asarray(wanted)}}
        optimizer = optimizer_of(params, matrix)
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        for _ in range(5):
            grads = rng.normal(size=(num_slots, *shape))
            updates, state = update({"blocks": {"kernel": jnp.asarray(grads)}}, state, params)
            params = optax.apply_updates(params, updates)
            for i, layer in enumerate(references):
                directions = [r.direction(g) for r, g in zip(layer, split(grads[i]), strict=True)]
                wanted[i] -= RATE * (join(directions) + SHAMPOO.weight_decay * wanted[i])
    np.testing.assert_allclose(params["blocks"]["kernel"], wanted, rtol=1e-9, atol=1e-11)  # float64


@pytest.mark.thorough
@pytest.mark.parametrize("is_frozen", [False, True])
def test_other_parameters_get_adamw(is_frozen):
    """Also if all matrices are frozen, as with adapters."""
    rng = np.random.default_rng(0)
    params: Any = {
        "blocks": {"kernel": rng.normal(size=(2, 5, 4)), "bias": rng.normal(size=(2, 4))},
        "table": rng.normal(size=(6, 4)),
    }
    if is_frozen:
        params["blocks"]["kernel"] = None
    with jax.enable_x64(True):
        grads = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
        results = []
        for name in ("shampoo", "adamw"):
            optimizer = optimizer_of(params, KERNEL, name=name)
            results.append(optimizer.update(grads, optimizer.init(params), params)[0])
    shampoo, adamw = results
    # Rounding in float64, in operations that are compiled apart.
    np.testing.assert_allclose(shampoo["table"], adamw["table"], rtol=1e-14)
    np.testing.assert_allclose(shampoo["blocks"]["bias"], adamw["blocks"]["bias"], rtol=1e-14)
    if not is_frozen:
        assert not np.allclose(shampoo["blocks"]["kernel"], adamw["blocks"]["kernel"])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zero_gradients_change_nothing_and_later_ones_count(dtype):
    """For an expert without tokens, and padding layers."""
    with jax.enable_x64(dtype == "float64"):
        params: Any = {"blocks": {"kernel": jnp.zeros((1, 5, 4), dtype)}}
        grads = {"blocks": {"kernel": jnp.ones((1, 5, 4), dtype)}}
        optimizer = optimizer_of(params, KERNEL)
        updates, state = optimizer.update(params, optimizer.init(params), params)
        np.testing.assert_array_equal(updates["blocks"]["kernel"], 0)
        updates, _ = optimizer.update(grads, state, params)
        # Adam's update after a zero gradient: (0.1 / 0.19) / sqrt(0.05 / 0.0975).
        wanted = -RATE * 0.1 / 0.19 / np.sqrt(0.05 / 0.0975)
        np.testing.assert_allclose(updates["blocks"]["kernel"], wanted, rtol=1e-5)


SPLITS = {
    "ZeRO": PartitionSpec("pipeline", "data", None, "model"),
    "replicated": PartitionSpec("pipeline"),
    "over model": PartitionSpec("pipeline", "model"),
    "both over one dim": PartitionSpec("pipeline", None, None, ("model", "data")),
    "fused dim": PartitionSpec("pipeline", None, "data"),
}


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize("num_layers", [8, 6])
@pytest.mark.parametrize("name", SPLITS)
def test_shampoo_on_a_mesh_equals_one_device(name, num_layers):
    """Fused matrices in four layers of a stage, which devices can divide, or in three."""
    num_fused = 2 if name == "fused dim" else 3
    shape = (num_layers, 8, num_fused, 12)
    matrix = Matrix(batch=(1,), inputs=(0,), outputs=(2,))
    rng = np.random.default_rng(0)
    mesh = make_mesh(MeshConfig(pipeline=2, data=2, model=2), jax.devices())
    sharding = NamedSharding(mesh, SPLITS[name])
    with jax.enable_x64(True):
        grads = [{"blocks": {"kernel": jnp.asarray(rng.normal(size=shape))}} for _ in range(3)]
        optimizer: Any = optax.with_extra_args_support(optimizer_of(grads[0], matrix))

        def train(grads: Any, **layout: Any) -> tuple[Any, Any]:
            state = optimizer.init(grads[0])
            results = []
            for grad in grads:
                updates, state = optimizer.update(grad, state, grad, **layout)
                results.append(updates)
            return results, state

        wanted = jax.jit(train)(grads)
        placed = jax.device_put(grads, sharding)
        layout = {"blocks": {"kernel": jax.ShapeDtypeStruct(shape, np.float64, sharding=sharding)}}
        with use_mesh(mesh):
            ours_on_mesh = jax.jit(lambda grads: train(grads, param_layout=layout))(placed)
    for ours, theirs in zip(*map(jax.tree.leaves, (ours_on_mesh, wanted)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-9)  # float64


@pytest.mark.parametrize("layers", [8, 6])
def test_statistics_are_divided_over_all_devices(layers, corpus_overrides):
    """By layers if the devices of a stage divide them, and otherwise by blocks or rows."""
    overrides = (*TINY, *corpus_overrides, "optimizer.name=shampoo", *MESHES["2x2x2, ZeRO 1"])
    run, _ = make_run((*overrides, f"model.num_layers={layers}"))
    state: Any = run.state_layout.abstract.opt_state
    for leaf in jax.tree.leaves(state[1]["shampoo"][0].statistics):
        assert math.prod(leaf.sharding.shard_shape(leaf.shape)) * 8 == math.prod(leaf.shape)


MESHES = {
    "2x2x2, ZeRO 1": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2", "memory.zero_stage=1"),
    "2x2x2, ZeRO 2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2", "memory.zero_stage=2"),
    "2x2x2, ZeRO 3": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2", "memory.zero_stage=3"),
}


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_on_a_mesh_equal_one_device(mesh, corpus_overrides):
    with jax.enable_x64(True):
        overrides = (*TINY, *corpus_overrides, *FLOAT64, "optimizer.name=shampoo")
        overrides = (*overrides, "optimizer.shampoo_block=24", "optimizer.shampoo_every=3")
        wanted = losses(*make_run(overrides), 5)
        losses_on_mesh = losses(*make_run((*overrides, *MESHES[mesh])), 5)
    np.testing.assert_allclose(losses_on_mesh, wanted, rtol=0, atol=1e-9)


@pytest.mark.thorough
def test_a_run_resumes_to_the_bit_and_on_another_mesh(corpus_overrides, tmp_path):
    """Step 3 uses the roots of step 1, which the checkpoint of step 2 holds."""
    base = (*TINY, *corpus_overrides, *FLOAT64, "optimizer.name=shampoo")
    base = (*base, "optimizer.shampoo_block=24", "optimizer.shampoo_every=3")
    uneven = ("mesh.pipeline=2", "mesh.data=2", "pipeline.layers_per_stage=3,1")
    with jax.enable_x64(True):
        run, corpus = make_run((*base, *uneven, "memory.zero_stage=1"))
        write_run_files(tmp_path, run, corpus)
        start = restore_or_initialize(run, corpus, tmp_path)
        first_losses, state = continued(run, start, 2)
        fingerprint = load_corpus(run.config.data).fingerprint
        data_state = {"batches": start.batches.get_state(), "corpus": fingerprint}
        start.checkpoints.save(2, run.state_layout.to_portable(state), data_state)
        start.checkpoints.wait()
        wanted, state = continued(run, dataclasses.replace(start, state=state), 3)
        restored = restore_or_initialize(run, corpus, tmp_path)
        resumed, resumed_state = continued(run, restored, 3)
        assert resumed == wanted and digest(resumed_state) == digest(state)
        other, _ = make_run((*base, "mesh.fsdp=2", "mesh.model=2", "memory.zero_stage=2"))
        resumed, _ = continued(other, restore_or_initialize(other, corpus, tmp_path), 3)
    assert len({*first_losses, *wanted}) == 5
    np.testing.assert_allclose(resumed, wanted, rtol=1e-9, atol=0)


def continued(run: Run, start: RestoredRun, num_steps: int) -> tuple[list[float], Any]:
    """Train for some steps; return their losses and the state."""
    state = start.state
    step_losses = []
    for _ in range(num_steps):
        state, metrics = run.compile_train_step()(state, run.place_batch(next(start.batches)))
        step_losses.append(float(metrics["loss"]))
    return step_losses, state


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.shampoo_block=0"], "shampoo_block=0"),
        (["optimizer.shampoo_every=0"], "shampoo_every=0"),
        (["optimizer.shampoo_blok=64"], "shampoo_block"),
        (["memory.placement=host"], "may need whole arrays; set optimizer.name=adamw or muon"),
        (
            ["model.scaling=mup", "model.base_embed_dim=32"],
            "optimizer.name='shampoo'; set optimizer.name=adamw",
        ),
    ],
)
def test_what_does_not_go_with_shampoo_is_refused(overrides, message, corpus_overrides):
    with pytest.raises(ValueError, match=message):
        make_run([*TINY, *corpus_overrides, "optimizer.name=shampoo", *overrides])
