"""Tiny Hugging Face models of every family and variant."""

import functools
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.convert.hf_files import edit, rename_as_published

hf.utils.logging.disable_progress_bar()

VOCAB = 211


PAD = 1

#: Implementations of transformers that have no rules for sizes.
EAGER: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}


_GPT2 = {"vocab_size": VOCAB, "n_positions": 24, "n_layer": 3, "n_head": 3, "n_embd": 39}


_OPT = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "hidden_size": 39,
    "ffn_dim": 50,
}


_LLAMA = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_size": 36,
    "intermediate_size": 44,
    "rms_norm_eps": 1e-5,
}


_WITHOUT_HEAD_DIM = {name: value for name, value in _LLAMA.items() if name != "head_dim"}


_LAYER_NORMS = {name: value for name, value in _WITHOUT_HEAD_DIM.items() if name != "rms_norm_eps"}


_PARTLY_ROTATED = {
    **_LAYER_NORMS,
    "hidden_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}


_LATENTS = {
    **_WITHOUT_HEAD_DIM,
    "num_key_value_heads": 6,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}


#: Sizes of experts, with the names that most families give them.
_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 22}


_DEEPSEEK = {
    **_LATENTS,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "q_lora_rank": None,
}


#: transformers saves no layers that predict later tokens, but its default of the key counts one.
_WITHOUT_LATER_TOKENS = {"num_nextn_predict_layers": 0}


_BERT = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_size": 39,
    "intermediate_size": 50,
}


_ROBERTA = {**_BERT, "pad_token_id": PAD, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


_DISTILBERT = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "n_layers": 2,
    "n_heads": 3,
    "dim": 39,
    "hidden_dim": 50,
}


_ELECTRA = {**_BERT, "embedding_size": 22}


_MODERNBERT = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "num_hidden_layers": 7,
    "num_attention_heads": 3,
    "hidden_size": 42,
    "intermediate_size": 50,
    "local_attention": 6,
    "pad_token_id": PAD,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}


_LABELS = {"id2label": {i: f"L{i}" for i in range(5)}, "label2id": {f"L{i}": i for i in range(5)}}


_T5 = {
    "vocab_size": VOCAB,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "d_kv": 7,
    "d_model": 38,
    "d_ff": 50,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11,
}


_SWITCH = {
    **{name: value for name, value in _T5.items() if name != "feed_forward_proj"},
    "num_layers": 5,
    "num_decoder_layers": 4,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "num_experts": 3,
    "expert_capacity": 4,  # less than some experts are chosen
}


_VIT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_size": 39,
    "intermediate_size": 50,
    "image_size": 20,
    "patch_size": 4,
}


_MAE = {
    **_VIT,
    "num_attention_heads": 4,
    "hidden_size": 40,
    "decoder_num_attention_heads": 3,
    "decoder_hidden_size": 24,
    "decoder_num_hidden_layers": 3,
    "decoder_intermediate_size": 33,
}


_SWIN = {
    "embed_dim": 12,
    "depths": [2, 4, 2, 2],
    "num_heads": [2, 3, 4, 4],
    "window_size": 3,
    "image_size": 48,
    "patch_size": 2,
}


#: Sizes for which the last patch, the last window and the last pair of patches are incomplete.
_ODD_SWIN = {
    **_SWIN,
    "depths": [2, 4, 2],
    "num_heads": [2, 3, 4],
    "image_size": 29,
    "window_size": 4,
}


def _rope(**scaling: Any) -> dict[str, Any]:
    return {**_LLAMA, "rope_parameters": {"rope_theta": 500.0, **scaling}}


_LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}


_LONG = {
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0],
    "factor": 2.0,
    "original_max_position_embeddings": 12,
}


#: Cases that are a LLaMA with its tensors stored in another way.
WRITTEN_AS_LLAMA = ("phi3",)


