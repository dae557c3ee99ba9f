"""Scaling rules: learning rates that transfer between widths and depths."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from convert.to_hf import describe
from models.scaling import param_scales
from models.stack import run_stacks
from models.text.gpt2 import GPT2, GPT2Config
from models.text.llama import Llama, LlamaConfig
from tests.runs import TINY
from tests.train.refusals import refusal
from train.optim.config import OptimizerConfig
from train.optim.optimizer import make_optimizer

VOCAB = 128
LENGTH = 32
STACKS = ("decoder",)
HEAD = 16


def gpt2(width: int, depth: int = 2, **fields: Any) -> GPT2:
    """Return a GPT-2 whose heads have 16 features."""
    config = GPT2Config(
        vocab_size=VOCAB,
        max_positions=LENGTH,
        num_layers=depth,
        num_heads=width // HEAD,
        embed_dim=width,
        **fields,
    )
    return GPT2(config, rngs=nnx.Rngs(0))


def llama(width: int, depth: int = 2, **fields: Any) -> Llama:
    """Return a LLaMA whose heads have 16 features."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_positions=LENGTH,
        num_layers=depth,
        num_heads=width // HEAD,
        num_kv_heads=width // HEAD,
        head_dim=HEAD,
        embed_dim=width,
        mlp_dim=2 * width,
        **fields,
    )
    return Llama(config, rngs=nnx.Rngs(0))


MODELS = {"gpt2": gpt2, "llama": llama}
MUP = {"scaling": "mup", "base_embed_dim": 32}
COMPLETEP = {"scaling": "completep", "base_embed_dim": 32, "base_num_layers": 2}


def params_of(model: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.split(model)[1])


@functools.cache
def text() -> np.ndarray:
    """Return real text as ASCII codes."""
    sources = sorted(Path(json.__file__).parents[1].glob("*.py"))[:60]
    joined = "".join(source.read_text(encoding="utf-8") for source in sources)
    return np.frombuffer(joined.encode("ascii", "ignore"), np.uint8)


def batches(num_steps: int, size: int) -> np.ndarray:
    """Return int32[steps, B, T + 1] of random parts of the text."""
    starts = np.random.default_rng(0).integers(0, len(text()) - LENGTH - 1, (num_steps, size, 1))
    return text()[starts + np.arange(LENGTH + 1)].astype(np.int32)


def trained(model: Any, rates: jax.Array, num_steps: int, size: int) -> tuple[Any, jax.Array]:
    """Train copies of a model with AdamW at several rates.

    Returns:
        The parameters, with a leading dim of rates, and losses float32[rates, steps].
    """
    graph, _ = nnx.split(model)
    params = params_of(model)
    scales = param_scales(model.config, params, STACKS)

    def loss_of(params, tokens):
        model = nnx.merge(graph, params)
        weights = jnp.ones(tokens[:, 1:].shape)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        loss, weight, _ = model.head(run_stacks(model, model.embed(batch), batch), batch)
        return loss / weight

    def train(rate):
        def schedule(count):
            warmup = jnp.minimum((count + 1) / (num_steps / 4), 1.0)
            return rate * warmup * (1 - count / num_steps)

        optimizer = make_optimizer(
            adamw(weight_decay=0.0), schedule, params=params, stacks=STACKS, scales=scales
        )

        def step(carry, tokens):
            params, state = carry
            loss, grads = jax.value_and_grad(loss_of)(params, tokens)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        start = (params, optimizer.init(params))
        (last, _), losses = jax.lax.scan(step, start, jnp.asarray(batches(num_steps, size)))
        return last, losses

    return jax.jit(lambda rates: jax.lax.map(train, rates))(rates)


def adamw(**values: Any) -> OptimizerConfig:
    defaults = {
        "name": "adamw",
        "learning_rate": 1.0,
        "warmup_steps": 0,
        "schedule": "constant",
        "final_learning_rate_fraction": 1.0,
        "weight_decay": 0.1,
        "clip_norm": 0.0,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
    }
    return OptimizerConfig(**defaults | values)


