"""Optimizers against PyTorch's, optax's and published formulas."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch

from tests.train.optim.stacked import BASE, SLOTS, STACKS, VECTORS, stacked, tensors, train_beside
from train.optim.config import OptimizerConfig
from train.optim.ema import find_average
from train.optim.optimizer import make_optimizer
from train.optim.schedules import make_learning_rate_schedule


@pytest.mark.thorough
def test_adamw_equals_pytorchs_for_every_tensor():
    """Ten steps on random gradients; vectors are not decayed, also in a stack."""
    schedule: Any = make_learning_rate_schedule(BASE, 10)
    rng = np.random.default_rng(0)
    start = stacked(rng)
    with jax.enable_x64(True):
        optimizer = make_optimizer(BASE, schedule, params=start, stacks=STACKS)
        params: Any = jax.tree.map(jnp.asarray, start)
        state = optimizer.init(params)
        theirs = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in tensors(start).items()}
        groups = [
            {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
        for step in range(10):
            grads = stacked(rng)
            updates, state = optimizer.update(jax.tree.map(jnp.asarray, grads), state, params)
            params = optax.apply_updates(params, updates)
            for group in reference.param_groups:
                group["lr"] = float(schedule(step))
            for name, gradient in tensors(grads).items():
                theirs[name].grad = torch.tensor(gradient)
            reference.step()
        found = tensors(params)
        for name, parameter in theirs.items():
            # The learning rate is float32: a relative error of 1e-7 in each step of 0.02.
            np.testing.assert_allclose(found[name], parameter.detach().numpy(), atol=1e-8, rtol=0)


def trust_ratio(name: str, weights: np.ndarray, update: np.ndarray) -> float:
    lengths = np.sqrt(np.square(weights).sum()), np.sqrt(np.square(update).sum())
    return 1.0 if name.startswith(VECTORS) or 0 in lengths else lengths[0] / lengths[1]


def lamb(name, w, g, memory, rate, step):
    """Algorithm 2 of You et al. (2019), with Adam's bias correction."""
    m, v = memory.get(name, (0, 0))
    memory[name] = m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    u = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
    u += 0.0 if name.startswith(VECTORS) else 0.1 * w
    return w - rate * trust_ratio(name, w, u) * u


def lars(name, w, g, memory, rate, step):
    """Section 4 of You et al. (2017), but with the norm of g + decay × w, as in MoCo v3."""
    u = g + (0.0 if name.startswith(VECTORS) else 0.1 * w)
    ratio = trust_ratio(name, w, u)
    ratio *= 1.0 if name.startswith(VECTORS) or not w.any() else 0.001
    memory[name] = 0.9 * memory.get(name, 0) + rate * ratio * u
    return w - memory[name]


@pytest.mark.parametrize("formula", [lamb, lars])
def test_optimizer_equals_its_published_formula_for_every_tensor(formula):
    """Each layer of a stack counts as a separate tensor, and padding stays zero."""
    schedule: Any = make_learning_rate_schedule(BASE, 6)
    rng = np.random.default_rng(0)
    memory = {}
    with jax.enable_x64(True):
        config = dataclasses.replace(BASE, name=formula.__name__)
        start = stacked(rng)
        optimizer = make_optimizer(config, schedule, params=start, stacks=STACKS)
        params: Any = jax.tree.map(jnp.asarray, start)
        state = optimizer.init(params)
        expected = tensors(start)
        for step in range(1, 7):
            grads = stacked(rng)
            updates, state = optimizer.update(jax.tree.map(jnp.asarray, grads), state, params)
            params = optax.apply_updates(params, updates)
            rate = float(schedule(step - 1))
            for name, g in tensors(grads).items():
                expected[name] = formula(name, expected[name], g, memory, rate, step)
        found = tensors(params)
    assert not any(found[f"{name}2"].any() for name in SLOTS)
    for name, before in tensors(start).items():
        # The learning rate is float32: a relative error of 1e-7 in the change.
        change = max(np.abs(expected[name] - before).max(), 1e-30)
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-6 * change)


