"""Writes a Hugging Face model as Megatron-LM's checkpoint, with any tensor and pipeline sizes."""

import argparse
import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a checkpoint is divided and named."""

    tensor: int = 2
    pipeline: int = 2
    chunks: int = 1  # chunks of layers of a stage
    is_legacy: bool = False  # names of Megatron-LM before its core
    multiple: int = 128  # of which the padded vocabulary is one, times the tensor size


def write(model: Any, directory: Path, layout: Layout, **changes: Any) -> None:
    """Write a model.

    Args:
        model: GPT-2 or LLaMA of transformers.
        changes: arguments of the run to change.
    """
    args = arguments(model, layout)
    vars(args).update(changes)
    folder = directory / "iter_0000010"
    weights = {name: values.detach().clone() for name, values in model.state_dict().items()}
    for rank in range(layout.tensor):
        for stage in range(layout.pipeline):
            name = f"mp_rank_{rank:02}" + (f"_{stage:03}" if layout.pipeline > 1 else "")
            state: State = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": 10,
                "rng_state": [{"np_rng_state": np.random.get_state(), "random": (3, (1, 2), None)}],
            }
            for chunk in range(layout.chunks):
                key = "model" if layout.chunks == 1 else f"model{chunk}"
                state[key] = _chunk(model.config, weights, layout, rank, stage, chunk)
            (folder / name).mkdir(parents=True)
            torch.save(state, folder / name / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("10")


def whole_model(model: Any, layout: Layout) -> State:
    """Return the tensors of a model, neither divided nor scaled."""
    weights = {name: values.detach().clone() for name, values in model.state_dict().items()}
    state = _chunk(model.config, weights, layout, 0, 0, 0)
    return {name: values for name, values in state.items() if isinstance(values, torch.Tensor)}


def arguments(model: Any, layout: Layout) -> argparse.Namespace:
    """Return the arguments of Megatron-LM for a model."""
    config = model.config
    is_gpt2 = config.model_type == "gpt2"
    rope = getattr(config, "rope_parameters", None) or {}
    return argparse.Namespace(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.n_inner if is_gpt2 else config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        kv_channels=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        group_query_attention=not is_gpt2,
        num_query_groups=1 if is_gpt2 else config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        rotary_base=10000,
        rotary_percent=1.0,
        use_rope_scaling=rope.get("rope_type") == "llama3",
        rope_scaling_factor=8.0,
        normalization="LayerNorm" if is_gpt2 else "RMSNorm",
        norm_epsilon=1e-5,
        swiglu=not is_gpt2,
        bias_gelu_fusion=getattr(config, "activation_function", "") == "gelu_new",
        add_bias_linear=is_gpt2,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type == "qwen3",
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        vocab_size=config.vocab_size,
        padded_vocab_size=_padded(config.vocab_size, layout),
        tokenizer_type="GPT2BPETokenizer",
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
    )


def _padded(vocab_size: int, layout: Layout) -> int:
    unit = layout.multiple * layout.tensor
    return -(-vocab_size // unit) * unit


def _chunk(
    config: Any,
    weights: Mapping[str, torch.Tensor],
    layout: Layout,
    rank: int,
    stage: int,
    chunk: int,
) -> State:
    """Return the part of the model in a chunk of layers, for a tensor rank."""
    num = config.num_hidden_layers // (layout.pipeline * layout.chunks)
    first = (chunk * layout.pipeline + stage) * num
    is_first = first == 0
    is_last = first + num == config.num_hidden_layers
    state: State = {}
    padding = _padded(config.vocab_size, layout) - config.vocab_size
    embedding, head, position, final_norm = _outside(config, weights)
    if is_first:
        words = torch.nn.functional.pad(embedding, (0, 0, 0, padding), value=7.0)
        state["embedding.word_embeddings.weight"] = _shard(words, 0, rank, layout)
        if position is not None:
            state["embedding.position_embeddings.weight"] = position
    for number in range(num):
        read = _gpt2_layer if config.model_type == "gpt2" else _llama_layer
        for name, (values, axis) in read(config, weights, first + number).items():
            values = values if axis is None else _shard_of(name, values, axis, rank, layout, config)
            state[f"decoder.layers.{number}.{name}"] = values.contiguous()
        state[f"decoder.layers.{number}.mlp.linear_fc1._extra_state"] = io.BytesIO(b"scales")
    if is_last:
        for word, values in final_norm.items():
            state[f"decoder.final_layernorm.{word}"] = values
        words = torch.nn.functional.pad(head, (0, 0, 0, padding), value=7.0)
        state["output_layer.weight"] = _shard(words, 0, rank, layout)
    return _legacy(state) if layout.is_legacy else state


def _outside(config: Any, weights: Mapping[str, torch.Tensor]) -> tuple[Any, Any, Any, State]:
    head = weights["lm_head.weight"]
    if config.model_type == "gpt2":
        norm = {word: weights[f"transformer.ln_f.{word}"] for word in ("weight", "bias")}
        return weights["transformer.wte.weight"], head, weights["transformer.wpe.weight"], norm
    return (
        weights["model.embed_tokens.weight"],
        head,
        None,
        {"weight": weights["model.norm.weight"]},
    )


def _gpt2_layer(config: Any, weights: Mapping[str, torch.Tensor], layer: int) -> State:
    """Return name -> (values, axis of its shards)."""
    theirs = f"transformer.h.{layer}"
    state: State = {}
    for word in ("weight", "bias"):
        state[f"self_attention.linear_qkv.layer_norm_{word}"] = (
            weights[f"{theirs}.ln_1.{word}"],
            None,
        )
        state[f"mlp.linear_fc1.layer_norm_{word}"] = weights[f"{theirs}.ln_2.{word}"], None
        qkv = weights[f"{theirs}.attn.c_attn.{word}"].t().chunk(3)
        state[f"self_attention.linear_qkv.{word}"] = _grouped(config, *qkv), 0
        for ours, name, axis in (
            ("self_attention.linear_proj", "attn.c_proj", 1),
            ("mlp.linear_fc1", "mlp.c_fc", 0),
            ("mlp.linear_fc2", "mlp.c_proj", 1),
        ):
            values = weights[f"{theirs}.{name}.{word}"].t()
            state[f"{ours}.{word}"] = values, None if (axis, word) == (1, "bias") else axis
    return state


def _llama_layer(config: Any, weights: Mapping[str, torch.Tensor], layer: int) -> State:
    theirs = f"model.layers.{layer}"
    mlp = f"{theirs}.mlp"
    attention = f"{theirs}.self_attn"
    gate_up = torch.cat([weights[f"{mlp}.gate_proj.weight"], weights[f"{mlp}.up_proj.weight"]])
    state: State = {
        "self_attention.linear_qkv.layer_norm_weight": (
            weights[f"{theirs}.input_layernorm.weight"],
            None,
        ),
        "mlp.linear_fc1.layer_norm_weight": (
            weights[f"{theirs}.post_attention_layernorm.weight"],
            None,
        ),
        "self_attention.linear_proj.weight": (weights[f"{attention}.o_proj.weight"], 1),
        "mlp.linear_fc1.weight": (gate_up, 0),
        "mlp.linear_fc2.weight": (weights[f"{mlp}.down_proj.weight"], 1),
    }
    for word in ("weight", "bias"):
        if f"{attention}.q_proj.{word}" in weights:
            qkv = (weights[f"{attention}.{x}_proj.{word}"] for x in "qkv")
            state[f"self_attention.linear_qkv.{word}"] = _grouped(config, *qkv), 0
    for x in "qk":
        if f"{attention}.{x}_norm.weight" in weights:
            scale = weights[f"{attention}.{x}_norm.weight"]
            state[f"self_attention.{x}_layernorm.weight"] = scale, None
    return state


def _grouped(config: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Order the rows by kv head: its heads of the query, its key, its value."""
    num_kv = getattr(config, "num_key_value_heads", config.num_attention_heads)
    parts = [x.reshape(num_kv, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


def _shard(values: torch.Tensor, axis: int, rank: int, layout: Layout) -> torch.Tensor:
    return values.chunk(layout.tensor, axis)[rank].clone()


def _shard_of(
    name: str, values: torch.Tensor, axis: int, rank: int, layout: Layout, config: Any
) -> torch.Tensor:
    if name == "mlp.linear_fc1.weight" and config.model_type != "gpt2":  # gate and up, per rank
        return torch.cat([_shard(part, axis, rank, layout) for part in values.chunk(2)])
    return _shard(values, axis, rank, layout)


def _legacy(state: State) -> State:
    """Return a chunk with the names before Megatron's core, in nested dicts."""
    names = {
        "self_attention.linear_qkv.layer_norm_": "input_norm.",
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "mlp.linear_fc1.layer_norm_": "post_attention_norm.",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "final_layernorm": "final_norm",
    }
    encoder: State = {}
    model: State = {"language_model": {"encoder": encoder}}
    for name, values in state.items():
        if name.startswith("embedding."):
            _, module, word = name.split(".")
            embedding = model["language_model"].setdefault("embedding", {})
            embedding[module] = {word: values}
        elif name == "output_layer.weight":
            model["language_model"]["output_layer"] = {"weight": values}
        elif not name.endswith("_extra_state"):
            ours = name.removeprefix("decoder.")
            for modern, old in names.items():
                ours = ours.replace(modern, old)
            encoder[ours] = values
    return model
