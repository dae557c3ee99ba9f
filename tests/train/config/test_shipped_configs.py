"""The configs in configs/: they are valid, fit their meshes and are documented."""

import importlib

import jax
import pytest

from sharding.mesh import make_mesh
from tests.runs import ROOT
from tests.train.config.loading import run_of
from train.run.assemble import assemble_run

#: Configs that need a checkpoint (see test_init_from.py).
CONTINUED = ("opt_finetune", "bert_classify", "dpo")
NOT_ALONE = ("__init__", "common", "sizes", *CONTINUED)


NAMES = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem not in NOT_ALONE)


def shipped() -> list[str]:
    """Return every config, once for each of its sizes."""
    sizes = {
        name: getattr(importlib.import_module(f"configs.{name}"), "SIZES", ()) for name in NAMES
    }
    sizes["gpt2_3d"] = sizes["gpt2"]
    arguments = {name: ("", "tiny", *sizes[name]) if sizes[name] else ("",) for name in NAMES}
    return [f"{n}:{a}" if a else n for n in NAMES for a in arguments[n]]


@pytest.mark.thorough(but=["bert", "bert:tiny", "bert:mini"])
@pytest.mark.drawn(40)
@pytest.mark.parametrize("name", shipped())
def test_shipped_config_resolves_and_fits_its_mesh(name):
    file, _, argument = name.partition(":")
    path = str(ROOT / "configs" / f"{file}.py") + (f":{argument}" if argument else "")
    run = run_of(config=path)
    # Only shapes and shardings are computed, so 175 B parameters need no memory.
    vocab_size = None if run.data.reads_images else run.data.vocab_size
    made = assemble_run(run, make_mesh(run.mesh, jax.devices()), vocab_size=vocab_size)
    assert made.num_params > 0


@pytest.mark.parametrize("name", [*NAMES, *CONTINUED])
def test_shipped_config_documents_hardware_and_command(name):
    text = importlib.import_module(f"configs.{name}").__doc__ or ""
    assert f"python -m train.main --config=configs/{name}.py" in text
    assert "Hardware:" in text
    assert "TIME" not in text and "LOSS" not in text, "the measured figures are not filled in"
