"""Training a mixture of experts on a mesh equals training it on one device.

Combinations are drawn from: kinds of routing × meshes.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.batches import train_batches
from models.metrics import Extremes
from tests.runs import FLOAT64, ROOT, make_run
from tests.train.meshes.models_on_meshes import SHARED, overrides_of_data
from train.step.means import means_of

pytestmark = pytest.mark.drawn(1, among="thorough")

#: Losses, loads, and parameters after Adam's division, in float64.
TOLERANCE = 1e-9
NUM_STEPS = 3

_SIZES = ("model.head_dim=8", "model.mlp_dim=48", "model.num_experts=8")
#: Config -> overrides of its model.
MODELS = {
    "llama": (
        *_SIZES,
        "model.num_kv_heads=2",
        # Large enough that the experts of a token differ, and that the router learns.
        "model.init_stddev=0.2",
    ),
    "t5": (
        *_SIZES,
        "model.num_layers=4",  # two periods of a layer with an MLP and one with experts
        "model.num_decoder_layers=3",
        "data.target_length=8",
        "model.dropout=0.2",
    ),
}
ROUTINGS = {
    "Mixtral": ("model.router_loss=0.1", "model.router_z_loss=0.01"),
    "Switch": ("model.experts_per_token=1", "model.router_normalizes=false"),
    "DeepSeek-V3": (
        "model.experts_per_token=3",
        "model.expert_dim=16",
        "model.shared_expert_dim=24",
        "model.dense_layers=1",
        "model.router_scores=sigmoid",
        "model.router_scale=2.5",
        "model.router_groups=4",
        "model.router_groups_per_token=2",
        "model.router_group_scores=2",
        "model.balancing_bias=true",
        "model.balancing_rate=0.05",
        "model.router_loss=0.01",
    ),
    "one expert": ("model.experts_per_token=1", "model.balancing_bias=true"),
    "Qwen2-MoE": ("model.shared_expert_dim=16", "model.shared_expert_gate=true"),
    "GPT-OSS": (
        "model.activation=quick_gelu",
        "model.gate_limit=0.7",
        "model.expert_bias=true",
        "model.router_bias=true",
        "model.attention_sinks=true",
        "model.qkv_bias=true",
        "model.out_bias=true",
    ),
    "capacity": ("model.expert_capacity=1.0", "model.router_loss=0.1"),
    "loss over the batch": (
        "model.router_loss=0.1",
        "model.router_loss_over=batch",
        "train.num_microbatches=1",
    ),
    "documents apart": ("data.isolate_documents=true", "model.router_loss=0.1"),
    "adapters": (
        "lora.rank=4",
        "optimizer.learning_rate=0.03",
        "model.router_loss=0.1",
        "model.shared_expert_dim=16",
        "model.expert_bias=true",
    ),
    "Switch Transformer": (
        "model.experts_per_token=1",
        "model.router_normalizes=false",
        "model.expert_capacity_tokens=4",
        "model.router_loss=0.1",
        "model.router_z_loss=0.01",
    ),
    "tokens ahead": (
        "model.mtp_depths=2",
        "model.router_loss=0.1",
        "model.balancing_bias=true",
        "model.balancing_rate=0.05",
        "data.isolate_documents=true",
    ),
    "windows": ("model.layer_types=('window','full')", "model.sliding_window=5"),
}
EXPERTS = "mesh.expert=2"
MESHES = {
    "data=2": ("mesh.data=2",),
    "expert=2": (EXPERTS,),
    "expert=4": ("mesh.expert=4",),
    "expert=2, pipeline=2, data=2": (EXPERTS, "mesh.pipeline=2", "mesh.data=2"),
    "expert=2, pipeline=2, vocab shared": (
        EXPERTS,
        "mesh.pipeline=2",
        "pipeline.share_vocab=true",
    ),
    "expert=2, model=2": (EXPERTS, "mesh.model=2"),
    "expert=2, model=2, whole tokens": (EXPERTS, "mesh.model=2", "rules.act_tokens=None"),
    "pipeline=2, model=2": (EXPERTS, "mesh.pipeline=2", "mesh.model=2"),
    "expert=2, context=2": (EXPERTS, "mesh.context=2"),
    "experts over expert × context": (
        EXPERTS,
        "mesh.context=2",
        "rules.experts=('expert','context')",
    ),
    "experts over data": ("mesh.data=2", "rules.experts=data"),
    "ZeRO 1": (EXPERTS, "mesh.data=2", "memory.zero_stage=1"),
    "ZeRO 2": (EXPERTS, "mesh.data=2", "memory.zero_stage=2"),
    "ZeRO 3": (EXPERTS, "mesh.data=2", "memory.zero_stage=3"),
    "fsdp=2": (EXPERTS, "mesh.fsdp=2"),
    "expert=2, 2D": (EXPERTS, "mesh.model=4", "tensor.mode=2d"),
    "3D, ZeRO 3": ("mesh.model=8", "tensor.mode=3d", "memory.zero_stage=3"),
    "host": (EXPERTS, "memory.zero_stage=3", "memory.placement=host"),
    "zero_bubble": (
        EXPERTS,
        "mesh.pipeline=2",
        "pipeline.schedule=zero_bubble",
        "train.remat=none",
    ),
}
CASES = [
    (routing, mesh)
    for routing, mesh in itertools.product(ROUTINGS, MESHES)
    if not (routing == "loss over the batch" and "zero_bubble" in mesh)
    and not (routing == "tokens ahead" and "vocab" in mesh)
]


def force_one_expert(path, param):
    """Make the router choose expert 5 first, by its bias, for all tokens."""
    name = jax.tree_util.keystr(path)
    return param.at[..., 5].set(1e3) if "balance" in name else param


def config_of(routing):
    return "t5" if routing == "Switch Transformer" else "llama"


def trained(overrides, change=None, num_steps=NUM_STEPS, config="llama"):
    """Return (metrics of some steps, parameters after them), in float64.

    `change(path, parameter)` returns a parameter before the first step.
    """
    with jax.enable_x64(True):
        where = overrides_of_data(config, overrides)
        run, corpus = make_run(
            (*SHARED, *where, *MODELS[config], *FLOAT64, *overrides),
            str(ROOT / f"configs/{config}.py"),
        )
        state = run.state_layout.initial()
        if change is not None:
            params = jax.tree_util.tree_map_with_path(change, state.params)
            state = dataclasses.replace(state, params=params)
        steps = []
        batches = train_batches(corpus, run.config.data, run.rows, seed=0)
        for _ in range(num_steps):
            state, metrics = run.compile_train_step()(state, run.place_batch(next(batches)))
            steps.append(jax.device_get(metrics))
        params = run.state_layout.to_portable(state).params
        named = jax.tree_util.tree_leaves_with_path(params)
        return steps, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}


@functools.cache
def trained_on_one_device(routing, change=None):
    return trained(ROUTINGS[routing], change, config=config_of(routing))


def check(routing, mesh, change=None):
    expected_steps, expected = trained_on_one_device(routing, change)
    steps, params = trained((*ROUTINGS[routing], *MESHES[mesh]), change, config=config_of(routing))
    for actual_step, expected_step in zip(steps, expected_steps, strict=True):
        for name, value in expected_step.items():
            np.testing.assert_allclose(
                actual_step[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
            )
    for name, values in expected.items():
        np.testing.assert_allclose(
            params[name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize(("routing", "mesh"), CASES)
def test_training_equals_one_device(routing, mesh):
    check(routing, mesh)


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "mesh", ["expert=2", "expert=2, model=2", "expert=2, pipeline=2, data=2", "ZeRO 3"]
)
def test_training_adapters_of_experts_equals_one_device(mesh):
    check("adapters", mesh)
    steps, params = trained_on_one_device("adapters")
    assert np.abs(params["['decoder']['layers']['mlp']['down_lora']['b']"]).min() > 0
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.thorough
def test_metrics_of_the_router_are_those_of_its_choices():
    (first, *_), params = trained(ROUTINGS["Mixtral"])
    assert first["loss"] == pytest.approx(first["lm_loss"] + first["router_loss"], rel=1e-12)
    assert first["dropped_tokens"] == 0
    assert 0 <= first["expert_load_min"] < 1 < first["expert_load_max"] <= 8 / 2
    assert 0 < first["router_entropy"] < np.log(8)
    assert any("router" in name for name in params)


@pytest.mark.thorough
def test_best_metric_can_be_what_evaluations_report():
    often = ("checkpoint.every_steps=1", "eval.every_steps=1", "data.validation_fraction=0.2")
    keys = ("checkpoint.keep_best=1", "checkpoint.best_metric=eval_expert_load", *often)
    overrides = (*SHARED, *overrides_of_data("llama", ()), *MODELS["llama"], *keys)
    run, _ = make_run(overrides, str(ROOT / "configs/llama.py"))
    with pytest.raises(ValueError, match="eval_expert_load_max, eval_expert_load_min, eval_loss"):
        run.check_metrics(ranks_checkpoints=True)
    sums = {"loss": 6.0, "weight": 2.0, "load": (Extremes(jnp.array([[4.0, 1.0]])), 2.0)}
    means = means_of(sums, lambda value, weight: value / weight)
    assert means == {"loss": 3, "load_min": 0.5, "load_max": 2}


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("mesh", ["expert=4", "expert=2, pipeline=2, data=2"])
def test_router_that_sends_all_tokens_to_one_expert_drops_none(mesh):
    routing = "one expert"
    check(routing, mesh, force_one_expert)
    steps, _ = trained_on_one_device(routing, force_one_expert)
    assert all(step["dropped_tokens"] == 0 for step in steps)
    assert all(step["expert_load_max"] == 8 for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("change", [None, force_one_expert], ids=["own choice", "one expert"])
@pytest.mark.parametrize(
    "mesh", ["expert=4", "expert=2, model=2", "expert=2, pipeline=2, data=2", "ZeRO 3"]
)
def test_no_token_is_dropped_in_200_steps(mesh, change):
    steps, _ = trained((*ROUTINGS["one expert"], *MESHES[mesh]), change, num_steps=200)
    assert all(step["dropped_tokens"] == 0 for step in steps)
    assert all(np.isfinite(step["loss"]) for step in steps)
    assert all(step["expert_load_max"] == 8 for step in steps) == (change is not None)
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.thorough
def test_capacity_drops_tokens_and_balancing_moves_the_bias():
    (first, *_), _ = trained(ROUTINGS["capacity"])
    assert 0 < first["dropped_tokens"] < 1
    _, params = trained(ROUTINGS["DeepSeek-V3"])
    (bias,) = (values for name, values in params.items() if "balance" in name)
    steps = bias / 0.05
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-6)
    assert 1 <= np.abs(np.round(steps)).max() <= NUM_STEPS
