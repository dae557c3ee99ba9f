"""Layer-wise learning-rate decay: every parameter's factor, for any slot and placement."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.runs import ROOT, TINY, make_run
from train.optim.layer_decay import Depths, scaled_by_depth

T5 = (
    "model.num_layers=2",
    "model.num_decoder_layers=3",
    "model.head_dim=6",
    "model.mlp_dim=48",
    *(override for override in TINY if "num_layers" not in override),
)

LLAMA = (
    "model.num_layers=5",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.mlp_dim=48",
)


def depths(corpus_overrides, config: str, overrides=TINY) -> Depths:
    file = str(ROOT / "configs" / f"{config}.py")
    run, _ = make_run((*overrides, *corpus_overrides), file)
    return run.traces.depths


def names(found: Depths, depth: int) -> set[str]:
    non_stack_params = found.non_stack_params.items()
    return {
        ".".join(key.key for key in path) for path, number in non_stack_params if number == depth
    }


def test_embedding_parameters_are_those_read_by_embed(corpus_overrides):
    of_gpt2 = depths(corpus_overrides, "gpt2")
    assert names(of_gpt2, -1) == {"token_embedding", "position_embedding"}
    assert (of_gpt2.first_layers, of_gpt2.num_layers) == ({"decoder": 0}, 4)
    of_t5 = depths(corpus_overrides, "t5", T5)
    # T5's attention biases are computed by `embed` and travel with x, so they count as embedding.
    assert names(of_t5, -1) == {"token_embedding", "encoder_bias", "decoder_bias"}
    assert (of_t5.first_layers, of_t5.num_layers) == ({"encoder": 0, "decoder": 2}, 5)


@pytest.mark.thorough
def test_parameters_before_a_stack_have_the_depth_of_its_first_layer(corpus_overrides):
    sizes = ("model.depths=(2,4,2)", "model.num_heads=(2,2,2)", "data.global_batch_size=16")
    found = depths(corpus_overrides[1:], "swin", sizes)
    merging = {"norm.scale", "norm.bias", "reduction.kernel"}
    assert names(found, 1) == {f"merging1.{name}" for name in merging}
    assert names(found, 3) == {f"merging2.{name}" for name in merging}
    assert names(found, -1) == {
        "patch_embedding.linear.kernel",
        "patch_embedding.linear.bias",
        "embedding_norm.scale",
        "embedding_norm.bias",
    }
    assert set(found.non_stack_params.values()) == {-1, 1, 3} and found.num_layers == 4


def test_update_is_scaled_by_the_power_of_its_layer():
    """As in `param_groups_lrd`: with 5 layers, factors 0.5^(5 + 1 - i); the embedding has i = 0."""
    found = Depths(
        first_layers={"encoder": 0, "decoder": 2},
        layers_per_block={"encoder": 1, "decoder": 1},
        num_layers=5,
        non_stack_params={
            (jax.tree_util.DictKey(name),): layer for name, layer in (("table", -1), ("in", 2))
        },
    )
    slots = {"encoder": np.array([0, -1, 1]), "decoder": np.array([2, 1, 0])}
    ones = {name: jnp.ones((3, 2)) for name in slots} | {
        name: jnp.ones(4) for name in ("table", "in", "out")
    }
    row_ids = slots | {name: np.arange(4) for name in ("table", "in", "out")}
    optimizer = scaled_by_depth(optax.sgd(1.0), 0.5, found)
    state = optimizer.init(ones)
    updates: Any
    updates, _ = jax.jit(optimizer.update)(ones, state, ones, row_ids=row_ids)
    assert -updates["table"][0] == 0.5**6 and updates["out"][0] == -1
    assert -updates["in"][0] == -updates["decoder"][2, 0]
    np.testing.assert_array_equal(-updates["encoder"][[0, 2], 0], [0.5**5, 0.5**4])
    np.testing.assert_array_equal(-updates["decoder"][:, 0], [0.5**1, 0.5**2, 0.5**3])
    # One slot at a time, like updates of state in host memory.
    alone = {"decoder": ones["decoder"][1:2]}
    row_ids = {"decoder": row_ids["decoder"][1:2]}
    updates, _ = optimizer.update(alone, state, alone, row_ids=row_ids)
    assert updates["decoder"].tolist() == [[-(0.5**2)] * 2]


@pytest.mark.thorough
def test_layers_of_a_period_have_factors_of_their_own(corpus_overrides):
    """LLaMA of 5 layers: two periods of two layers, and one layer of a second stack."""
    pattern = ("model.layer_types=('window', 'full')", "model.sliding_window=4")
    without = ("num_layers", "model.dropout")
    sizes = (*(o for o in TINY if not any(name in o for name in without)), *LLAMA, *pattern)
    found = depths(corpus_overrides, "llama", sizes)
    assert found.first_layers == {"decoder": 0, "last_decoder": 4} and found.num_layers == 5
    ones = {
        "decoder": {"block_0": {"scale": jnp.ones((2, 3))}, "block_1": {"scale": jnp.ones((2, 3))}},
        "last_decoder": {"scale": jnp.ones((1, 3))},
    }
    row_ids = jax.tree.map(lambda x: np.arange(len(x)), ones)
    optimizer = scaled_by_depth(optax.sgd(1.0), 0.5, found)
    updates: Any = optimizer.update(ones, optimizer.init(ones), ones, row_ids=row_ids)[0]
    factors = jax.tree.map(lambda x: [*map(float, -x[:, 0])], updates)
    assert factors == {
        "decoder": {"block_0": {"scale": [2**-5, 2**-3]}, "block_1": {"scale": [2**-4, 2**-2]}},
        "last_decoder": {"scale": [2**-1]},
    }
