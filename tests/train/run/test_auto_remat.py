"""`train.remat=auto`: a run keeps as many activations as fit by the estimate."""

import math

import jax
import pytest

from tests.runs import CONFIG, TINY
from train.config.config_files import load
from train.config.schema import validate_config
from train.run.assemble import assemble_run

#: Six layers, whose activations are a large part of the memory.
_OVERRIDES = (
    *(override for override in TINY if "num_layers" not in override),
    "model.num_layers=6",
    "data.global_batch_size=32",
    "data.paths=texts/*.txt",
)


def run_of(remat, *overrides, budget=math.inf):
    config = validate_config(load(str(CONFIG), (*_OVERRIDES, *overrides, f"train.remat={remat}")))
    mesh = config.make_mesh(jax.devices()[: config.mesh.num_devices])
    return assemble_run(config, mesh, vocab_size=256, device_budget=budget)


@pytest.mark.thorough
def test_the_first_level_that_fits_is_chosen():
    names = ("attention,attention_out,qkv", "attention,qkv", "attention")
    sizes = {
        remat: run_of(remat).estimate_memory().device_bytes
        for remat in ("none", "dots", *names, "full")
    }
    assert [*sizes.values()] == sorted(sizes.values(), reverse=True)
    for remat, size in sizes.items():
        chosen = run_of("auto", budget=1.04 * size).config.train.remat
        assert chosen == next(each for each in sizes if sizes[each] <= size)
        assert sizes[chosen] == size == sizes[remat]
    assert run_of("auto", budget=1).config.train.remat == "full"


def test_all_activations_are_kept_if_they_fit():
    assert run_of("auto").config.train.remat == "none"


@pytest.mark.thorough
def test_stages_of_a_pipeline_keep_less_than_full():
    pipeline = ("mesh.pipeline=2", "train.num_microbatches=4")
    assert run_of("auto", *pipeline, budget=1).config.train.remat == "stage,full"


@pytest.mark.parametrize("value", ["auto,dots", "stage,auto"])
def test_auto_stands_alone(value):
    with pytest.raises(ValueError, match=r"must not add to 'auto', which chooses all of it"):
        run_of(value)