REFERENCES = {
    "lion": optax.lion(0.02, b1=0.9, b2=0.95, weight_decay=0.0),
    "adafactor": optax.adafactor(0.02),
    "schedule_free": optax.contrib.schedule_free_adamw(0.02, b1=0.9, b2=0.95),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_optimizer_equals_optax_for_every_tensor(name):
    """Also the parameters that schedule-free learning evaluates."""
    config = dataclasses.replace(BASE, name=name, weight_decay=0.0)
    reference = REFERENCES[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params: Any = jax.tree.map(jnp.asarray, stacked(rng))
        optimizer = make_optimizer(config, lambda count: 0.02, params=params, stacks=STACKS)
        trained = train_beside(optimizer, reference, params, lambda: stacked(rng), 5)
        pairs = [(trained.params, trained.theirs)]
        if name == "schedule_free":
            evaluated = optax.contrib.schedule_free_eval_params(trained.their_state, trained.theirs)
            pairs.append((find_average(trained.state), evaluated))
        for ours, wanted in pairs:
            for tensor_name, tensor in tensors(ours).items():
                # float64; schedule-free learning computes (y - x) × 10.
                np.testing.assert_allclose(tensor, wanted[tensor_name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_pytorchs(momentum):
    rng = np.random.default_rng(0)
    start = {"kernel": rng.normal(size=(5, 3)), "bias": rng.normal(size=3)}
    with jax.enable_x64(True):
        config = dataclasses.replace(BASE, name="sgd", momentum=momentum)
        optimizer = make_optimizer(config, lambda count: 0.5, params=start)
        params: Any = jax.tree.map(jnp.asarray, start)
        state = optimizer.init(params)
        theirs = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}
        groups = [
            {"params": [theirs["kernel"]], "weight_decay": 0.1},
            {"params": [theirs["bias"]], "weight_decay": 0.0},
        ]
        reference = torch.optim.SGD(groups, lr=0.5, momentum=momentum)
        for _ in range(5):
            grads = {k: rng.normal(size=v.shape) for k, v in start.items()}
            updates, state = optimizer.update(jax.tree.map(jnp.asarray, grads), state, params)
            params = optax.apply_updates(params, updates)
            for name, parameter in theirs.items():
                parameter.grad = torch.tensor(grads[name])
            reference.step()
        for name, parameter in theirs.items():
            np.testing.assert_allclose(params[name], parameter.detach().numpy(), rtol=1e-12)
    assert (momentum > 0) == bool(jax.tree.leaves(optax.tree.get(state, "trace", ())))


def test_optimizer_of_an_import_path_gets_the_config_and_the_schedule():
    grads = {"kernel": jnp.full((2, 2), 100.0)}
    config = dataclasses.replace(BASE, name=f"{__name__}:plain_descent")
    optimizer = make_optimizer(config, lambda count: 0.5, params=grads)
    updates: Any = optimizer.update(grads, optimizer.init(grads), grads)[0]
    # `clip_norm` is 1, but clipping is not part of the optimizer.
    np.testing.assert_allclose(updates["kernel"], -50.0)


def plain_descent(config: OptimizerConfig, schedule: optax.Schedule):
    assert config.weight_decay == BASE.weight_decay
    return optax.sgd(schedule)


@pytest.mark.parametrize(
    "name, message",
    [
        ("adamv", "is neither one of adamw, muon, .*, sgd nor an import path"),
        ("json", "is neither one of adamw, muon, .*, sgd nor an import path"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("optax:no_such", "optax has no 'no_such'"),
        (f"{__name__}:BASE", "is of type OptimizerConfig, but must be a function"),
        ("optax:lion", "is a function of hyperparameters, but must be one of the config and"),
        ("optax.contrib:muon", "is a function of hyperparameters"),
    ],
)
def test_unknown_optimizer_is_rejected(name, message):
    config = dataclasses.replace(BASE, name=name)
    with pytest.raises(ValueError, match=rf"optimizer\.name='{name}':? {message}"):
        make_optimizer(config, lambda count: 1.0, params={})


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("schedule", "cosinus", "choose cosine, linear, constant, .* or an import path"),
        ("learning_rate", -1.0, "must be at least 0"),
        ("warmup_steps", -1, "must be at least 0"),
        ("weight_decay", -0.1, "must be at least 0"),
        ("clip_norm", -1.0, "must be at least 0"),
        ("epsilon", 0.0, "must be more than 0"),
        ("beta1", 1.0, "must be at least 0 and less than 1"),
        ("beta2", -0.1, "must be at least 0 and less than 1"),
        ("final_learning_rate_fraction", 1.5, "must be from 0 to 1"),
        ("momentum", 1.0, "must be at least 0 and less than 1"),
        ("layer_decay", 0.0, "must be more than 0 and at most 1"),
        ("layer_decay", 1.5, "must be more than 0 and at most 1"),
    ],
)
def test_field_out_of_range_is_refused_with_its_value_and_rule(field, value, rule):
    with pytest.raises(ValueError, match=rf"optimizer\.{field}={value!r}.*{rule}"):
        dataclasses.replace(BASE, **{field: value})
