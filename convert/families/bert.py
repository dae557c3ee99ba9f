"""Keys and weight names of BERT, and of RoBERTa and the families that are one: XLM-R, CamemBERT."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from convert.architecture import Architecture, detect_pooler
from convert.keys import ACTIVATIONS, NUM_LABELS, Config, Key, Keys, Only
from convert.names import Row, linear, norm
from convert.tensor_files import Tensor
from models.text.bert import Bert

#: Linear layer of a block here -> its name in the Hugging Face model.
_LINEARS = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_NORMS = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}


def body(base: str, *tied: str) -> tuple[Row, ...]:
    """Return the rows of the base model.

    Args:
        base: prefix of the names, without its dot.
        *tied: other names of the token embedding.
    """
    ours = "encoder.layers"
    theirs = f"{base}.encoder.layer.{{layer}}"
    out = f"{theirs}.attention.output.dense"
    return (
        Row("token_embedding", f"{base}.embeddings.word_embeddings.weight", "vocab", tied=tied),
        Row("position_embedding", f"{base}.embeddings.position_embeddings.weight"),
        Row("type_embedding", f"{base}.embeddings.token_type_embeddings.weight"),
        *norm("embedding_norm", f"{base}.embeddings.LayerNorm"),
        *(r for a, b in _LINEARS.items() for r in linear(f"{ours}.{a}", f"{theirs}.{b}")),
        *linear(f"{ours}.attention.out", out, num_inputs=2),
        *(r for a, b in _NORMS.items() for r in norm(f"{ours}.{a}", f"{theirs}.{b}")),
    )


def _detect_pairs(tensors: Mapping[str, Tensor], hf: Config) -> dict[str, Any]:
    """Detect both heads of BERT's pre-training.

    Published files contain both, although their config.json may name BertForMaskedLM.
    """
    both = ("pooler.dense.weight", "seq_relationship.weight")
    has_both = all(any(name.endswith(end) for name in tensors) for end in both)
    return {"head": "pretraining"} if has_both else {}


_KEYS = (
    Key("vocab_size", "vocab_size"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "num_heads"),
    Key("hidden_size", "embed_dim"),
    Key("intermediate_size", "mlp_dim"),
    Key("hidden_act", "activation", "gelu", ACTIVATIONS),
    Key("hidden_dropout_prob", "dropout", 0.1),
    Key("type_vocab_size", "num_token_types", 2),
    Key("layer_norm_eps", "layer_norm_epsilon", 1e-12),
    Key("initializer_range", "init_stddev", 0.02),
    Only("position_embedding_type", ("absolute",)),
    Only("is_decoder", (False,)),
    Only("add_cross_attention", (False,)),
    Only("tie_word_embeddings", (True,)),
)
LABEL_KEYS = (NUM_LABELS, Only("problem_type", (None, "single_label_classification")))


def _read_roberta_positions(hf: Config) -> dict[str, Any]:
    """Read positions: RoBERTa numbers them from pad_token_id + 1, and never uses the first rows."""
    pad = hf.get("pad_token_id", 1)
    if pad is None:
        raise ValueError(
            "config.json has no pad_token_id, but RoBERTa counts positions from pad_token_id + 1"
        )
    positions = hf.get("max_position_embeddings", 512) - pad - 1
    return {"pad_id": pad, "first_position": pad + 1, "max_positions": positions}


def _write_roberta_positions(fields: Config) -> dict[str, Any]:
    rows = fields["max_positions"] + fields["first_position"]
    return {"pad_token_id": fields["pad_id"], "max_position_embeddings": rows}


BERT_KEYS = (*_KEYS, Key("max_position_embeddings", "max_positions"))
_ROBERTA_KEYS = (
    *_KEYS,
    Keys(
        ("max_position_embeddings", "pad_token_id"),
        _read_roberta_positions,
        _write_roberta_positions,
    ),
)

_BERT_MLM = (
    *body("bert", "cls.predictions.decoder.weight"),
    *linear("masked_lm.dense", "cls.predictions.transform.dense"),
    *norm("masked_lm.norm", "cls.predictions.transform.LayerNorm"),
    Row("masked_lm.bias", "cls.predictions.bias", "vocab", tied=("cls.predictions.decoder.bias",)),
)
_BERT_POOLER = linear("pooler", "bert.pooler.dense")
_BERT_PAIRS = (*_BERT_POOLER, *linear("classifier", "cls.seq_relationship"))
_ROBERTA_POOLER = linear("pooler", "roberta.pooler.dense")

BERT = Architecture(
    name="BertForMaskedLM",
    family="BERT",
    model_type="bert",
    model="bert",
    model_class=Bert,
    keys=BERT_KEYS,
    rows=(*_BERT_MLM, *_BERT_PAIRS),
    prefix="bert.",
    fields={"head": "masked_lm"},
    template="{cls} $A {sep}",
    pair_template="{cls} $A {sep} $B:1 {sep}:1",
    harmless=(
        "attention_probs_dropout_prob",
        "classifier_dropout",
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
        "problem_type",
    ),
    buffers=(r"\.position_ids$",),
    other_heads=(r"(bert\.)?pooler\.", r"cls\.seq_relationship\."),
    detect=_detect_pairs,
)
_BERT_LABELS = dataclasses.replace(
    BERT,
    detect=None,
    keys=(*BERT_KEYS, *LABEL_KEYS),
    other_heads=(r"(bert\.)?pooler\.", r"cls\."),
)
_ROBERTA = dataclasses.replace(
    BERT,
    name="RobertaForMaskedLM",
    family="RoBERTa",
    model_type="roberta",
    keys=_ROBERTA_KEYS,
    rows=(
        *body("roberta", "lm_head.decoder.weight"),
        *linear("masked_lm.dense", "lm_head.dense"),
        *norm("masked_lm.norm", "lm_head.layer_norm"),
        Row("masked_lm.bias", "lm_head.bias", "vocab", tied=("lm_head.decoder.bias",)),
    ),
    prefix="roberta.",
    pair_template="{cls} $A {sep} $B {sep}",
    other_heads=(r"(roberta\.)?pooler\.",),
)
_ROBERTA_LABELS = dataclasses.replace(
    _ROBERTA,
    keys=(*_ROBERTA_KEYS, *LABEL_KEYS),
    other_heads=(r"(roberta\.)?pooler\.", r"lm_head\."),
)

_BERTS = (
    BERT,
    dataclasses.replace(
        BERT,
        name="BertForPreTraining",
        fields={"head": "pretraining"},
        detect=None,
        other_heads=(),
    ),
    dataclasses.replace(
        _BERT_LABELS,
        name="BertForSequenceClassification",
        rows=(*body("bert"), *_BERT_POOLER, *linear("classifier", "classifier")),
        fields={"head": "sequence"},
        other_heads=(r"cls\.",),
    ),
    dataclasses.replace(
        _BERT_LABELS,
        name="BertForTokenClassification",
        rows=(*body("bert"), *linear("classifier", "classifier")),
        fields={"head": "token"},
    ),
    dataclasses.replace(BERT, rows=(*body("bert"), *_BERT_POOLER)).base(
        "BertModel",
        detect=detect_pooler,
        detected_fields=("use_pooler",),
        other_heads=(r"cls\.", r"classifier\."),
    ),
)
_ROBERTAS = (
    _ROBERTA,
    dataclasses.replace(
        _ROBERTA_LABELS,
        name="RobertaForSequenceClassification",
        rows=(
            *body("roberta"),
            *linear("pooler", "classifier.dense"),
            *linear("classifier", "classifier.out_proj"),
        ),
        fields={"head": "sequence"},
    ),
    dataclasses.replace(
        _ROBERTA_LABELS,
        name="RobertaForTokenClassification",
        rows=(*body("roberta"), *linear("classifier", "classifier")),
        fields={"head": "token"},
    ),
    dataclasses.replace(_ROBERTA, rows=(*body("roberta"), *_ROBERTA_POOLER)).base(
        "RobertaModel",
        detect=detect_pooler,
        detected_fields=("use_pooler",),
        other_heads=(r"lm_head\.", r"classifier\."),
    ),
)

#: Beginning of the names of classes whose models are RoBERTas -> their model_type, the name of the
#: family, and the published models whose config.json a test reads, by class.
_LIKE_ROBERTA: dict[str, tuple[str, str, dict[str, str]]] = {
    "Roberta": ("roberta", "RoBERTa", {}),
    "XLMRoberta": (
        "xlm-roberta",
        "XLM-R",
        {"XLMRobertaForMaskedLM": "FacebookAI/xlm-roberta-base"},
    ),
    "Camembert": (
        "camembert",
        "CamemBERT",
        {"CamembertForMaskedLM": "almanach/camembert-base"},
    ),
}


def _like_roberta(beginning: str) -> Iterator[Architecture]:
    model_type, family, tried = _LIKE_ROBERTA[beginning]
    for each in _ROBERTAS:
        name = each.name.replace("Roberta", beginning)
        models = (tried[name],) if name in tried else ()
        yield dataclasses.replace(
            each, name=name, model_type=model_type, family=family, tried=models
        )


ARCHITECTURES = (*_BERTS, *(each for name in _LIKE_ROBERTA for each in _like_roberta(name)))
