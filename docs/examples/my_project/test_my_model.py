"""Tests of this project: `python -m pytest`."""

import jax
import numpy as np
import pytest
from flax import nnx
from my_model import MyConfig, MyModel

jax.config.update("jax_num_cpu_devices", 8)  # simulated, for the mesh of the second test

from train import build_run, train  # noqa: E402


def test_tokens_do_not_see_later_ones():
    """A changed token changes the logits of its own position and of later ones only."""
    config = MyConfig(vocab_size=8, num_layers=2, num_heads=2, embed_dim=16, max_positions=6)
    model = MyModel(config, rngs=nnx.Rngs(0))
    tokens = np.arange(6, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 3] = 7
    differs = np.asarray(model(tokens) != model(changed)).any(axis=2)[0]
    assert differs.tolist() == [False] * 3 + [True] * 3


def test_losses_are_equal_on_every_mesh(tmp_path):
    """The mesh changes how fast the model trains, and not its losses."""
    overrides = {
        "train.num_steps": 10,
        "log.every_steps": 1,
        "eval.every_steps": 0,
        "model.num_layers": 2,
    }
    cube = {"mesh.pipeline": 2, "mesh.context": 2, "mesh.model": 2, "train.num_microbatches": 2}
    losses = []
    for name, mesh in {"one": {}, "cube": cube}.items():
        built = build_run("my_config.py", overrides | mesh, workdir=tmp_path / name)
        losses.append([*train(built).values("loss").values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # float32 rounding
    assert losses[0][-1] < losses[0][0] - 1
