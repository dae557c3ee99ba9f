"""Training of adapters: equal on every mesh, resumable, and the model itself stays as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convert import to_hf
from convert.from_hf import load
from convert.source import read_source
from data.corpus import load_corpus
from models.adapters import is_adapter
from sharding.mesh import make_mesh
from tests.hugging_face import OPT, save_model
from tests.runs import FLOAT64, ROOT, TINY, arguments, losses, make_run, placed_batch
from train.config.config_files import load as load_config
from train.config.inherit_config import inherit_config
from train.config.overrides import Overrides
from train.config.schema import validate_config
from train.main import main
from train.run.assemble import assemble_run
from train.run.init_from import start_params

pytestmark = pytest.mark.drawn(1, among="thorough")

NUM_STEPS = 5
ADAPTERS = ("lora.rank=4", "lora.dropout=0.1", "optimizer.learning_rate=0.03")
VARIANTS = {
    "LoRA": ADAPTERS,
    "DoRA": (*ADAPTERS, "lora.use_dora=true", "lora.use_rslora=true"),
    "some layers, and norms": (*ADAPTERS, "lora.targets=mlp.*", "lora.also_trained=*_norm.*"),
}
CUBE = ("mesh.pipeline=2", "mesh.data=2", "mesh.model=2")
HOSTED = ("memory.placement=host", "memory.offload_parameters_fraction=1.0")
MESHES = {
    "data=4": ("mesh.data=4",),
    "fsdp=4": ("mesh.fsdp=4",),
    "model=2": ("mesh.model=2",),
    "context=2, model=2": ("mesh.context=2", "mesh.model=2"),
    "2x2x2": CUBE,
    "2x2x2, zero bubble": (*CUBE, "pipeline.schedule=zero_bubble", "memory.zero_stage=2"),
    "2x2x2, interleaved": (*CUBE, "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"),
    "data=4, from the host": ("mesh.data=4", "memory.zero_stage=3", *HOSTED),
    "2x2x2, from the host": (*CUBE, "memory.zero_stage=3", *HOSTED),
}


@functools.cache
def expected(variant: str, corpus_overrides: tuple[str, ...]) -> list[float]:
    run, corpus = make_run((*TINY, *FLOAT64, *corpus_overrides, *VARIANTS[variant]))
    return losses(run, corpus, NUM_STEPS)


@pytest.mark.slow(
    only=[
        "LoRA-data=4",
        "LoRA-model=2",
        "LoRA-2x2x2, interleaved",
        "LoRA-data=4, from the host",
        "DoRA-model=2",
        "DoRA-fsdp=4",
        "DoRA-2x2x2, from the host",
    ]
)
@pytest.mark.parametrize(
    ("variant", "mesh"),
    [
        *(("LoRA", mesh) for mesh in MESHES),
        *(("DoRA", mesh) for mesh in ("model=2", "fsdp=4", "2x2x2", "2x2x2, from the host")),
        ("some layers, and norms", "2x2x2"),
    ],
)
@pytest.mark.thorough
@pytest.mark.drawn(2)
def test_losses_equal_one_device(variant, mesh, corpus_overrides):
    overrides = (*TINY, *FLOAT64, *corpus_overrides, *VARIANTS[variant], *MESHES[mesh])
    with jax.enable_x64(True):
        found = losses(*make_run(overrides), NUM_STEPS)
        reference = expected(variant, corpus_overrides)
    assert found == pytest.approx(reference, rel=1e-9, abs=0)
    assert reference[-1] < reference[0]


@pytest.mark.thorough
def test_only_adapters_change_and_have_moments(corpus_overrides):
    trained = ("precision.frozen=bfloat16", "lora.also_trained=final_norm.*")
    run, corpus = make_run((*TINY, *corpus_overrides, *ADAPTERS, *trained))
    before = jax.device_get(run.state_layout.initial().params)
    state = run.state_layout.initial()
    for _ in range(2):
        state, _ = run.compile_train_step()(state, placed_batch(run, corpus))
    for path, old in jax.tree_util.tree_leaves_with_path(before):
        names = [key.key for key in path]
        new = functools.reduce(lambda tree, name: tree[name], names, state.params)
        is_trained = is_adapter(names) or names[0] == "final_norm"
        assert bool((new != old).any()) == is_trained, names
        assert old.dtype == (jnp.float32 if is_trained else jnp.bfloat16), names
    moments = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(state.opt_state)]
    of_adapters = [name for name in moments if "['lora']" in name]
    assert of_adapters and all("lora" in n or "final_norm" in n for n in moments if "['" in n)


def train(directory, *overrides: str, config: str = "gpt2") -> int:
    flags = arguments(directory, overrides)[1:]
    return main([f"--config={ROOT}/configs/{config}.py", *flags])


@pytest.mark.thorough
def test_other_runs_start_from_adapters(corpus_overrides, tmp_path, capsys):
    whole = tmp_path / "whole"
    assert train(whole, *TINY, *corpus_overrides, *ADAPTERS, "train.num_steps=3") == 0
    trained = load(whole)
    tokens = jnp.arange(8)[None]

    to_hf.convert(whole, tmp_path / "merged", merge=True)
    np.testing.assert_allclose(load(tmp_path / "merged")(tokens), trained(tokens), atol=1e-4)

    def started(*overrides: str):
        run, _ = make_run((*TINY, *corpus_overrides, *overrides))
        return nnx.merge(nnx.graphdef(run.model), start_params(run, read_source(whole)))

    np.testing.assert_array_equal(started(*ADAPTERS)(tokens), trained(tokens))
    np.testing.assert_allclose(started()(tokens), trained(tokens), atol=1e-4)
    with pytest.raises(ValueError, match=r"has adapters with lora.rank=4, lora.alpha=16.0"):
        started(*ADAPTERS, "lora.rank=2")
    with pytest.raises(ValueError, match=r"the run has others; set the same"):
        started(*ADAPTERS, "lora.alpha=2")

    changed = (*TINY, *corpus_overrides, *ADAPTERS, "train.num_steps=3", "lora.alpha=2")
    capsys.readouterr()
    assert train(whole, *changed) == 2
    assert "lora.alpha: 16.0 -> 2.0" in capsys.readouterr().err


@pytest.mark.thorough
def test_adapters_of_a_hugging_face_model_are_written_for_peft(corpus_overrides, tmp_path):
    save_model(tmp_path / "opt", "OPTForCausalLM", **OPT)
    overrides = (
        *(o for o in TINY if not o.startswith(("model.", "data.tokenizer"))),
        *corpus_overrides,
        *ADAPTERS,
        "lora.use_dora=true",
        f"init_from={tmp_path / 'opt'}",
    )
    tokens = jnp.arange(8)[None]
    config = "opt_finetune"
    assert train(tmp_path / "run", *overrides, "train.num_steps=3", config=config) == 0
    to_hf.convert(tmp_path / "run", tmp_path / "adapter")
    source = read_source(tmp_path / "adapter")
    assert source.lora.use_dora and source.lora.rank == 4
    trained = load(tmp_path / "run")(tokens)
    np.testing.assert_array_equal(load(tmp_path / "adapter")(tokens), trained)
    assert np.abs(trained - load(tmp_path / "opt")(tokens)).max() > 0.01


@pytest.mark.thorough
def test_magnitudes_start_as_the_norms_of_loaded_kernels(corpus_overrides, tmp_path):
    save_model(tmp_path / "opt", "OPTForCausalLM", **OPT)
    overrides = (
        *(o for o in TINY if not o.startswith(("model.", "data.tokenizer"))),
        *corpus_overrides,
        *ADAPTERS,
        "lora.use_dora=true",
        f"init_from={tmp_path / 'opt'}",
    )
    source = read_source(tmp_path / "opt")
    config = load_config(str(ROOT / "configs" / "opt_finetune.py"), overrides)
    inherit_config(config, source, Overrides.of(overrides))
    validated = validate_config(config)
    corpus = load_corpus(validated.data, validated.images)
    mesh = make_mesh(validated.mesh, jax.devices())
    run = assemble_run(validated, mesh, vocab_size=corpus.vocab_size)
    params = start_params(run, source)
    up = params["decoder"]["layers"]["mlp"]["up"]
    norms = np.linalg.norm(np.asarray(up["kernel"], np.float64), axis=1)
    np.testing.assert_allclose(up["lora"]["magnitude"], norms, rtol=1e-6)
    assert not np.asarray(up["lora"]["b"]).any()
