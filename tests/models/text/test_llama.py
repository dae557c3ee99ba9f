"""Settings of the LLaMA family that do not fit together are refused."""

import pytest

from models.text.llama import LlamaConfig

SIZES = {
    "vocab_size": 64,
    "max_positions": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "embed_dim": 24,
    "mlp_dim": 48,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norms": "behind"}, "model.norms='behind' is unknown; choose before, after, around"),
        ({"norm": "batch"}, "model.norm='batch' is unknown; choose rms, rms_1p, layer"),
        ({"rotary_pairs": "all"}, "model.rotary_pairs='all' is unknown; choose halves, neighbours"),
        ({"rotary_fraction": 0.0}, "model.rotary_fraction=0.0 must be more than 0 and at most 1"),
        ({"rotary_fraction": 0.5}, "model.rotary_fraction=0.5 of model.head_dim=6 is 3 features"),
        ({"qk_norm_over_heads": True}, "model.qk_norm_over_heads=True needs model.qk_norm=True"),
        ({"qk_norm_by_head": True}, "model.qk_norm_by_head=True needs model.qk_norm=True"),
        (
            {"qk_norm": True, "qk_norm_over_heads": True, "qk_norm_by_head": True},
            "model.qk_norm_over_heads=True and model.qk_norm_by_head=True exclude each other",
        ),
        ({"activation": "sine"}, "model.activation='sine' is unknown; choose relu, relu2"),
        ({"layer_types": ("chunked",)}, "model.layer_types: 'chunked' is unknown; choose full"),
        ({"layer_types": ("full",) * 3}, "model.layer_types has 3 entries, for model.num_layers=2"),
        ({"layer_types": ("window", "full")}, "model.sliding_window=None must be set if, and only"),
        ({"layer_types": ("full",), "sliding_window": 4}, "model.sliding_window=4 must be set if"),
        ({"attention_softcap": 0.0}, "model.attention_softcap=0.0 must be positive, or None"),
        ({"num_kv_heads": 3}, "model.num_kv_heads=3 must divide model.num_heads=4"),
        ({"expert_bias": True}, "model.expert_bias=True needs experts; set model.num_experts"),
        ({"num_experts": 4, "gate_limit": 0.0}, "model.gate_limit=0.0 must be positive, and needs"),
        (
            {"num_experts": 4, "gate_limit": 7.0, "is_gated": False},
            "model.gate_limit=7.0 must be positive, and needs model.is_gated=True",
        ),
        (
            {"num_experts": 8, "router_groups": 4, "router_group_scores": 3},
            "model.router_group_scores=3 must be from 1 to the 2 experts of a group",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError) as caught:
        LlamaConfig(**SIZES | changes)
    assert str(caught.value).startswith(message)
