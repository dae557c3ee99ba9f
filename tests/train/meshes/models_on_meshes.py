"""Measures how far the losses of every model on every kind of mesh are from one device.

`python -m tests.train.meshes.models_on_meshes` writes the table in docs/models.md.
"""

import functools
import json
import re
import tempfile
from pathlib import Path

import jax

from tests.runs import FLOAT64, ROOT, losses, make_run, write_corpus

NUM_STEPS = 5
DOCS = ROOT / "docs" / "models.md"
START = "<!-- measured: models on meshes -->"
END = "<!-- end -->"

#: Overrides of all models; more than one microbatch.
SHARED = (
    "data.global_batch_size=8",
    "train.num_microbatches=2",
    "optimizer.warmup_steps=2",
    "optimizer.learning_rate=0.01",
    "train.num_steps=5",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
)
#: Overrides of text models, with sizes that every mesh divides.
_TEXT = (
    "data.name=text",
    "data.tokenizer=bytes",
    "data.sequence_length=16",
    "data.validation_fraction=0.2",
    "model.num_heads=4",
    "model.embed_dim=32",
    "model.num_layers=4",
)
#: All random image augmentations.
_IMAGES = (
    "images.crop_scale=(0.5,1.0)",
    "images.mixup=0.8",
    "images.cutmix=1.0",
    "images.randaugment_num=2",
    "images.erasing=0.25",
    "model.drop_path=0.2",
    "model.label_smoothing=0.1",
)
_DROPOUT = "model.dropout=0.1"
_MLP = "model.mlp_dim=48"
_VIT = (*_IMAGES, _DROPOUT, "model.embed_dim=32", _MLP)
_SWIN = (
    *_IMAGES,
    _DROPOUT,
    "model.embed_dim=16",
    "model.depths=(2,2)",
    "model.num_heads=(2,4)",
    "images.size=11",
    "model.window_size=4",  # patches have to be padded to windows and to pairs
)
_MAE = (
    "images.crop_scale=(0.5,1.0)",
    _DROPOUT,
    "model.drop_path=0.2",
    "model.embed_dim=32",
    _MLP,
    "model.decoder_embed_dim=16",
    "model.decoder_mlp_dim=24",
    "model.positions=random",
    "optimizer.frozen=decoder_position_embedding",
)
_MOCO = (
    "images.crop_scale=(0.5,1.0)",
    _DROPOUT,
    "model.drop_path=0.2",
    "model.embed_dim=32",
    _MLP,
    "model.hidden_dim=24",
    "model.projection_dim=8",
    "train.num_microbatches=1",
    "train.ema_decay=0.5",
)
_GQA = ("model.num_kv_heads=2", "model.head_dim=6", _MLP)
#: One layer, and two periods of two layers.
_MODERNBERT = (
    _DROPOUT,
    _MLP,
    "model.name=modernbert",
    "model.num_layers=5",
    "model.layer_types=('full', 'window')",
    "model.sliding_window=5",
)
_T5 = (
    "model.num_layers=2",
    "model.num_decoder_layers=2",
    "model.head_dim=6",
    "data.target_length=8",  # so that 4 devices divide it
    _MLP,
    _DROPOUT,
)

