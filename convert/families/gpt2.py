"""Keys and weight names of GPT-2."""

from convert.architecture import Architecture
from convert.keys import ACTIVATIONS, Key, Only
from convert.names import Row
from models.text.gpt2 import GPT2

_OURS = "decoder.layers"
_THEIRS = "transformer.h.{layer}"

_ROWS = (
    Row("token_embedding", "transformer.wte.weight", "vocab", tied=("lm_head.weight",)),
    Row("position_embedding", "transformer.wpe.weight"),
    Row(f"{_OURS}.attention_norm.scale", f"{_THEIRS}.ln_1.weight"),
    Row(f"{_OURS}.attention_norm.bias", f"{_THEIRS}.ln_1.bias"),
    Row(f"{_OURS}.attention.qkv.kernel", f"{_THEIRS}.attn.c_attn.weight", "conv1d"),
    Row(f"{_OURS}.attention.qkv.bias", f"{_THEIRS}.attn.c_attn.bias"),
    Row(f"{_OURS}.attention.out.kernel", f"{_THEIRS}.attn.c_proj.weight", "conv1d", num_inputs=2),
    Row(f"{_OURS}.attention.out.bias", f"{_THEIRS}.attn.c_proj.bias"),
    Row(f"{_OURS}.mlp_norm.scale", f"{_THEIRS}.ln_2.weight"),
    Row(f"{_OURS}.mlp_norm.bias", f"{_THEIRS}.ln_2.bias"),
    Row(f"{_OURS}.mlp.up.kernel", f"{_THEIRS}.mlp.c_fc.weight", "conv1d"),
    Row(f"{_OURS}.mlp.up.bias", f"{_THEIRS}.mlp.c_fc.bias"),
    Row(f"{_OURS}.mlp.down.kernel", f"{_THEIRS}.mlp.c_proj.weight", "conv1d"),
    Row(f"{_OURS}.mlp.down.bias", f"{_THEIRS}.mlp.c_proj.bias"),
    Row("final_norm.scale", "transformer.ln_f.weight"),
    Row("final_norm.bias", "transformer.ln_f.bias"),
)

_KEYS = (
    Key("vocab_size", "vocab_size"),
    Key("n_positions", "max_positions"),
    Key("n_layer", "num_layers"),
    Key("n_head", "num_heads"),
    Key("n_embd", "embed_dim"),
    Key("n_inner", "mlp_dim", None),
    Key("activation_function", "activation", "gelu_new", ACTIVATIONS),
    Key("resid_pdrop", "dropout", 0.1),
    Key("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
    Key("initializer_range", "init_stddev", 0.02),
    Only("scale_attn_weights", (True,)),
    Only("scale_attn_by_inverse_layer_idx", (False,)),
    Only("add_cross_attention", (False,)),
    Only("tie_word_embeddings", (True,)),
)

_LM = Architecture(
    name="GPT2LMHeadModel",
    family="GPT-2",
    model_type="gpt2",
    model="gpt2",
    model_class=GPT2,
    keys=_KEYS,
    rows=_ROWS,
    prefix="transformer.",
    fields={"head": "lm"},
    is_generative=True,
    harmless=(
        "n_ctx",
        "embd_pdrop",
        "attn_pdrop",
        "predict_special_tokens",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    buffers=(r"\.attn\.(bias|masked_bias)$",),
)

ARCHITECTURES = (_LM, _LM.base("GPT2Model", other_heads=(r"lm_head\.",)))
