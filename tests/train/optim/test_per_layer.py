"""Optimizers of a user's own see the parameters of one layer, not a stack's arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from sharding.mesh import make_mesh
from tests.runs import CONFIG
from tests.train.optim.stacked import BASE, STACKS, stacked, tensors, train_beside
from train.config.config_files import load
from train.config.schema import validate_config
from train.optim.optimizer import make_optimizer
from train.optim.schedules import make_learning_rate_schedule
from train.run.assemble import assemble_run


def are_matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


def masked_decay(config, schedule):
    return optax.adamw(schedule, weight_decay=0.5, mask=are_matrices)


def masked(config, schedule):
    return optax.chain(optax.masked(optax.trace(0.9), are_matrices), optax.sgd(schedule))


def multi_transform(config, schedule):
    parts: Any = {"matrix": optax.lion(schedule), "vector": optax.sgd(schedule, momentum=0.9)}
    return optax.multi_transform(parts, labels)


def muon(config, schedule):
    return optax.contrib.muon(schedule, weight_decay=0.1)


def adafactor(config, schedule):
    return optax.adafactor(schedule, min_dim_size_to_factor=4)


def accumulated(config, schedule):
    return optax.MultiSteps(optax.adamw(schedule), 2).gradient_transformation()


def clipped_by_block(config, schedule):
    return optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(schedule))


def clipped_by_global_norm(config, schedule):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def prodigy(config, schedule):
    return optax.contrib.prodigy(schedule)


def of_this_module(function: Any) -> str:
    return f"{__name__}:{function.__name__}"


@pytest.mark.thorough
@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "make",
    [masked_decay, masked, multi_transform, muon, adafactor, accumulated, clipped_by_block],
)
def test_optimizer_of_an_import_path_updates_each_layer_like_optax(make):
    """The reference gets every layer of a stack as a tensor of its own."""
    rng = np.random.default_rng(0)
    config = dataclasses.replace(BASE, name=of_this_module(make))
    schedule: Any = make_learning_rate_schedule(config, 5)
    with jax.enable_x64(True):
        params: Any = jax.tree.map(jnp.asarray, stacked(rng))
        optimizer = make_optimizer(config, schedule, params=params, stacks=STACKS)
        reference = make(config, schedule)
        trained = train_beside(optimizer, reference, params, lambda: stacked(rng), 4)
        for name, tensor in tensors(trained.params).items():
            # float64, and reductions in another order.
            np.testing.assert_allclose(tensor, trained.theirs[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [clipped_by_global_norm, prodigy])
def test_optimizer_that_combines_parameters_is_refused(make):
    params = jax.tree.map(jnp.float32, stacked(np.random.default_rng(0)))
    config = dataclasses.replace(BASE, name=of_this_module(make))
    with pytest.raises(ValueError, match="depends on another parameter, .*optimizer.clip_norm"):
        make_optimizer(config, lambda count: 0.1, params=params, stacks=STACKS)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("make", [multi_transform, muon, adafactor])
def test_state_of_an_import_path_is_laid_out_like_its_parameters(make):
    """Also with uneven stages, whose stacks are cut into slots."""
    overrides = ["mesh.pipeline=2", "mesh.fsdp=2", "pipeline.layers_per_stage=3,1"]
    config = validate_config(load(CONFIG, [*overrides, f"optimizer.name={of_this_module(make)}"]))
    run = assemble_run(config, make_mesh(config.mesh, jax.devices()), vocab_size=257)
    abstract = run.state_layout.abstract
    specs = {leaf.shape: leaf.sharding.spec for leaf in jax.tree.leaves(abstract.params)}
    num_slots = 6  # 2 stages, of which the longer has 3 layers
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract.opt_state)]
    assert (num_slots, 128) in shapes  # a vector's state, or a factor of a matrix
    for leaf in jax.tree.leaves(abstract.opt_state):
        if leaf.shape[:1] == (num_slots,):
            assert leaf.sharding.spec[0] == "pipeline"
        if make is not adafactor and leaf.shape in specs and leaf.ndim > 2:
            assert leaf.sharding.spec == specs[leaf.shape]