#: Name of a case -> (name of the Hugging Face class, fields of its config).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**_GPT2, "n_inner": 50, "activation_function": "gelu"}),
    "gpt2_base": ("GPT2Model", _GPT2),
    "opt": ("OPTForCausalLM", _OPT),
    "opt_350m": (
        "OPTForCausalLM",
        {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 22},
    ),
    "opt_base": ("OPTModel", _OPT),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama_biases": (
        "LlamaForCausalLM",
        {**_LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama_base": ("LlamaModel", _LLAMA),
    "llama_llama3": ("LlamaForCausalLM", _rope(rope_type="llama3", **_LLAMA3)),
    "llama_linear": ("LlamaForCausalLM", _rope(rope_type="linear", factor=3.0)),
    "llama_dynamic": (
        "LlamaForCausalLM",
        {**_rope(rope_type="dynamic", factor=3.0), "max_position_embeddings": 8},
    ),
    "llama_yarn": (
        "LlamaForCausalLM",
        _rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=12),
    ),
    "llama_longrope": ("LlamaForCausalLM", _rope(rope_type="longrope", **_LONG)),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 5}),
    "mistral_full": ("MistralForCausalLM", {**_LLAMA, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {**_LLAMA, "head_dim": 6, "tie_word_embeddings": True}),
    "qwen2_windowed": (
        "Qwen2ForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 3,
            "head_dim": 6,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA),
    "olmo2": ("Olmo2ForCausalLM", _WITHOUT_HEAD_DIM),
    "granite": (
        "GraniteForCausalLM",
        {
            **_WITHOUT_HEAD_DIM,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", _LLAMA),
    "nemotron": (
        "NemotronForCausalLM",
        {**_PARTLY_ROTATED, "norm_eps": 1e-5, "mlp_bias": True, "attention_bias": True},
    ),
    "stablelm_parallel": (
        "StableLmForCausalLM",
        {**_PARTLY_ROTATED, "use_parallel_residual": True},
    ),
    "stablelm_qk_norm": (
        "StableLmForCausalLM",
        {**_PARTLY_ROTATED, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "stablelm": ("StableLmForCausalLM", {**_PARTLY_ROTATED, "use_qkv_bias": True}),
    "phi3": ("Phi3ForCausalLM", {**_WITHOUT_HEAD_DIM, "pad_token_id": PAD}),
    "phi3_windowed": (
        "Phi3ForCausalLM",
        {**_PARTLY_ROTATED, "rms_norm_eps": 1e-5, "sliding_window": 5, "pad_token_id": PAD},
    ),
    "phi4_mini": (
        "Phi3ForCausalLM",
        {
            **_PARTLY_ROTATED,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "pad_token_id": PAD,
            "original_max_position_embeddings": 12,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.0, 2.0, 3.0],
            },
        },
    ),
    "glm4": (
        "Glm4ForCausalLM",
        {
            **_LLAMA,
            "head_dim": 12,
            "pad_token_id": PAD,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "cohere_qk_norm": (
        "CohereForCausalLM",
        {**_LAYER_NORMS, "use_qk_norm": True, "pad_token_id": PAD},
    ),
    "cohere": (
        "CohereForCausalLM",
        {**_LAYER_NORMS, "logit_scale": 0.25, "pad_token_id": PAD},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        {**_LAYER_NORMS, "num_hidden_layers": 5, "sliding_window": 4, "pad_token_id": PAD},
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {
            **_WITHOUT_HEAD_DIM,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "pad_token_id": PAD,
        },
    ),
    "ministral": (
        "MinistralForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
        },
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            **_WITHOUT_HEAD_DIM,
            "num_hidden_layers": 5,
            "sliding_window": 4,
            "pad_token_id": PAD,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 2.0,
                    "original_max_position_embeddings": 12,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 5,
            "sliding_window": 4,
            "query_pre_attn_scalar": 7,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "deepseek2": (
        "DeepseekV2ForCausalLM",
        {
            **_LATENTS,
            "q_lora_rank": 9,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
                "original_max_position_embeddings": 12,
            },
        },
    ),
    "deepseek2_lite": ("DeepseekV2ForCausalLM", {**_LATENTS, "q_lora_rank": None}),
    "qwen3_base": ("Qwen3Model", {**_LLAMA, "attention_bias": True}),
    "mixtral": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 7, "sliding_window": 5}),
    "mixtral_base": ("MixtralModel", {**_LLAMA, "num_local_experts": 3}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**_WITHOUT_HEAD_DIM, **_EXPERTS, "shared_expert_intermediate_size": 26},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**_LLAMA, **_EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {**_WITHOUT_HEAD_DIM, "num_experts": 7, "num_experts_per_tok": 3, "eos_token_id": 2},
    ),
    "deepseek2_moe": (
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    ),
    "deepseek2_groups": (
        "DeepseekV2ForCausalLM",
        {
            **_DEEPSEEK,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "deepseek3": (
        "DeepseekV3ForCausalLM",
        {
            **_WITHOUT_LATER_TOKENS,
            **_DEEPSEEK,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 9,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
                "original_max_position_embeddings": 12,
            },
        },
    ),
    "deepseek3_halves": (
        "DeepseekV3ForCausalLM",
        {
            **_WITHOUT_LATER_TOKENS,
            **_DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "swiglu_limit": 0.7,
            "pad_token_id": PAD,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 2.0,
                "truncate": False,
                "original_max_position_embeddings": 12,
            },
        },
    ),
    "gpt_oss_plain": (
        "GptOssForCausalLM",
        {
            **_LLAMA,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            **_WITHOUT_LATER_TOKENS,
            **_LLAMA,
            "head_dim": 12,
            "num_hidden_layers": 3,
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "bert_pretraining": ("BertForPreTraining", _BERT),
    "bert_mlm": ("BertForMaskedLM", {**_BERT, "hidden_act": "gelu_new"}),
    "bert_sequence": ("BertForSequenceClassification", {**_BERT, **_LABELS}),
    "bert_token": ("BertForTokenClassification", {**_BERT, **_LABELS}),
    "bert_base": ("BertModel", _BERT),
    "roberta_mlm": ("RobertaForMaskedLM", _ROBERTA),
    "roberta_sequence": ("RobertaForSequenceClassification", {**_BERT, **_LABELS}),
    "roberta_token": ("RobertaForTokenClassification", {**_BERT, "num_labels": 3}),
    "roberta_base": ("RobertaModel", _BERT),
    "xlm_roberta_mlm": ("XLMRobertaForMaskedLM", _ROBERTA),
    "xlm_roberta_sequence": ("XLMRobertaForSequenceClassification", {**_ROBERTA, **_LABELS}),
    "xlm_roberta_token": ("XLMRobertaForTokenClassification", {**_ROBERTA, **_LABELS}),
    "xlm_roberta_base": ("XLMRobertaModel", _ROBERTA),
    "camembert_mlm": ("CamembertForMaskedLM", _ROBERTA),
    "camembert_sequence": ("CamembertForSequenceClassification", {**_ROBERTA, **_LABELS}),
    "camembert_token": ("CamembertForTokenClassification", {**_ROBERTA, **_LABELS}),
    "camembert_base": ("CamembertModel", _ROBERTA),
    "distilbert_mlm": ("DistilBertForMaskedLM", {**_DISTILBERT, "activation": "relu"}),
    "distilbert_sequence": ("DistilBertForSequenceClassification", {**_DISTILBERT, **_LABELS}),
    "distilbert_token": ("DistilBertForTokenClassification", {**_DISTILBERT, **_LABELS}),
    "distilbert_base": ("DistilBertModel", _DISTILBERT),
    "electra_pretraining": ("ElectraForPreTraining", {**_ELECTRA, "hidden_act": "relu"}),
    "electra_mlm": ("ElectraForMaskedLM", _ELECTRA),
    "electra_sequence": ("ElectraForSequenceClassification", {**_ELECTRA, **_LABELS}),
    "electra_token": (
        "ElectraForTokenClassification",
        {**_ELECTRA, **_LABELS, "hidden_act": "relu", "embedding_size": 39},
    ),
    "electra_base": ("ElectraModel", _ELECTRA),
    "modernbert_mlm": ("ModernBertForMaskedLM", _MODERNBERT),
    "modernbert_mlm_biases": (
        "ModernBertForMaskedLM",
        {
            **_MODERNBERT,
            "num_hidden_layers": 5,
            "local_attention": 7,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "hidden_activation": "silu",
            "classifier_activation": "relu",
        },
    ),
    "modernbert_sequence": ("ModernBertForSequenceClassification", {**_MODERNBERT, **_LABELS}),
    "modernbert_mean_sequence": (
        "ModernBertForSequenceClassification",
        {
            **_MODERNBERT,
            **_LABELS,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention"] * 3,
            "classifier_pooling": "mean",
        },
    ),
    "modernbert_token": (
        "ModernBertForTokenClassification",
        {**_MODERNBERT, **_LABELS, "num_hidden_layers": 1},
    ),
    "modernbert_base": ("ModernBertModel", {**_MODERNBERT, "num_hidden_layers": 8}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5_v1.1": (
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5_switch": ("SwitchTransformersForConditionalGeneration", _SWITCH),
    "t5_switch_biases": (
        "SwitchTransformersForConditionalGeneration",
        {
            **_SWITCH,
            "num_layers": 3,
            "num_sparse_encoder_layers": 1,
            "router_bias": True,
        },
    ),
    "mt5": (
        "MT5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}


CASES |= {
    "vit": ("ViTForImageClassification", {**_VIT, **_LABELS}),
    "vit_odd": (
        "ViTForImageClassification",
        {**_VIT, "image_size": 23, "num_channels": 1, "qkv_bias": False, "hidden_act": "gelu_new"},
    ),
    "vit_base": ("ViTModel", _VIT),
    "deit": ("DeiTForImageClassification", {**_VIT, **_LABELS}),
    "deit_teacher": (
        "DeiTForImageClassificationWithTeacher",
        {**_VIT, **_LABELS, "image_size": 23, "num_channels": 1, "qkv_bias": False},
    ),
    "deit_base": ("DeiTModel", _VIT),
    "mae": ("ViTMAEForPreTraining", _MAE),
    "mae_odd": (
        "ViTMAEForPreTraining",
        {
            **_MAE,
            "image_size": 21,
            "patch_size": 3,
            "num_channels": 1,
            "qkv_bias": False,
            "mask_ratio": 0.6,
            "norm_pix_loss": True,
        },
    ),
    "mae_base": ("ViTMAEModel", {**_MAE, "mask_ratio": 0.0}),
    "swin": ("SwinForImageClassification", {**_SWIN, **_LABELS}),
    "swin_odd": ("SwinForImageClassification", {**_ODD_SWIN, "mlp_ratio": 2.9}),
    "swin_base": ("SwinModel", {**_SWIN, "qkv_bias": False}),
    "swinv2": ("Swinv2ForImageClassification", {**_SWIN, **_LABELS}),
    "swinv2_odd": (
        "Swinv2ForImageClassification",
        {**_ODD_SWIN, "pretrained_window_sizes": [2, 3, 4]},
    ),
    "swinv2_base": ("Swinv2Model", _SWIN),
}


#: Cases whose sizes can be sharded over 2 devices.
EVEN = {
    "gpt2_even": ("GPT2LMHeadModel", {**_GPT2, "n_head": 4, "n_embd": 40}),
    "bert_sequence_even": (
        "BertForSequenceClassification",
        {**_BERT, "num_attention_heads": 2, "hidden_size": 36},
    ),
    "t5_v1.1_even": (
        "T5ForConditionalGeneration",
        {**_T5, "num_heads": 4, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}


#: Cases whose head has a weight of its own. When transformers loads them, it unties the head with a
#: warning.
UNTIED_T5 = ("t5_v1.1", "mt5", "t5_v1.1_even", "t5_switch_biases")


@functools.cache
def make(name: str) -> Any:
    """Return the Hugging Face model of a case with random weights, including biases and norms."""
    class_name, fields = {**CASES, **EVEN}[name]
    model_class = getattr(hf, class_name)
    config = model_class.config_class(**fields, **EAGER)
    torch.manual_seed(0)
    model = model_class(config).eval()
    if name in UNTIED_T5:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    set_random_weights(model)
    return model


def set_random_weights(model: torch.nn.Module) -> None:
    """Set all weights to random values, including biases and norms, and let them have gradients.

    The biases that balance experts are no parameters in transformers.
    """
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.requires_grad_()  # Fixed weights too, because all gradients are compared.
            is_scale = weight.ndim == 1 and key.endswith("weight")
            torch.nn.init.normal_(weight, mean=1.0 if is_scale else 0.0, std=0.2)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)


def save(name: str, directory: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the model of a case to a directory.

    Args:
        name: case.
        directory: directory to write.
        dtype: dtype of the weights; None for float32.

    Returns:
        The directory.
    """
    model = make(name)
    if dtype is not None:
        model = type(model)(model.config).to(dtype)
        if name in UNTIED_T5:
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
        model.load_state_dict(make(name).state_dict())
        model.config.dtype = dtype
    model.save_pretrained(directory)
    if name.startswith("mae"):
        edit(directory, rename_as_published)
    return directory


def reads_images(name: str) -> bool:
    return name.startswith(("vit", "deit", "mae", "swin"))