#: name -> (config, overrides).
MODELS = {
    "GPT-2": ("gpt2", (_DROPOUT,)),
    "GPT-2, documents apart": ("gpt2", (_DROPOUT, "data.isolate_documents=true")),
    "OPT": ("opt", (_DROPOUT, _MLP)),
    "OPT 350m": (
        "opt",
        (_DROPOUT, _MLP, "model.token_embed_dim=12", "model.norm_first=false"),
    ),
    "LLaMA": ("llama", _GQA),
    "Mistral": ("llama", (*_GQA, "model.sliding_window=5")),
    "Qwen 2": ("llama", (*_GQA, "model.qkv_bias=true", "model.tie_embeddings=true")),
    "Qwen 3": ("llama", (*_GQA, "model.qk_norm=true")),
    "BERT": ("bert", (_DROPOUT, _MLP)),
    "BERT, classifier": (
        "bert",
        (_DROPOUT, _MLP, "data.objective=classification", "model.head=sequence"),
    ),
    "RoBERTa": ("roberta", (_DROPOUT, _MLP)),
    "ModernBERT": (
        "bert",
        (*_MODERNBERT, "data.objective=masked_lm", "model.head=masked_lm"),
    ),
    "ModernBERT, classifier": (
        "bert",
        (
            *_MODERNBERT,
            "data.objective=classification",
            "model.head=sequence",
            "model.pool=mean",
        ),
    ),
    "T5 1.0": (
        "t5",
        (
            *_T5,
            "model.activation=relu",
            "model.is_gated=false",
            "model.tie_embeddings=true",
            "model.scale_outputs=true",
        ),
    ),
    "T5 1.1": ("t5", _T5),
    "ViT": ("vit", _VIT),
    "ViT, mean of patches": (
        "vit",
        (*_VIT, "model.pool=mean", "model.positions=sincos", "optimizer.frozen=position_*"),
    ),
    "Swin": ("swin", _SWIN),
    "Swin V2": ("swin", (*_SWIN, "model.version=2")),
    "ResMLP": ("resmlp", (*_IMAGES, "model.embed_dim=32", _MLP)),
    "MAE": ("mae", _MAE),
    "MoCo v3": ("moco", _MOCO),
}
#: Configs of image models: they have no vocab to share, and no number of tokens that 4 divides.
_OF_IMAGES = ("vit", "swin", "resmlp", "mae", "moco")
DOES_NOT_APPLY = "–"
MESHES = {
    "data=4": ("mesh.data=4",),
    "fsdp=4": ("mesh.fsdp=4",),
    "model=2": ("mesh.model=2",),
    "pipeline=2": ("mesh.pipeline=2",),
    "pipeline=2, vocab shared": ("mesh.pipeline=2", "pipeline.share_vocab=true"),
    "2×2×2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
    "context=4": ("mesh.context=4",),
    "pipeline=2, 2D": ("mesh.pipeline=2", "mesh.model=4", "tensor.mode=2d"),
    "2.5D": ("mesh.model=8", "tensor.mode=2.5d", "tensor.depth=2"),
    "3D": ("mesh.model=8", "tensor.mode=3d"),
}


def write_labelled(directory: Path) -> None:
    """Write labelled lines of the corpus; the label is whether a line contains a colon."""
    texts = (file.read_text() for file in sorted(directory.glob("part_*.txt")))
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    rows = [
        json.dumps({"text": line, "label": "colon" if ":" in line else "none"}) for line in lines
    ]
    (directory / "labelled.jsonl").write_text("\n".join(rows) + "\n")


@functools.cache
def corpora() -> tuple[str, str]:
    """Return directories for texts and for caches; they are created once per process."""
    directory = Path(tempfile.mkdtemp())
    write_corpus(directory)
    write_labelled(directory)
    return str(directory), str(directory / "cache")


@functools.cache
def losses_on(model: str, mesh: tuple[str, ...]) -> list[float]:
    """Return the losses of the first steps, in float64."""
    with jax.enable_x64(True):
        return first_losses(model, (*FLOAT64, *mesh))


def first_losses(model: str, more: tuple[str, ...], platform: str | None = None) -> list[float]:
    """Return the losses of the first steps with more overrides, on a platform as in `make_run`."""
    config, overrides = MODELS[model]
    where = overrides_of_data(config, overrides)
    run, corpus = make_run(
        (*SHARED, *where, *overrides, *more), str(ROOT / "configs" / f"{config}.py"), platform
    )
    return losses(run, corpus, NUM_STEPS)


def overrides_of_data(config: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return the overrides for the data of a model."""
    directory, cache = corpora()
    where = (f"data.cache_dir={cache}",)
    if config in _OF_IMAGES:
        return where
    files = "labelled.jsonl" if "data.objective=classification" in overrides else "*.txt"
    return (*_TEXT, *where, f"data.paths={directory}/{files}")


def applies(model: str, mesh: str) -> bool:
    """Return whether a model can run on a mesh."""
    return MODELS[model][0] not in _OF_IMAGES or not re.search("vocab|context", mesh)


def deviation(model: str, mesh: str) -> float:
    """Return the largest relative difference between losses on a mesh and on one device."""
    expected = losses_on(model, ())
    found = losses_on(model, MESHES[mesh])
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def table(deviations: dict[tuple[str, str], float]) -> str:
    """Format the table for the docs."""
    rows = [f"| model | {' | '.join(MESHES)} |", "|---" * (1 + len(MESHES)) + "|"]
    for model in MODELS:
        found = (deviations.get((model, mesh)) for mesh in MESHES)
        cells = (DOES_NOT_APPLY if value is None else f"{value:.0e}" for value in found)
        rows.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    pairs = [(model, mesh) for model in MODELS for mesh in MESHES if applies(model, mesh)]
    found = {(model, mesh): deviation(model, mesh) for model, mesh in pairs}
    text = DOCS.read_text()
    before = text.partition(START)[0]
    after = text.partition(END)[2]
    DOCS.write_text(f"{before}{START}\n{table(found)}\n{END}{after}")


if __name__ == "__main__":
    from distributed.startup import start
    from sharding.mesh import MeshConfig

    start(MeshConfig(data=8))
    main()
