"""Writes a Hugging Face model as MaxText's checkpoint, with Orbax."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

#: Names in the Hugging Face format -> path in MaxText.
_PATHS = {
    "model.embed_tokens.weight": "token_embedder.embedding",
    "model.norm.weight": "decoder.decoder_norm.scale",
    "lm_head.weight": "decoder.logits_dense.kernel",
    "input_layernorm.weight": "pre_self_attention_layer_norm.scale",
    "post_attention_layernorm.weight": "post_self_attention_layer_norm.scale",
    "self_attn.o_proj.weight": "self_attention.out.kernel",
    "self_attn.q_norm.weight": "self_attention.query_norm.scale",
    "self_attn.k_norm.weight": "self_attention.key_norm.scale",
    "mlp.gate_proj.weight": "mlp.wi_0.kernel",
    "mlp.up_proj.weight": "mlp.wi_1.kernel",
    "mlp.down_proj.weight": "mlp.wo.kernel",
} | {
    f"self_attn.{x[0]}_proj.{word}": f"self_attention.{x}.{ours}"
    for x in ("query", "key", "value")
    for word, ours in (("weight", "kernel"), ("bias", "bias"))
}


def write_maxtext(model: Any, directory: Path, *, is_scanned: bool = True, **formats: Any) -> None:
    """Write a model.

    Args:
        is_scanned: whether the layers of the stack are one array.
        formats: `use_ocdbt` and `use_zarr3` of Orbax.
    """
    config = model.config
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        path = _PATHS[name if match is None else match[2]]
        array = _array(path, values.numpy(), config)
        if match is None:
            stacks[path] = [array]
        elif is_scanned:
            stacks.setdefault(f"decoder.layers.{path}", []).append(array)
        else:
            stacks[f"decoder.layers_{match[1]}.{path}"] = [array]
    params: dict[str, Any] = {}
    for path, arrays in stacks.items():
        *parents, last = path.split(".")
        folder = params
        for parent in parents:
            folder = folder.setdefault(parent, {})
        is_stack = path.startswith("decoder.layers.")
        folder[last] = jnp.asarray(np.stack(arrays, 1) if is_stack else arrays[0])
    state = {"params": {"params": params}, "opt_state": {"mu": {"x": jnp.ones(3)}}, "step": 5}
    handler = ocp.PyTreeCheckpointHandler(**formats)
    manager = ocp.CheckpointManager(
        directory / "checkpoints", item_names=("items",), item_handlers={"items": handler}
    )
    manager.save(5, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
    manager.close()
    config.save_pretrained(directory)


def _array(path: str, values: np.ndarray, config: Any) -> np.ndarray:
    if path.endswith(("embedding", "scale")):
        return values
    head_dim = config.head_dim
    if path.endswith("bias"):
        return values.reshape(-1, head_dim)
    kernel = values.T
    if path.endswith("out.kernel"):
        return kernel.reshape(-1, head_dim, kernel.shape[-1])
    if not path.startswith("self_attention"):
        return kernel
    kernel = kernel.reshape(len(kernel), -1, head_dim)
    if path.endswith(("query.kernel", "key.kernel")):
        if config.rope_parameters["rope_type"] == "llama3":  # MaxText's llama3.1
            halves = np.split(kernel, 2, axis=-1)
            kernel = np.stack(halves, axis=-1).reshape(kernel.shape)
        if path.endswith("query.kernel") and config.model_type == "llama":
            kernel = kernel / np.float32(np.sqrt(head_dim))
    return kernel
