"""Training state in host memory: the same losses, and one layer at a time on the device."""

import re
import shutil
from collections import Counter

import jax
import numpy as np
import pytest

from data.batches import train_batches
from sharding.jaxprs import walk
from sharding.memory import DEVICE, HOST
from tests.runs import FLOAT64, ROOT, TINY, arguments, losses, make_run, reference_losses
from train.main import main
from train.reporting.metrics import read_metrics

pytestmark = pytest.mark.drawn(3, among="thorough")

HOSTED = "memory.placement=host"
PLACEMENTS = {
    "optimizer": (HOSTED,),
    "half the optimizer": (HOSTED, "memory.offload_optimizer_fraction=0.5"),
    "all": (HOSTED, "memory.offload_parameters_fraction=1.0"),
    "half the parameters": (
        HOSTED,
        "memory.offload_optimizer_fraction=0.0",
        "memory.offload_parameters_fraction=0.5",
    ),
}
MESHES = {
    "one device": (),
    "data=4": ("mesh.data=4",),
    "2x2x2": ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2"),
}
LEVELS = {
    "nothing kept": ("train.remat=stage,full",),
    "names kept and moved": ("train.remat=stage,attention_out", "memory.offload_activations=mlp"),
    "everything kept": ("train.remat=stage",),
}
#: Cases that CI runs; `-m slow` adds the others.
CHOSEN = {
    *((placement, "2x2x2", 3, "names kept and moved") for placement in PLACEMENTS),
    ("all", "one device", 0, "nothing kept"),
    ("optimizer", "data=4", 1, "everything kept"),
    ("optimizer", "2x2x2", 0, "everything kept"),
}


def combinations():
    for placement in PLACEMENTS:
        for mesh in MESHES:
            for stage in (0, 1, 2, 3):
                streams = placement in ("all", "half the parameters")
                if streams and stage == 0 and mesh != "one device":
                    continue  # rejected, see the last test
                for level in LEVELS:
                    is_slow = (placement, mesh, stage, level) not in CHOSEN
                    marks = [pytest.mark.slow] * is_slow
                    yield pytest.param(placement, mesh, stage, level, marks=marks)


@pytest.mark.slow(
    only=[
        "optimizer-data=4-1-everything kept",
        "optimizer-2x2x2-0-everything kept",
        "half the parameters-2x2x2-3-names kept and moved",
    ]
)
@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize(("placement", "mesh", "stage", "level"), list(combinations()))
def test_losses_equal_one_device(placement, mesh, stage, level, corpus_overrides):
    with jax.enable_x64(True):
        base = (*TINY, *corpus_overrides, *FLOAT64)
        changes = (*PLACEMENTS[placement], *MESHES[mesh], *LEVELS[level])
        found = losses(*make_run((*base, *changes, f"memory.zero_stage={stage}")), 4)
        # Rounding errors in float64 are about 1e-16 per sum; bugs cause far larger differences.
        np.testing.assert_allclose(found, reference_losses(base, 4), rtol=1e-9, atol=0)


def kinds(state) -> dict[str, str]:
    """Return path -> memory kind for every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in leaves}


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["optimizer", "half the parameters", "all"])
def test_state_is_in_the_configured_memory_before_and_after_a_step(placement, corpus_overrides):
    run, corpus = make_run((*TINY, *corpus_overrides, "mesh.fsdp=2", *PLACEMENTS[placement]))
    abstract = kinds(run.state_layout.abstract)
    state = run.state_layout.initial()
    assert kinds(state) == abstract
    assert kinds(run.state_layout.from_portable(run.state_layout.to_portable(state))) == abstract
    batches = train_batches(corpus, run.config.data, run.rows, seed=run.config.train.seed)
    batch = run.place_batch(next(batches))
    assert kinds(run.compile_train_step()(state, batch)[0]) == abstract

    def on_host(*words: str) -> list[bool]:
        chosen = [kind for path, kind in abstract.items() if any(w in path for w in words)]
        return [kind == "pinned_host" for kind in chosen]

    masters = on_host(".params[")
    moments = on_host(".mu[", ".nu[")
    assert all(masters) == (placement != "half the parameters") and any(masters)
    assert all(moments) == any(moments) == (placement != "half the parameters")
    assert not any(on_host(".step", ".count", ".num_skipped"))


def moved(run) -> dict[str, Counter]:
    """Return the shapes of arrays that the traced step copies to the host and to the device."""
    found = {"to host": Counter(), "to device": Counter()}

    for eqn, _ in walk(run.trace_train_step().jaxpr.eqns):
        if eqn.primitive.name == "device_put":
            for v, out in zip(eqn.invars, eqn.outvars, strict=True):
                spaces = v.aval.memory_space, out.aval.memory_space
                if spaces == (HOST, DEVICE):
                    found["to device"][out.aval.shape] += 1
                if spaces == (DEVICE, HOST):
                    found["to host"][out.aval.shape] += 1
    return found


@pytest.mark.thorough
def test_device_gets_one_layer_at_a_time(corpus_overrides):
    """No whole stack is copied to the device, except the step's own copy of the parameters."""
    base = (*TINY, *corpus_overrides)
    assert not any(moved(make_run(base)[0]).values())
    for placement in ("optimizer", "all"):
        found = moved(make_run((*base, *PLACEMENTS[placement]))[0])
        whole = (4, 32, 128)  # the up kernels of four layers
        up = found["to device"][whole[1:]]
        in_update = found["to device"][1, *whole[1:]]
        assert found["to device"][whole] == 0
        assert found["to host"][whole] == 0
        # The update copies master weights and two moments; hosted gradients are copied twice, for
        # the norm and for the update.
        assert in_update == (3 if placement == "optimizer" else 5)
        assert found["to host"][1, *whole[1:]] == 3
        # Parameters are copied once for the step's copy; or in the forward and the backward pass,
        # together with the gradients accumulated so far.
        assert up == (1 if placement == "optimizer" else 3)


