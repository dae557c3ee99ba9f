"""Translate the arguments that Megatron-LM stores in its checkpoints to a config.json.

Two kinds of models can be read:

    GPT-2    learned positions, LayerNorm, GELU, biases, a tied head
    LLaMA    rotary positions, RMSNorm, SwiGLU, no biases; with biases of query, key and value it
             is a Qwen 2, and with norms of query and key a Qwen 3

Arguments that earlier versions of Megatron-LM did not have are absent from their checkpoints, and
have the value that these versions implied.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.tensor_files import Tensor
from convert.trainers.gpt import Name, Sizes, as_gpt2, as_llama
from convert.trainers.weights import Weights
from untrusted.messages import shortened
from untrusted.schema import check_fields

Args = Mapping[str, Any]

#: Arguments that change the computation -> their features. They must be off: None, False or 0.
_OFF = {
    "num_experts": "mixtures of experts",
    "multi_latent_attention": "latent attention",
    "apply_residual_connection_post_layernorm": "residual connections after norms",
    "apply_layernorm_1p": "norms that add 1 to their weight",
    "rotary_interleaved": "rotary positions of neighbouring features",
    "window_size": "sliding windows",
    "window_attn_skip_freq": "sliding windows",
    "no_rope_freq": "layers without positions",
    "qk_l2_norm": "L2 norms of query and key",
    "attention_output_gate": "gated attention",
    "mtp_num_layers": "layers that predict tokens after the next",
    "squared_relu": "squared ReLU",
    "quick_geglu": "quick GEGLU",
    "geglu": "GEGLU",
    "reglu": "ReGLU",
    "liglu": "LiGLU",
    "glu_linear_offset": "an offset of gated MLPs",
    "use_mup": "maximal update parametrization",
    "hybrid_layer_pattern": "hybrid models",
    "hybrid_override_pattern": "hybrid models",
    "is_hybrid_model": "hybrid models",
    "experimental_attention_variant": "other attention",
    "linear_attention_freq": "linear attention",
    "heterogeneous_layers_config_path": "layers of different sizes",
    "heterogeneous_layers_config_encoded_json": "layers of different sizes",
    "rotary_seq_len_interpolation_factor": "interpolated rotary positions",
}
_NUMBERS = {
    "num_layers": int,
    "hidden_size": int,
    "ffn_hidden_size": int,
    "num_attention_heads": int,
    "max_position_embeddings": int,
}
_OPTIONAL = {
    "kv_channels": int | None,
    "num_query_groups": int | None,
    "vocab_size": int | None,
    "tokenizer_type": str | None,
    "rotary_percent": float | None,
    "rotary_base": float | None,
    "rope_scaling_factor": float | None,
    "norm_epsilon": float | None,
    "layernorm_epsilon": float | None,
    "hidden_dropout": float | None,
    "init_method_std": float | None,
    "softmax_type": str | None,
}


def sizes_of(args: Args, num_rows: int, file: Path) -> Sizes:
    """Return the sizes that the layout of tensors depends on.

    Args:
        num_rows: rows of the embedding, which may have padding.
        file: file of the arguments.

    Raises:
        ValueError: An argument is missing, or has a value that it cannot have.
    """
    where = f"{file}: args"
    check_fields(args, _NUMBERS | _OPTIONAL, where)
    wrong = [name for name in _NUMBERS if args[name] < 1]
    if wrong:
        raise ValueError(f"{where} has {wrong[0]}={args[wrong[0]]}, which must be at least 1")
    num_heads = args["num_attention_heads"]
    num_kv_heads = num_heads
    if args.get("group_query_attention"):
        num_kv_heads = args.get("num_query_groups") or num_heads
    head_dim = args.get("kv_channels") or args["hidden_size"] // num_heads
    if num_heads % num_kv_heads or head_dim < 1:
        raise ValueError(
            f"{where} has num_attention_heads={num_heads} and num_query_groups={num_kv_heads}, of "
            "which the first must be a multiple of the second"
        )
    vocab_size = args.get("vocab_size")
    if vocab_size and args.get("tokenizer_type") == "NullTokenizer":
        vocab_size += 1  # It counts neither the padding nor the token that ends a document.
    return Sizes(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size if vocab_size and 0 < vocab_size <= num_rows else num_rows,
        settings=file,
    )


def config_of(args: Args, sizes: Sizes, file: Path) -> dict[str, Any]:
    """Return the config.json of the same model in the Hugging Face format.

    Raises:
        ValueError: An argument is not supported.
    """
    _check_off(args, file)
    if _is_llama(args):
        return _llama(args, sizes, file)
    if _is_gpt2(args):
        return _gpt2(args, sizes)
    shown = ", ".join(
        f"{name}={shortened(str(value))}"
        for name, value in {
            "position_embedding_type": _positions(args),
            "normalization": _norm(args),
            "swiglu": is_gated(args),
            "add_bias_linear": _has_biases(args),
            "untie_embeddings_and_output_weights": _is_untied(args),
        }.items()
    )
    raise ValueError(
        f"{file}: args has {shown}, but only two kinds of models can be read: like LLaMA (rope, "
        "RMSNorm, swiglu, no biases), and like GPT-2 (learned_absolute, LayerNorm, no swiglu, "
        "biases, tied embeddings)"
    )


def weights_of(args: Args, tensors: Mapping[Name, Tensor], file: Path) -> Weights:
    """Return the model in the Hugging Face format.

    Args:
        tensors: whole tensors.
        file: file of the arguments.

    Raises:
        ValueError: The model is not supported, or a tensor does not match the arguments.
    """
    embedding = tensors.get(Name(layer=None, module="embedding", word="weight"))
    if embedding is None:
        raise ValueError(f"{file}: the model has no embedding of tokens; only GPTs can be read")
    sizes = sizes_of(args, embedding.shape[0], file)
    config = config_of(args, sizes, file)
    rename = as_gpt2 if config["model_type"] == "gpt2" else as_llama
    return Weights(config=config, tensors=rename(tensors, sizes))


def is_gated(args: Args) -> bool:
    """Return whether the MLP is gated, so that its first layer has two parts."""
    return bool(args.get("swiglu"))


def _check_off(args: Args, file: Path) -> None:
    for name, feature in _OFF.items():
        value = args.get(name)
        if value:
            raise ValueError(
                f"{file}: args has {name}={shortened(str(value))}, but {feature} cannot be read "
                "from Megatron-LM's checkpoints; export the model with Megatron-Bridge in the "
                "Hugging Face format"
            )
    if (args.get("softmax_type") or "vanilla") != "vanilla":
        raise ValueError(f"{file}: args has softmax_type={args['softmax_type']}, not vanilla")


def _positions(args: Args) -> str:
    if args.get("use_rotary_position_embeddings"):  # in earlier versions
        return "rope"
    return str(args.get("position_embedding_type") or "learned_absolute")


def _norm(args: Args) -> str:
    return str(args.get("normalization") or "LayerNorm")


def _has_biases(args: Args) -> bool:
    return bool(args.get("add_bias_linear", not args.get("disable_bias_linear", False)))


def _is_untied(args: Args) -> bool:
    return bool(args.get("untie_embeddings_and_output_weights", False))


def _epsilon(args: Args) -> float:
    return args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5


def _is_llama(args: Args) -> bool:
    has_parts = (_positions(args), _norm(args)) == ("rope", "RMSNorm")
    return has_parts and is_gated(args) and not _has_biases(args)


def _is_gpt2(args: Args) -> bool:
    has_parts = (_positions(args), _norm(args)) == ("learned_absolute", "LayerNorm")
    has_other = is_gated(args) or _is_untied(args) or args.get("qk_layernorm")
    return has_parts and _has_biases(args) and not has_other


def _gpt2(args: Args, sizes: Sizes) -> dict[str, Any]:
    if (
        sizes.num_kv_heads != sizes.num_heads
        or sizes.head_dim * sizes.num_heads != (args["hidden_size"])
    ):
        raise ValueError(
            f"{sizes.settings}: args has {sizes.num_heads} heads of {sizes.head_dim} features and "
            f"{sizes.num_kv_heads} kv heads, but in a GPT-2 the two numbers are equal, and heads × "
            f"features is hidden_size={args['hidden_size']}"
        )
    # The fused kernel computes the approximation with tanh, and PyTorch's function does not.
    is_approximate = args.get("bias_gelu_fusion", True) or args.get("openai_gelu")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes.vocab_size,
        "n_positions": args["max_position_embeddings"],
        "n_layer": args["num_layers"],
        "n_head": sizes.num_heads,
        "n_embd": args["hidden_size"],
        "n_inner": args["ffn_hidden_size"],
        "activation_function": "gelu_new" if is_approximate else "gelu",
        "resid_pdrop": args.get("hidden_dropout") or 0.0,
        "layer_norm_epsilon": _epsilon(args),
        "initializer_range": args.get("init_method_std") or 0.02,
    }


def _llama(args: Args, sizes: Sizes, file: Path) -> dict[str, Any]:
    has_qkv_bias = bool(args.get("add_qkv_bias"))
    has_qk_norm = bool(args.get("qk_layernorm"))
    if has_qkv_bias and has_qk_norm:
        raise ValueError(
            f"{file}: args has add_qkv_bias and qk_layernorm, but a model with both cannot be read"
        )
    if (args.get("rotary_percent") or 1.0) != 1.0:
        raise ValueError(
            f"{file}: args has rotary_percent={args['rotary_percent']}, which must be 1"
        )
    name, model_type = ("LlamaForCausalLM", "llama")
    if has_qkv_bias:
        name, model_type = ("Qwen2ForCausalLM", "qwen2")
    elif has_qk_norm:
        name, model_type = ("Qwen3ForCausalLM", "qwen3")
    config = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": args["max_position_embeddings"],
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_size": args["hidden_size"],
        "intermediate_size": args["ffn_hidden_size"],
        "hidden_act": "silu",
        "rms_norm_eps": _epsilon(args),
        "rope_theta": float(args.get("rotary_base") or 10000.0),
        "tie_word_embeddings": not _is_untied(args),
        "initializer_range": args.get("init_method_std") or 0.02,
    }
    if args.get("use_rope_scaling"):
        # Megatron-LM has a key for the factor only.
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(args.get("rope_scaling_factor") or 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return config