def stddev_of(params: Any, *path: str) -> float:
    return float(np.std(functools.reduce(lambda tree, name: tree[name], path, params)))


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("depth", [2, 8])
def test_multipliers_follow_the_tables_of_the_papers(name, width, depth):
    for fields in (MUP, COMPLETEP):
        of_width = width / 32
        of_depth = depth / 2 if fields is COMPLETEP else 1.0
        model = MODELS[name](width, depth, **fields)
        params = params_of(model)
        up = stddev_of(params, "decoder", "layers", "mlp", "up", "kernel")
        # A sample of at least 16,384 numbers is within 3 % of its standard deviation.
        assert up == pytest.approx(0.02 / math.sqrt(of_width), rel=0.03)
        down = stddev_of(params, "decoder", "layers", "mlp", "down", "kernel")
        base_depth = 2 if fields is COMPLETEP else depth
        smaller = math.sqrt(2 * base_depth) if name == "gpt2" else 1.0
        assert down == pytest.approx(0.02 / math.sqrt(of_width) / smaller, rel=0.03)
        assert stddev_of(params, "token_embedding") == pytest.approx(0.02, rel=0.03)
        scales = param_scales(model.config, params, STACKS)
        assert scales is not None
        assert len(scales) == len(jax.tree.leaves(params))
        for path, scale in scales.items():
            in_block = path[0] == "decoder"
            assert scale.rate == (1 / of_width if path[-1] == "kernel" else 1)
            assert scale.epsilon == pytest.approx(1 / of_width / (of_depth if in_block else 1))


def logits_of(model: Any) -> np.ndarray:
    return np.asarray(model(jnp.asarray(batches(1, 2)[0, :, :-1])))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_model_of_the_base_sizes_is_the_unscaled_model(name):
    plain = MODELS[name](32)
    for fields in (MUP, COMPLETEP):
        model = MODELS[name](32, **fields)
        np.testing.assert_array_equal(logits_of(model), logits_of(plain))
        scales = param_scales(model.config, params_of(model), STACKS)
        assert scales is not None
        assert {(scale.rate, scale.epsilon) for scale in scales.values()} == {(1.0, 1.0)}
    assert param_scales(plain.config, params_of(plain), STACKS) is None


@pytest.mark.thorough
def test_outputs_equal_those_of_explicit_multipliers():
    scaled = llama(64, 4, **COMPLETEP, base_head_dim=4)
    explicit = llama(64, 4, residual_scale=1 / 2, logit_scale=1 / 2, attention_scale=2 / 16)
    nnx.update(explicit, nnx.state(scaled))
    # Products by powers of two are exact, and so is the same order of operations.
    np.testing.assert_array_equal(logits_of(scaled), logits_of(explicit))
    assert not np.allclose(logits_of(scaled), logits_of(llama(64, 4)), rtol=0.1)


@pytest.mark.thorough
def test_model_with_a_rule_is_exported_with_its_factors():
    config = llama(64, 4, **COMPLETEP, base_head_dim=4).config
    assert (
        config.explicit
        == llama(64, 4, residual_scale=1 / 2, logit_scale=1 / 2, attention_scale=2 / 16).config
    )
    architecture, hf = describe("llama", config, None)
    assert architecture.name == "GraniteForCausalLM"
    names = ("attention_multiplier", "residual_multiplier", "logits_scaling")
    assert [hf[name] for name in names] == [2 / 16, 1 / 2, 2]
    with pytest.raises(ValueError, match="GPT2LMHeadModel, cannot have model.scaling='mup'"):
        describe("gpt2", gpt2(64, **MUP).config, None)


def test_scores_of_larger_heads_are_divided_by_their_size():
    """With queries and keys that agree in sign, scores are about d / √d without the rule."""
    config = gpt2(64, **MUP, base_head_dim=4).config
    assert config.scaled_scores(16) == pytest.approx(math.sqrt(4) / 16)
    assert gpt2(64, **MUP).config.scaled_scores(16) == 1 / 4


