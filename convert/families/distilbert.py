"""Keys and weight names of DistilBERT."""

import dataclasses

from convert.architecture import Architecture
from convert.families.bert import LABEL_KEYS
from convert.keys import ACTIVATIONS, Key, Only
from convert.names import Row, linear, norm
from models.text.bert import Bert

#: Linear layer of a block here -> its name in the Hugging Face model.
_LINEARS = {
    "attention.q": "attention.q_lin",
    "attention.k": "attention.k_lin",
    "attention.v": "attention.v_lin",
    "mlp.up": "ffn.lin1",
    "mlp.down": "ffn.lin2",
}
_NORMS = {"attention_norm": "sa_layer_norm", "mlp_norm": "output_layer_norm"}


def _body(*tied: str) -> tuple[Row, ...]:
    """Return the rows of the base model.

    Args:
        *tied: other names of the token embedding.
    """
    ours = "encoder.layers"
    theirs = "distilbert.transformer.layer.{layer}"
    embeddings = "distilbert.embeddings"
    return (
        Row("token_embedding", f"{embeddings}.word_embeddings.weight", "vocab", tied=tied),
        Row("position_embedding", f"{embeddings}.position_embeddings.weight"),
        *norm("embedding_norm", f"{embeddings}.LayerNorm"),
        *(r for a, b in _LINEARS.items() for r in linear(f"{ours}.{a}", f"{theirs}.{b}")),
        *linear(f"{ours}.attention.out", f"{theirs}.attention.out_lin", num_inputs=2),
        *(r for a, b in _NORMS.items() for r in norm(f"{ours}.{a}", f"{theirs}.{b}")),
    )


_KEYS = (
    Key("vocab_size", "vocab_size"),
    Key("max_position_embeddings", "max_positions", 512),
    Key("n_layers", "num_layers"),
    Key("n_heads", "num_heads"),
    Key("dim", "embed_dim"),
    Key("hidden_dim", "mlp_dim"),
    Key("activation", "activation", "gelu", ACTIVATIONS),
    Key("dropout", "dropout", 0.1),
    Key("initializer_range", "init_stddev", 0.02),
    Only("tie_word_embeddings", (True,)),
)
#: What the classes fix, whatever config.json says.
_FIXED = {
    "num_token_types": 0,
    "use_pooler": False,
    "pooler_activation": "relu",
    "layer_norm_epsilon": 1e-12,
}

_MASKED_LM = Architecture(
    name="DistilBertForMaskedLM",
    family="DistilBERT",
    tried=("distilbert/distilbert-base-uncased",),
    model_type="distilbert",
    model="bert",
    model_class=Bert,
    keys=_KEYS,
    rows=(
        *_body("vocab_projector.weight"),
        *linear("masked_lm.dense", "vocab_transform"),
        *norm("masked_lm.norm", "vocab_layer_norm"),
        Row("masked_lm.bias", "vocab_projector.bias", "vocab"),
    ),
    prefix="distilbert.",
    fields={**_FIXED, "head": "masked_lm"},
    template="{cls} $A {sep}",
    pair_template="{cls} $A {sep} $B {sep}",
    harmless=(
        "attention_dropout",
        "problem_type",
        "qa_dropout",
        "seq_classif_dropout",
        "sinusoidal_pos_embds",  # initial values only
        "tie_weights_",
    ),
    buffers=(r"\.position_ids$",),
)
_LABELS = dataclasses.replace(
    _MASKED_LM,
    keys=(*_KEYS, *LABEL_KEYS),
    other_heads=(r"vocab_",),
)

ARCHITECTURES = (
    _MASKED_LM,
    dataclasses.replace(
        _LABELS,
        name="DistilBertForSequenceClassification",
        tried=(),
        rows=(
            *_body(),
            *linear("pooler", "pre_classifier"),
            *linear("classifier", "classifier"),
        ),
        fields={**_FIXED, "head": "sequence"},
    ),
    dataclasses.replace(
        _LABELS,
        name="DistilBertForTokenClassification",
        tried=(),
        rows=(*_body(), *linear("classifier", "classifier")),
        fields={**_FIXED, "head": "token"},
    ),
    dataclasses.replace(_MASKED_LM, rows=_body()).base(
        "DistilBertModel", other_heads=(r"vocab_", r"pre_classifier\.", r"classifier\.")
    ),
)
