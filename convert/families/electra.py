"""Keys and weight names of ELECTRA: a generator of tokens, and a discriminator of replaced ones."""

import dataclasses

from convert.architecture import Architecture
from convert.families.bert import BERT, BERT_KEYS, LABEL_KEYS, body
from convert.keys import Key, KeyMap, Only
from convert.names import Row, linear, norm

_KEYS = (*BERT_KEYS, Key("embedding_size", "token_embed_dim", 128))
_HARMLESS = (
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "problem_type",
    # No class that can be converted has a summary.
    "summary_activation",
    "summary_last_dropout",
    "summary_type",
    "summary_use_proj",
)
#: Weights of the other heads.
_GENERATOR = r"generator_(predictions|lm_head)\."
_DISCRIMINATOR = r"discriminator_predictions\."
_TABLE = "generator_lm_head.weight"  # in generators, whose head is tied to the embedding


_TRIED = {
    "ElectraForPreTraining": ("google/electra-small-discriminator",),
    "ElectraForMaskedLM": ("google/electra-small-generator",),
}


def _electra(
    name: str, head: str, rows: tuple[Row, ...], keys: KeyMap, *other_heads: str
) -> Architecture:
    """Return the architecture with some head, whose rows and keys are given."""
    tied = [_TABLE] if head == "masked_lm" else []
    return dataclasses.replace(
        BERT,
        name=name,
        family="ELECTRA",
        tried=_TRIED.get(name, ()),
        model_type="electra",
        keys=(*_KEYS, *keys),
        rows=(
            *body("electra", *tied),
            *linear("project_in", "electra.embeddings_project"),
            *rows,
        ),
        prefix="electra.",
        fields={"head": head, "use_pooler": False, "pooler_activation": "gelu"},
        harmless=_HARMLESS,
        other_heads=other_heads,
        detect=None,
    )


ARCHITECTURES = (
    _electra(
        "ElectraForPreTraining",
        "replaced_token",
        (
            *linear("replaced_token.dense", "discriminator_predictions.dense"),
            *linear("replaced_token.logit", "discriminator_predictions.dense_prediction"),
        ),
        (),
        _GENERATOR,
    ),
    _electra(
        "ElectraForMaskedLM",
        "masked_lm",
        (
            *linear("masked_lm.dense", "generator_predictions.dense"),
            *norm("masked_lm.norm", "generator_predictions.LayerNorm"),
            Row("masked_lm.bias", "generator_lm_head.bias", "vocab"),
        ),
        (Only("hidden_act", ("gelu",), "; the head has GELU, and the encoder must have the same"),),
        _DISCRIMINATOR,
    ),
    _electra(
        "ElectraForSequenceClassification",
        "sequence",
        (*linear("pooler", "classifier.dense"), *linear("classifier", "classifier.out_proj")),
        LABEL_KEYS,
        _GENERATOR,
        _DISCRIMINATOR,
    ),
    _electra(
        "ElectraForTokenClassification",
        "token",
        linear("classifier", "classifier"),
        LABEL_KEYS,
        _GENERATOR,
        _DISCRIMINATOR,
    ),
    _electra("ElectraModel", "none", (), (), _GENERATOR, _DISCRIMINATOR, r"classifier\.").base(
        "ElectraModel"
    ),
)