@pytest.mark.thorough
def test_updates_equal_adamw_with_the_scaled_hyperparameters():
    model = gpt2(64, 4, **COMPLETEP)
    params = params_of(model)
    random = np.random.default_rng(0)
    config = adamw(weight_decay=0.1, epsilon=1e-3)

    def gradients() -> Any:
        return jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32) / 50, params)

    scales = param_scales(model.config, params, STACKS)
    ours = make_optimizer(config, lambda _: 0.01, params=params, stacks=STACKS, scales=scales)
    state = ours.init(params)
    cases = {
        # path: (learning rate, epsilon, weight decay); the width and the depth are doubled
        ("decoder", "layers", "mlp", "up", "kernel"): (0.005, 1e-3 / 4, 0.2),
        ("decoder", "layers", "mlp", "up", "bias"): (0.01, 1e-3 / 4, 0.0),
        ("token_embedding",): (0.01, 1e-3 / 2, 0.1),
    }
    theirs = {
        path: optax.adamw(rate, b1=0.9, b2=0.95, eps=epsilon, weight_decay=decay)
        for path, (rate, epsilon, decay) in cases.items()
    }

    def at(tree: Any, path: tuple[str, ...]) -> Any:
        return functools.reduce(lambda tree, name: tree[name], path, tree)

    states = {path: optimizer.init(at(params, path)) for path, optimizer in theirs.items()}
    for _ in range(3):
        grads = gradients()
        updates, state = ours.update(grads, state, params)
        for path, optimizer in theirs.items():
            gradient: Any = at(grads, path)
            wanted, states[path] = optimizer.update(gradient, states[path], at(params, path))
            update: Any = at(updates, path)
            # Rounding in float32.
            np.testing.assert_allclose(update, np.asarray(wanted), rtol=2e-5, atol=1e-9)


def logits_after_training(name: str, width: int, **fields: Any) -> float:
    """Return the standard deviation of the logits after some steps."""
    model = MODELS[name](width, **fields)
    params, _ = trained(model, jnp.array([0.004]), num_steps=8, size=8)
    nnx.update(model, jax.tree.map(lambda x: x[0], params))
    return float(np.std(logits_of(model)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_grow_with_the_width(name):
    """The check of coordinates of Yang et al., section D.1."""
    small = logits_after_training(name, 32)  # the base model: the same with the rule
    # Initial logits are much smaller, so these are changes. They were 3.3 and 3.8 times as large in
    # GPT-2 and LLaMA without the rule, and 0.97 and 0.92 times with it.
    assert logits_after_training(name, 128) > 2 * small
    assert 0.6 * small < logits_after_training(name, 128, **MUP) < 1.5 * small


@pytest.mark.thorough
def test_best_learning_rate_transfers_to_another_width():
    # Not 1/8: there, the loss of the wide model differs by 0.3 between versions of jax.
    rates = 8.0 ** np.array([-3, -2, 0])

    def best_rate(width: int, **fields: Any) -> float:
        _, losses = trained(gpt2(width, **fields), jnp.asarray(rates), num_steps=100, size=8)
        return rates[np.argmin(np.mean(losses[:, -20:], axis=1))]

    # The best loss is lower than the others by at least 0.08 in all three.
    base = best_rate(16)  # the base model: the same with the rule
    assert best_rate(128, **{**MUP, "base_embed_dim": 16}) == base
    # Without the rule, the best rate is inversely proportional to the width.
    assert best_rate(128) == base / 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("scaling=mup",), "model.scaling='mup' needs model.base_embed_dim"),
        (("scaling=completep", "base_embed_dim=16"), "needs model.base_num_layers"),
        (("base_embed_dim=16",), "model.base_embed_dim=16 is not read with model.scaling='none'"),
        (("scaling=width",), "model.scaling='width' is unknown; choose none, mup, completep"),
    ],
)
def test_rule_without_its_sizes_is_refused(overrides, message, corpus_overrides, tmp_path, capsys):
    fields = (f"model.{override}" for override in overrides)
    assert message in refusal(tmp_path / "run", (*TINY, *corpus_overrides, *fields), capsys)


def test_rule_of_adamw_is_refused_with_other_optimizers(corpus_overrides, tmp_path, capsys):
    with_lion = ("model.scaling=mup", "model.base_embed_dim=16", "optimizer.name=lion")
    error = refusal(tmp_path / "run", (*TINY, *corpus_overrides, *with_lion), capsys)
    assert "model.scaling='mup' scales the learning rates of AdamW" in error


def test_model_without_a_rule_for_its_layers_is_refused():
    with pytest.raises(ValueError, match="has no rule for model.num_experts=4"):
        llama(32, **MUP, num_experts=4)
    with pytest.raises(ValueError, match="both set the scale of scores"):
        llama(32, **MUP, base_head_dim=8, attention_scale=0.1)
