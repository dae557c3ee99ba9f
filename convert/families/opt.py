"""Keys and weight names of OPT."""

from typing import Any

from convert.architecture import Architecture
from convert.keys import ACTIVATIONS, Config, Key, Keys, Only
from convert.names import Row
from models.text.opt import OPT

_OURS = "decoder.layers"
_THEIRS = "model.decoder.layers.{layer}"

#: Linear layer of a block here -> its name in the Hugging Face model; each has a weight and a bias.
_LINEARS = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}
_NORMS = {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}

_ROWS = (
    Row("token_embedding", "model.decoder.embed_tokens.weight", "vocab", tied=("lm_head.weight",)),
    Row("position_embedding", "model.decoder.embed_positions.weight"),
    Row("project_in.kernel", "model.decoder.project_in.weight"),
    *(
        Row(f"{_OURS}.{ours}.{word}", f"{_THEIRS}.{theirs}.{suffix}")
        for ours, theirs in _LINEARS.items()
        for word, suffix in (("kernel", "weight"), ("bias", "bias"))
    ),
    Row(f"{_OURS}.attention.out.kernel", f"{_THEIRS}.self_attn.out_proj.weight", num_inputs=2),
    Row(f"{_OURS}.attention.out.bias", f"{_THEIRS}.self_attn.out_proj.bias"),
    *(
        Row(f"{_OURS}.{ours}.{word}", f"{_THEIRS}.{theirs}.{suffix}")
        for ours, theirs in _NORMS.items()
        for word, suffix in (("scale", "weight"), ("bias", "bias"))
    ),
    Row("final_norm.scale", "model.decoder.final_layer_norm.weight"),
    Row("final_norm.bias", "model.decoder.final_layer_norm.bias"),
    Row("project_out.kernel", "model.decoder.project_out.weight"),
)


def _read_embed_dims(hf: Config) -> dict[str, Any]:
    narrow = hf.get("word_embed_proj_dim")
    return {"token_embed_dim": None if narrow == hf["hidden_size"] else narrow}


def _write_embed_dims(fields: Config) -> dict[str, Any]:
    return {"word_embed_proj_dim": fields["token_embed_dim"] or fields["embed_dim"]}


_KEYS = (
    Key("vocab_size", "vocab_size"),
    Key("max_position_embeddings", "max_positions"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "num_heads"),
    Key("hidden_size", "embed_dim"),
    Keys(("word_embed_proj_dim",), _read_embed_dims, _write_embed_dims),
    Key("ffn_dim", "mlp_dim"),
    Key("dropout", "dropout", 0.1),
    Key("do_layer_norm_before", "norm_first", True),
    Key("activation_function", "activation", "relu", ACTIVATIONS),
    Key("init_std", "init_stddev", 0.02),
    Only("_remove_final_layer_norm", (False,)),
    Only("enable_bias", (True,), why=" (models such as Galactica have no biases)"),
    Only("layer_norm_elementwise_affine", (True,)),
    Only("tie_word_embeddings", (True,)),
)

_LM = Architecture(
    name="OPTForCausalLM",
    family="OPT",
    model_type="opt",
    model="opt",
    model_class=OPT,
    keys=_KEYS,
    rows=_ROWS,
    prefix="model.",
    fields={"head": "lm"},
    is_generative=True,
    harmless=("attention_dropout", "activation_dropout", "layerdrop"),
)

ARCHITECTURES = (_LM, _LM.base("OPTModel", other_heads=(r"lm_head\.",)))
