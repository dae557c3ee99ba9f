"""Colossal-AI's section `parallel` sets our keys."""

import jax
import pytest

from tests.runs import ROOT, losses, make_run
from tests.train.config.loading import run_of
from train.config.colossal_ai import replace_parallel


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (
            {"pipeline": 2, "tensor": {"mode": "2.5d", "depth": 1, "size": 4}},
            {
                "mesh": {"pipeline": 2, "model": 4},
                "tensor": {"mode": "2.5d", "depth": 1},
            },
        ),
        ({"pipeline": {"size": 4}, "data": 2}, {"mesh": {"data": 2, "pipeline": 4}}),
        (
            {"tensor": {"mode": "1d", "size": 2}},
            {"mesh": {"model": 2}, "tensor": {"mode": "1d"}},
        ),
        ({"tensor": {"mode": None, "size": 1}}, {"mesh": {"model": 1}}),
        ({"tensor": 2}, {"mesh": {"model": 2}}),
    ],
)
def test_section_is_translated(parallel, expected):
    config = {"parallel": parallel}
    replace_parallel(config)
    assert config == expected


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        ({"tensor": {"size": 4, "sequence": True}}, "parallel.tensor.sequence=True is unknown"),
        ({"zero": 1}, "parallel.zero=1 is unknown"),
        (8, r"parallel=8 must be a dict, such as dict\(pipeline=2"),
    ],
)
def test_other_keys_are_refused(parallel, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace_parallel({"parallel": parallel})


def test_shipped_config_has_the_mesh_that_its_section_says():
    run = run_of("tensor.mode=2d", config="configs/gpt2_tensor.py")
    assert (run.mesh.pipeline, run.mesh.model, run.tensor.mode) == (2, 4, "2d")
    assert run.num_replicas == 2


@pytest.mark.thorough
def test_shipped_config_trains_like_one_device():
    """The headline line of Colossal-AI: two stages of four devices in the mode 2.5d."""
    small = [f"model.{name}" for name in ("embed_dim=32", "num_layers=2", "num_heads=4")]
    small += ["data.sequence_length=32", "data.tokenizer=bytes", "precision.compute=float64"]
    small += ["precision.params=float64"]
    with jax.enable_x64(True):
        run, corpus = make_run(small, config=f"{ROOT}/configs/gpt2_tensor.py")
        sizes = dict(run.mesh.shape)
        actual = losses(run, corpus, 3)
        one_device = ["mesh.pipeline=1", "mesh.model=1", "tensor.mode=1d"]
        expected = losses(*make_run([*small, *one_device], f"{ROOT}/configs/gpt2_tensor.py"), 3)
    assert (sizes["pipeline"], sizes["row"], sizes["model"]) == (2, 2, 2)
    assert actual == pytest.approx(expected, rel=0, abs=1e-12)
