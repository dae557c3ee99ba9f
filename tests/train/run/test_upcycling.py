"""Runs with experts that start from dense models compute the same as these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convert import from_hf
from convert.from_hf import load
from convert.source import read_source
from data.corpus import load_corpus
from sharding.mesh import make_mesh
from tests.hugging_face import save_model
from tests.runs import ROOT, write_corpus
from train.config.config_files import load as load_config
from train.config.inherit_config import inherit_config
from train.config.overrides import Overrides
from train.config.schema import validate_config
from train.run.assemble import assemble_run
from train.run.init_from import start_params

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "mlp_bias": True,
}
OVERRIDES = (
    "data.name=text",
    "data.sequence_length=16",
    "data.global_batch_size=8",
    "model.num_experts=4",
    "model.expert_bias=true",
)
TOKENS = jnp.arange(3, 15)[None]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dense")
    save_model(directory, "LlamaForCausalLM", **LLAMA)
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def started(path, overrides):
    """Return the model of a run of configs/mixtral.py before its first step."""
    overrides = (*overrides, f"init_from={path}")
    source = read_source(path)
    config = load_config(str(ROOT / "configs" / "mixtral.py"), overrides)
    inherit_config(config, source, Overrides.of(overrides))
    validated = validate_config(config)
    data = load_corpus(validated.data, validated.images)
    devices = jax.devices()[: validated.mesh.num_devices]
    mesh = make_mesh(validated.mesh, devices)
    run = assemble_run(validated, mesh, vocab_size=data.vocab_size)
    return nnx.merge(nnx.graphdef(run.model), jax.device_get(start_params(run, source)))


@pytest.mark.thorough
def test_first_forward_equals_the_dense_model(dense, corpus, tmp_path, caplog):
    caplog.set_level("INFO")
    model = started(dense, (*corpus, *OVERRIDES))
    assert "each expert starts as a copy of the MLP of its layer" in caplog.text
    expected = load(dense)(TOKENS)
    np.testing.assert_allclose(model(TOKENS), expected, rtol=1e-4, atol=1e-4)
    mlp = model.decoder.layers.mlp
    assert mlp.up.shape == (2, 4, 32, 48) and mlp.router[...].std() > 0


@pytest.mark.thorough
def test_experts_on_a_mesh_start_from_a_dense_run(dense, corpus, tmp_path):
    model = started(dense, (*corpus, *OVERRIDES))
    from_hf.convert(dense, tmp_path / "run")
    again = started(tmp_path / "run", (*corpus, *OVERRIDES, "mesh.expert=2", "mesh.model=2"))
    leaves = (jax.tree.leaves(nnx.state(each)) for each in (model, again))
    for one, two in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.expert_dim=24", "model.expert_dim=24, but all experts start as copies .* needs 48"),
        ("model.dense_layers=1", "model.dense_layers=1, but all experts .* needs 0; set it to"),
        ("model.expert_bias=false", "model.expert_bias=False, but all experts .* needs True"),
    ],
)
def test_experts_that_are_no_copies_are_refused(change, message, dense, corpus):
    with pytest.raises(ValueError, match=message):
        started(dense, (*corpus, *OVERRIDES, change))
