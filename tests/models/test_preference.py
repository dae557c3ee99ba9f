"""The preference loss and its gradient match the formula, written out in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models.losses import VocabLogits
from models.preference import METRICS, PreferenceConfig, answer_log_probs, preference_loss

_VOCAB = 11
_ANSWERS = [[0, 1, 1, 0, 2, 2, 3, 0, 4, 0], [0, 0, 1, 1, 1, 0, 2, 0, 0, 0]]


def inputs():
    rng = np.random.default_rng(0)
    x_BTD = rng.normal(size=(2, 10, 4))
    table_VD = rng.normal(size=(16, 4))  # five rows are padding
    batch = {
        "targets": rng.integers(0, _VOCAB, (2, 10), np.int32),
        "answers": np.array(_ANSWERS, np.int32),
        "weights": np.array([[1, 1], [1, 0]], np.float32),
        "reference_log_probs": rng.normal(size=(2, 2, 2)).astype(np.float32),
    }
    return x_BTD, table_VD, batch


def torch_loss(x_BTD, table_VD, batch, beta, swapped):
    """Return the summed loss of pairs, and their margins, pair by pair."""
    log_probs = torch.log_softmax(x_BTD @ table_VD[:_VOCAB].T, dim=-1)
    targets = torch.tensor(batch["targets"]).long()
    chosen = log_probs.gather(-1, targets[..., None])[..., 0]
    total = torch.zeros((), dtype=torch.float64)
    margins = []
    for row, pair in [(0, 0), (0, 1), (1, 0)]:
        rewards = [
            chosen[row][batch["answers"][row] == 2 * pair + 1 + which].sum()
            - float(batch["reference_log_probs"][row, pair, which])
            for which in (0, 1)
        ]
        margin = beta * (rewards[0] - rewards[1])
        margins.append(margin.item())
        logsigmoid = torch.nn.functional.logsigmoid
        total = total - (1 - swapped) * logsigmoid(margin) - swapped * logsigmoid(-margin)
    return total, margins


@pytest.mark.parametrize(("beta", "swapped"), [(0.1, 0.0), (0.7, 0.2)])
def test_loss_and_gradient_equal_the_formula(beta, swapped):
    with jax.enable_x64(True):
        x_BTD, table_VD, batch = inputs()
        config = PreferenceConfig(beta=beta, label_smoothing=swapped)

        def loss(x_BTD, table_VD):
            logits = VocabLogits(x_BTD, table_VD, vocab_size=_VOCAB)
            total, weight, metrics = preference_loss(logits, batch, config=config)
            return total, (weight, metrics)

        (total, (weight, metrics)), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            jnp.array(x_BTD), jnp.array(table_VD)
        )
        tensors = (
            torch.tensor(x_BTD, requires_grad=True),
            torch.tensor(table_VD, requires_grad=True),
        )
        expected, margins = torch_loss(*tensors, batch, beta, swapped)
        expected.backward()
        assert float(total) == pytest.approx(float(expected.detach()), rel=1e-12)
        assert float(weight) == 3
        for ours, theirs in zip(grads, tensors, strict=True):
            assert theirs.grad is not None
            np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=1e-9, atol=1e-12)
        assert set(metrics) == {*METRICS}
        assert float(metrics["reward_margin"]) == pytest.approx(sum(margins), rel=1e-12)
        assert float(metrics["reward_accuracy"]) == sum(margin > 0 for margin in margins)


def test_log_probs_have_no_gradient_and_are_zero_for_absent_pairs():
    *arrays, batch = inputs()
    x_BTD, table_VD = map(jnp.array, arrays)

    def total(x_BTD):
        return answer_log_probs(VocabLogits(x_BTD, table_VD, vocab_size=_VOCAB), batch).sum()

    assert not np.asarray(jax.grad(total)(x_BTD)).any()
    found = answer_log_probs(VocabLogits(x_BTD, table_VD, vocab_size=_VOCAB), batch)
    assert found.shape == (2, 2, 2)
    assert not np.asarray(found)[1, 1].any() and np.asarray(found)[0].all()
