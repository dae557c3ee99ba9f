"""The tensors of GPT models in Megatron-LM and LiBai, and the same in the Hugging Face format.

Megatron-LM has used two sets of names, and LiBai has a third one. They all become these:

    embedding.weight           [V, D]
    position.weight            [positions, D]
    0.attention_norm.weight    [D]
    0.qkv.weight               [(N + 2 K) H, D]   see below
    0.out.weight               [D, N H]
    0.mlp_norm.weight          [D]
    0.gate.weight              [F, D]             in a gated MLP
    0.up.weight                [F, D]
    0.down.weight              [D, F]
    final_norm.weight          [D]
    head.weight                [V, D]

The rows of `qkv` are grouped by kv head: for two kv heads, each of which serves two heads of the
query, they are q0 q1 k0 v0 q2 q3 k1 v1, each with H rows. A bias has the same rows.

D embed, F mlp, N heads, K kv heads, H head dim, V vocab.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from convert.tensor_files import Tensor
from convert.trainers.weights import check_shape, derived, joined, rows

#: Module of a layer in other trainers -> its name here.
_LAYER_MODULES = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "self_attention.linear_qkv": "qkv",
    "self_attention.query_key_value": "qkv",
    "attention.query_key_value": "qkv",
    "self_attention.linear_proj": "out",
    "self_attention.dense": "out",
    "attention.dense": "out",
    "self_attention.q_layernorm": "q_norm",
    "self_attention.k_layernorm": "k_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "mlp.linear_fc1": "up",
    "mlp.dense_h_to_4h": "up",
    "mlp.linear_fc2": "down",
    "mlp.dense_4h_to_h": "down",
}
#: The same for modules outside of layers.
_OTHER_MODULES = {
    "embedding.word_embeddings": "embedding",
    "embeddings.token_embeddings": "embedding",
    "embedding.position_embeddings": "position",
    "embeddings.position_embeddings": "position",
    "final_layernorm": "final_norm",
    "final_norm": "final_norm",
    "layernorm_f": "final_norm",
    "output_layer": "head",
    "word_embeddings_for_head": "head",
}
_PREFIX = re.compile(r"^(model\.|module\.|language_model\.|GPT_model\.)*")
_STACK = re.compile(r"^(?:decoder|encoder|transformer)\.(?:layers\.(\d+)\.)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Name:
    """The name of a tensor."""

    layer: int | None  # number of the layer; None outside of layers
    module: str  # name of the module here
    word: str  # weight or bias

    def __str__(self):
        layer = "" if self.layer is None else f"{self.layer}."
        return f"{layer}{self.module}.{self.word}"


def parse_name(theirs: str, file: Path) -> Name:
    """Return the name of a tensor.

    Args:
        theirs: name in Megatron-LM or LiBai.
        file: file of the tensor.

    Raises:
        ValueError: The models that can be read have no such tensor.
    """
    name = _PREFIX.sub("", theirs)
    stack = _STACK.match(name)
    layer = None
    if stack is not None:
        layer = None if stack[1] is None else int(stack[1])
        name = name[stack.end() :]
    name = name.replace(".layer_norm_", ".layer_norm.")
    module, _, word = name.rpartition(".")
    modules = _OTHER_MODULES if layer is None else _LAYER_MODULES
    if module not in modules or word not in ("weight", "bias"):
        raise ValueError(
            f"{file} has the tensor {theirs}, which a GPT-2 or LLaMA does not have; only these "
            "two kinds of models can be read"
        )
    return Name(layer=layer, module=modules[module], word=word)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that determine the layout of tensors."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # without padding
    settings: Path  # file that the sizes come from


#: Module here -> module of LLaMA.
_LLAMA = {
    "embedding": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
#: Module here -> module of GPT-2.
_GPT2 = {
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}


def as_llama(tensors: Mapping[Name, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Return the tensors of a LLaMA, or of a Qwen 2 or 3, with their Hugging Face names.

    Raises:
        ValueError: A tensor has another shape than follows from the sizes, or the model has a
            tensor that these have not.
    """
    theirs = {}
    for name, tensor in tensors.items():
        layer = "" if name.layer is None else f"model.layers.{name.layer}."
        if name.module == "qkv":
            for part, values in zip("qkv", _split_qkv(tensor, sizes), strict=True):
                theirs[f"{layer}self_attn.{part}_proj.{name.word}"] = values
        else:
            module = _module(name, tensor, _LLAMA)
            theirs[f"{layer}{module}.{name.word}"] = _without_padding(name, tensor, sizes)
    return theirs


def as_gpt2(tensors: Mapping[Name, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Return the tensors of a GPT-2 with their Hugging Face names.

    Raises:
        ValueError: A tensor has another shape than follows from the sizes, or the model has a
            tensor that a GPT-2 has not.
    """
    theirs = {}
    for name, tensor in tensors.items():
        layer = "" if name.layer is None else f"transformer.h.{name.layer}."
        values = _without_padding(name, tensor, sizes)
        if name.module == "qkv":
            values = _q_k_v(tensor, sizes)
        if name.layer is not None and len(values.shape) == 2:
            values = derived(values.name, values, values.shape[::-1], np.transpose)
        theirs[f"{layer}{_module(name, tensor, _GPT2)}.{name.word}"] = values
    return theirs


def _module(name: Name, tensor: Tensor, modules: Mapping[str, str]) -> str:
    if name.module not in modules:
        kind = "LLaMA" if modules is _LLAMA else "GPT-2"
        raise ValueError(
            f"{tensor.file} has the tensor {tensor.name}, which a {kind} does not have; the "
            "checkpoint and its settings must be of the same model"
        )
    return modules[name.module]


def _without_padding(name: Name, tensor: Tensor, sizes: Sizes) -> Tensor:
    """Remove the rows that pad the vocabulary."""
    if name.module not in ("embedding", "head") or tensor.shape[0] <= sizes.vocab_size:
        return tensor
    return rows(tensor.name, tensor, slice(sizes.vocab_size))


def _check_qkv(tensor: Tensor, sizes: Sizes) -> tuple[int, int, int]:
    """Return kv heads, the heads of the query for each of them, and their size."""
    num_rows = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    check_shape(tensor, (num_rows, *tensor.shape[1:]), sizes.settings)
    return sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads, sizes.head_dim


def _split_qkv(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
    """Return query, key and value, each with the rows of its heads in order."""
    groups, queries, head_dim = _check_qkv(tensor, sizes)

    def select(part: slice) -> Tensor:
        num_heads = len(range(queries + 2)[part]) * groups
        shape = (num_heads * head_dim, *tensor.shape[1:])
        return derived(
            tensor.name,
            tensor,
            shape,
            lambda values: values.reshape(groups, queries + 2, head_dim, -1)[:, part].reshape(
                shape
            ),
        )

    return [
        select(slice(queries)),
        select(slice(queries, queries + 1)),
        select(slice(queries + 1, queries + 2)),
    ]


def _q_k_v(tensor: Tensor, sizes: Sizes) -> Tensor:
    """Return the rows of all queries, all keys and all values, in this order."""
    return joined(_split_qkv(tensor, sizes), 0)


def split_gates(tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
    """Return the tensors of gated MLPs, whose first layer has the rows of `gate`, then of `up`."""
    split = {}
    for name, tensor in tensors.items():
        if name.module == "up":
            half = tensor.shape[0] // 2
            gate = dataclasses.replace(name, module="gate")
            split[gate] = rows(tensor.name, tensor, slice(half))
            tensor = rows(tensor.name, tensor, slice(half, 2 * half))
        split[name] = tensor
    return split