@pytest.mark.thorough
def test_offloading_supports_several_stacks_stages_and_skipped_steps(corpus_overrides):
    """T5's two stacks, on uneven stages that share the vocab, with everything in host memory."""
    shape = ("model.num_layers=2", "model.num_decoder_layers=2", "model.head_dim=6")
    tiny = (
        *(override for override in TINY if "num_layers" not in override),
        *corpus_overrides,
        *FLOAT64,
        *shape,
        "model.mlp_dim=48",
        "train.skip_spikes=1.001",
    )
    mesh = ("mesh.pipeline=2", "mesh.data=2", "pipeline.share_vocab=true", "memory.zero_stage=3")
    uneven = ("pipeline.layers_per_stage=1,3",)
    with jax.enable_x64(True):
        file = str(ROOT / "configs" / "t5.py")
        plain = losses(*make_run(tiny, file), 3)
        found = losses(*make_run((*tiny, *mesh, *uneven, *PLACEMENTS["all"]), file), 3)
        np.testing.assert_allclose(found, plain, rtol=1e-9, atol=0)


@pytest.mark.thorough
def test_offloaded_step_needs_at_most_one_more_copy_of_the_parameters(corpus_overrides):
    """State that the update does not change in place would be copied as a whole."""
    base = (*TINY, *corpus_overrides, "model.embed_dim=64")

    def temporaries(*overrides: str) -> tuple[int, int]:
        run, _ = make_run((*base, *overrides))
        memory = run.compile_train_step().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes, 4 * run.num_params

    (plain, copy) = temporaries()
    (hosted, _) = temporaries(*PLACEMENTS["optimizer"])
    assert hosted - plain <= copy


@pytest.mark.thorough
def test_run_resumes_with_equal_losses_on_another_placement_and_mesh(corpus_overrides, tmp_path):
    overrides = (*TINY, *corpus_overrides, "eval.every_steps=10", "checkpoint.every_steps=5")
    assert main(arguments(tmp_path / "plain", (*overrides, "train.num_steps=10"))) == 0
    parts = (
        ("train.num_steps=10", *PLACEMENTS["all"], "checkpoint.max_to_keep=9"),
        (
            "train.num_steps=10",
            *PLACEMENTS["optimizer"],
            "mesh.pipeline=2",
            "pipeline.chunks=2",
            "pipeline.schedule=interleaved_1f1b",
        ),
    )
    for part in parts:
        workdir = tmp_path / "parts"
        assert main(arguments(workdir, (*overrides, *part))) == 0
        shutil.rmtree(workdir / "checkpoints" / "10")
    values = [
        [(line["step"], line.get("loss"), line.get("eval_loss")) for line in lines]
        for lines in (
            read_metrics(tmp_path / part / "metrics.jsonl") for part in ("plain", "parts")
        )
    ]
    plain, found = (np.array(each, float) for each in values)
    # float32 with another order of summation on the mesh, and five steps of Adam.
    np.testing.assert_allclose(found, plain, rtol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("memory.placement=disk",),
            "memory.placement='disk' is unknown; choose device, host or auto",
        ),
        (("memory.offload_parameters_fraction=0.5",), "requires memory.placement=host, not device"),
        ((HOSTED, "memory.offload_optimizer_fraction=2"), "=2.0 must be from 0 to 1"),
        (
            (*PLACEMENTS["all"], "mesh.data=2"),
            "on mesh.data=2 × mesh.fsdp=1 no parameter of a stack can be read from the host one "
            "layer at a time, because all are replicated; set memory.zero_stage to 1, 2 or 3",
        ),
        (
            (HOSTED, "optimizer.name=tests.runs:factored"),
            "memory.placement=host updates one layer at a time, but optimizer.name="
            "'tests.runs:factored' may need whole arrays; set optimizer.name=adamw",
        ),
        (
            (HOSTED, "optimizer.name=lamb"),
            "may need whole arrays; set optimizer.name",
        ),
    ],
)
def test_unsupported_placements_are_rejected(overrides, message, corpus_overrides):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_run((*TINY, *corpus_overrides, *overrides))
