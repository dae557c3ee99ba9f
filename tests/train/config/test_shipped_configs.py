"""The configs in configs/: they are valid, fit their meshes and are documented."""

import dataclasses
import importlib
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from models.registry import find_model
from sharding.mesh import make_mesh
from tests.runs import ROOT
from tests.train.config.loading import run_of
from train.config.inherit_config import OF_THE_RUN
from train.config.schema import FROM_DATA
from train.run.assemble import assemble_run

#: Configs that need a checkpoint (see test_init_from.py).
CONTINUED = ("opt_finetune", "bert_classify", "chat_finetune", "dpo")
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
@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", shipped())
def test_shipped_config_resolves_and_fits_its_mesh(name):
    file, _, argument = name.partition(":")
    path = str(ROOT / "configs" / f"{file}.py") + (f":{argument}" if argument else "")
    run = run_of(config=path)
    # Only shapes and shardings are computed, so 175 B parameters need no memory.
    vocab_size = run.data.vocab_size if run.data.reads_text else None
    made = assemble_run(run, make_mesh(run.mesh, jax.devices()), vocab_size=vocab_size)
    assert made.num_params > 0


@pytest.mark.parametrize("name", [*NAMES, *CONTINUED])
def test_shipped_config_states_only_what_differs_from_a_default(name, monkeypatch):
    """Every assignment changes the config, or a key that would else come from `init_from`."""
    assignments = []
    set_value = ConfigDict.__setattr__

    def record(section: Any, key: str, value: Any) -> None:
        if not key.startswith("_"):
            assignments.append((section, key, key in section, section.get(key), value))
        set_value(section, key, value)

    monkeypatch.setattr(ConfigDict, "__setattr__", record)
    config: Any = importlib.import_module(f"configs.{name}").get_config()
    model = config.model.name
    fields = dataclasses.fields(find_model(model).Config) if model else ()
    defaults = {field.name: field.default for field in fields}
    redundant = []
    for section, key, is_set, before, value in assignments:
        is_new_in_model = section is config.model and not is_set
        before = defaults.get(key) if is_new_in_model else before
        unset = FROM_DATA if section is config.model else ()
        may_come_from_checkpoint = is_new_in_model and key in ("name", *OF_THE_RUN)
        if not may_come_from_checkpoint and (value == before or key in unset and value is None):
            redundant.append(f"{key} = {value}")
    assert assignments and redundant == []


@pytest.mark.parametrize("name", [*NAMES, *CONTINUED])
def test_shipped_config_documents_hardware_and_command(name):
    text = importlib.import_module(f"configs.{name}").__doc__ or ""
    assert f"python -m train.main --config=configs/{name}.py" in text
    assert "Hardware:" in text
    assert "TIME" not in text and "LOSS" not in text, "the measured figures are not filled in"
