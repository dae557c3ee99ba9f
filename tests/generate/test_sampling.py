"""Tokens are drawn from the same distributions as in transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as hf

from generate.sampling import RowSampling, Sampling, adjust_logits, choose, choose_each

LOGITS = np.random.default_rng(0).normal(scale=3, size=(5, 50)).astype(np.float32)


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (Sampling(temperature=0.7), [hf.TemperatureLogitsWarper(0.7)]),
        (Sampling(top_k=7), [hf.TopKLogitsWarper(7)]),
        (Sampling(top_p=0.8), [hf.TopPLogitsWarper(0.8)]),
        (Sampling(top_p=1e-6), [hf.TopPLogitsWarper(1e-6)]),
        (Sampling(min_p=0.1), [hf.MinPLogitsWarper(0.1)]),
        (
            Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.05),
            [
                hf.TemperatureLogitsWarper(2.0),
                hf.TopKLogitsWarper(20),
                hf.TopPLogitsWarper(0.9),
                hf.MinPLogitsWarper(0.05),
            ],
        ),
    ],
    ids=["temperature", "top_k", "top_p", "tiny top_p", "min_p", "all"],
)
def test_logits_are_adjusted_as_in_transformers(sampling, warpers):
    expected = torch.from_numpy(LOGITS)
    for warper in warpers:
        expected = warper(torch.zeros((5, 1), dtype=torch.long), expected)
    found = np.asarray(adjust_logits(sampling, jnp.asarray(LOGITS), None))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_limits_are_those_of_a_sorted_vocabulary(dtype):
    """With equal logits, zeros of both signs, and infinities."""
    rng = np.random.default_rng(1)
    logits = np.concatenate([rng.normal(size=20), np.repeat(rng.normal(size=4), 5)])
    logits = np.append(logits, [0.0, -0.0, -0.0, -np.inf, -np.inf])
    logits_BV = rng.permuted(np.tile(logits, (4, 1)), axis=1).astype(dtype)
    falling_BV = np.sort(logits_BV)[:, ::-1]
    for k in (1, 2, 8, 21, 43, len(logits), 1000):
        least_B1 = falling_BV[:, [min(k, len(logits)) - 1]]
        expected = np.where(logits_BV < least_B1, -np.inf, logits_BV)
        with jax.enable_x64(dtype == "float64"):
            found = adjust_logits(Sampling(top_k=k), jnp.asarray(logits_BV), None)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)
    shares = np.exp(logits_BV) / np.exp(logits_BV).sum(axis=1, keepdims=True)
    for p in (0.05, 0.31, 0.77, 0.98):
        with jax.enable_x64(dtype == "float64"):
            kept = np.isfinite(adjust_logits(Sampling(top_p=p), jnp.asarray(logits_BV), None))
        for row, is_kept in enumerate(kept):
            least = logits_BV[row][is_kept].min()
            np.testing.assert_array_equal(is_kept, logits_BV[row] >= least)
            assert shares[row][logits_BV[row] > least].sum() < p <= shares[row][is_kept].sum()


def test_the_vocabulary_is_not_sorted():
    """That took longer than the layers of a small model."""
    rows_B = jnp.arange(5, dtype=jnp.int32)
    sampling = Sampling(top_k=7, top_p=0.8, min_p=0.01)
    each = RowSampling.of([(sampling, 0)] * 5)
    for traced in (
        jax.make_jaxpr(lambda x: choose(sampling, x, None, rows_B, rows_B))(LOGITS),
        jax.make_jaxpr(lambda x: choose_each(each, x, rows_B))(LOGITS),
    ):
        assert "scan" in str(traced)  # over the bits of a threshold
        assert "sort" not in str(traced) and "top_k" not in str(traced)


@pytest.mark.thorough
def test_tokens_are_drawn_with_their_probabilities():
    count = 20_000
    sampling = Sampling(temperature=0.8, top_k=4, seed=5)
    logits = jnp.asarray(LOGITS[:1])
    wanted = np.asarray(jax.nn.softmax(adjust_logits(sampling, logits, None)))[0]
    rows = jnp.arange(count, dtype=jnp.int32)
    drawn = choose(sampling, jnp.tile(logits, (count, 1)), None, rows, jnp.zeros_like(rows))
    shares = np.bincount(np.asarray(drawn), minlength=50) / count
    assert np.abs(shares - wanted).max() < 4 * np.sqrt(0.25 / count)
    assert set(np.flatnonzero(shares)) == set(np.flatnonzero(wanted))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be 0, or from 1e-05 to 100,000"),
        ({"temperature": 10**400}, "temperature=an integer of 400 digits must be 0, or from"),
        ({"temperature": 1e-300}, "temperature=1e-300 must be 0, or from 1e-05"),
        ({"temperature": float("nan")}, "temperature=nan must be 0, or from"),
        ({"repetition_penalty": 10**400}, "repetition_penalty=an integer of 400 digits must be"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"min_p": 2.0}, r"min_p=2.0 must be in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be from 1e-05"),
        ({"seed": -1}, r"seed=-1 must be in \[0, 2\*\*32\)"),
    ],
)
def test_settings_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)


def test_a_vocabulary_may_not_be_banned_as_a_whole():
    with pytest.raises(ValueError, match="banned contains every token"):
        Sampling(banned=(0, 1)).check_vocab(2)


@pytest.mark.thorough
def test_rows_with_their_own_settings_have_the_tokens_of_equal_settings():
    settings = (
        Sampling(temperature=0),
        Sampling(temperature=0.7, seed=1),
        Sampling(top_k=7, seed=2),
        Sampling(top_p=0.8, seed=3),
        Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.05, seed=4),
    )
    positions_B = jnp.arange(5, dtype=jnp.int32)
    rows_B = positions_B + 3
    each = RowSampling.of([*zip(settings, rows_B.tolist(), strict=True)])
    found = choose_each(each, jnp.asarray(LOGITS), positions_B)
    for row, sampling in enumerate(settings):
        own = choose(sampling, jnp.asarray(LOGITS), None, rows_B, positions_B)
        assert found[row] == own[row]
