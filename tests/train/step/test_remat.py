"""Rematerialization and offloading of activations do not change the losses."""

import re

import jax
import numpy as np
import pytest

from sharding.jaxprs import walk
from sharding.memory import HOST
from tests.runs import FLOAT64, ROOT, TINY, losses, make_run, reference_losses

NAMES = "qkv,attention,attention_out,mlp"
#: What layers keep, and further overrides.
LEVELS = {
    "nothing": ("full",),
    "one": ("attention_out",),
    "some": ("qkv,attention",),
    "all names": (NAMES,),
    "products": ("dots",),
    "everything": ("none",),
    "nothing, names on the host": ("full", f"memory.offload_activations={NAMES}"),
    "some, some on the host": ("qkv", "memory.offload_activations=mlp"),
    "everything, some on the host": ("none", "memory.offload_activations=qkv,mlp"),
}
MESHES = {
    "one device": (),
    "data=4, ZeRO 3": ("mesh.data=4", "memory.zero_stage=3"),
    "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
    "2x2x2, nothing recomputed by the pipeline": (
        "mesh.pipeline=2",
        "mesh.data=2",
        "mesh.model=2",
    ),
    "zero bubble": ("mesh.pipeline=2", "pipeline.schedule=zero_bubble"),
}
#: The meshes on which stages are recomputed.
RECOMPUTES = {"data=4, ZeRO 3", "2x2x2"}


#: Cases that CI runs; `-m slow` adds the others.
CHOSEN = {
    *((level, "2x2x2, nothing recomputed by the pipeline") for level in LEVELS),
    ("everything, some on the host", "one device"),
    ("some, some on the host", "data=4, ZeRO 3"),
    ("nothing, names on the host", "zero bubble"),
}


def combinations():
    for level in LEVELS:
        for mesh in MESHES:
            is_slow = (level, mesh) not in CHOSEN
            yield pytest.param(level, mesh, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.slow(
    only=[
        "one-2x2x2, nothing recomputed by the pipeline",
        "all names-2x2x2, nothing recomputed by the pipeline",
        "products-2x2x2, nothing recomputed by the pipeline",
        "nothing, names on the host-2x2x2, nothing recomputed by the pipeline",
        "everything, some on the host-2x2x2, nothing recomputed by the pipeline",
    ]
)
@pytest.mark.thorough
@pytest.mark.drawn(2)
@pytest.mark.parametrize(("level", "mesh"), list(combinations()))
def test_losses_equal_one_device_without_remat(level, mesh, corpus_overrides):
    with jax.enable_x64(True):
        base = (*TINY, *corpus_overrides, *FLOAT64)
        remat, *others = LEVELS[level]
        stage = "stage," if mesh in RECOMPUTES else ""
        overrides = (*base, *MESHES[mesh], f"train.remat={stage}{remat}", *others)
        found = losses(*make_run(overrides), 4)
        # Rounding errors in float64 are about 1e-16 per sum; bugs cause far larger differences.
        np.testing.assert_allclose(found, reference_losses(base, 4), rtol=1e-9, atol=0)


def buffers(run) -> dict[bool, set[tuple]]:
    """Return whether on the host -> shapes of all arrays that the step's loops return."""
    found: dict[bool, set[tuple]] = {True: set(), False: set()}

    for eqn, _ in walk(run.trace_train_step().jaxpr.eqns):
        if eqn.primitive.name == "scan":
            for v in eqn.outvars:
                found[v.aval.memory_space == HOST].add(v.aval.shape)
    return found


@pytest.mark.thorough
def test_named_activations_are_in_the_configured_memory(corpus_overrides):
    base = (*TINY, *corpus_overrides, "train.remat=full")
    # [slots of the buffer, layers, batch, sequence, mlp]; two microbatches of 8.
    mlp = (1, 4, 8, 16, 128)
    block_input = (1, 4, 8, 16, 32)
    plain = buffers(make_run(base)[0])
    assert not plain[True] and mlp not in plain[False] and block_input in plain[False]
    kept = buffers(make_run((*base, "train.remat=mlp"))[0])
    assert not kept[True] and mlp in kept[False]
    moved = buffers(make_run((*base, "memory.offload_activations=mlp"))[0])
    assert mlp in moved[True] and {shape[-3:] for shape in moved[True]} == {mlp[-3:]}
    assert mlp not in moved[False] and block_input in moved[False]


@pytest.mark.thorough
def test_every_level_recomputes_less_than_the_one_before(corpus_overrides):
    """Measured as FLOPs of the compiled step; its memory changes the other way round."""
    base = (*TINY, *corpus_overrides, "model.dropout=0.0")
    found = []
    for remat in ("full", "attention_out", "qkv,attention_out", NAMES):
        run, _ = make_run((*base, f"train.remat={remat}"))
        cost = run.compile_train_step().cost_analysis()
        memory = run.compile_train_step().memory_analysis()
        assert cost is not None and memory is not None
        found.append((cost["flops"], memory.temp_size_in_bytes))
    flops, num_bytes = zip(*found, strict=True)
    assert list(flops) == sorted(flops, reverse=True) and len(set(flops)) == len(flops)
    assert list(num_bytes) == sorted(num_bytes) and len(set(num_bytes)) == len(num_bytes)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("config", ["gpt2", "opt", "llama", "roberta", "t5"])
def test_every_model_names_the_same_activations(config, corpus_overrides):
    """Read from an error message that lists the names."""
    file = str(ROOT / "configs" / f"{config}.py")
    tiny = ["data.name=text", "data.tokenizer=bytes", *corpus_overrides]
    message = "names an activation 'keys'; choose names of activations: "
    with pytest.raises(ValueError, match=message + ", ".join(sorted(NAMES.split(",")))):
        make_run((*tiny, "memory.offload_activations=keys"), file)


def test_unknown_level_is_refused_with_levels_and_names(corpus_overrides):
    message = (
        "train.remat='mpl': no block of GPT2 names an activation 'mpl'; choose none, full, dots, "
        "or names of activations: attention, attention_out, mlp, qkv"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_run((*TINY, *corpus_overrides, "train.remat=mpl"))
    with pytest.raises(ValueError, match="contains an empty name"):
        make_run((*TINY, *corpus_overrides, "train.remat=mlp,"))
