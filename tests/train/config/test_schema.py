"""Resolving a config: unknown keys, wrong types, and sizes that come from the data."""

import dataclasses
from typing import Any

import pytest
from ml_collections import ConfigDict

from sharding.mesh import MeshConfig
from tests.runs import CONFIG, ROOT
from tests.train.config.loading import load, run_of
from train.config.schema import validate_config

USERS_CONFIG = """
from configs import common
from ml_collections import ConfigDict

def get_config(width="8"):
    config = common.get_config()
    config.model = ConfigDict(dict(name="users_model:Net", width=int(width)))
    return config
"""


USERS_MODEL = """
import dataclasses

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    width: int
    vocab_size: int

class Net:
    Config = Config

class Bare:
    pass
"""


@pytest.fixture
def users_config(tmp_path, monkeypatch) -> str:
    """Return the path of a user's config, which uses the user's own model."""
    (tmp_path / "users_config.py").write_text(USERS_CONFIG)
    (tmp_path / "users_model.py").write_text(USERS_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    return str(tmp_path / "users_config.py")


def edited(section: str, key: str, value: object) -> Any:
    """Return the config with a value that a config file may set, unchecked, unlike an override."""
    config = load(CONFIG)
    with config.ignore_type(), config.unlocked():
        config[section][key] = value
    return config


@pytest.mark.parametrize(
    "section, key, value, message",
    [
        ("train", "num_stpes", 3, r"train\.num_stpes: unknown key.* train\.num_steps"),
        ("model", "layers", 3, r"model\.layers: unknown key.* model\.num_layers"),
        (
            "model",
            "name",
            "gpt3",
            r"model\.name='gpt3' is neither one of gpt2, opt, llama, .*, clip nor an import path",
        ),
        (
            "model",
            "name",
            "json:dumps",
            r"model\.name='json:dumps': .* must have a dataclass `Config`",
        ),
        ("train", "num_steps", "3", r"train\.num_steps='3' must be of type int"),
        ("train", "num_steps", True, r"train\.num_steps=True must be of type int"),
        ("train", "num_steps", 0, r"train\.num_steps=0 must be at least 1"),
        (
            "train",
            "remat",
            "mlp,",
            r"train\.remat='mlp,' contains an empty name; choose auto, none, full",
        ),
        ("train", "seed", -1, r"train\.seed=-1 must"),
        ("train", "num_steps", 2**31, r"train\.num_steps=2147483648 must be an integer from"),
        ("mesh", "pipeline", 2**31, r"mesh\.pipeline=2147483648 must be an integer from"),
        ("data", "global_batch_size", 2**31, r"global_batch_size=2147483648 must be an integer"),
        ("model", "embed_dim", 10**400, r"model\.embed_dim=an integer of 400 digits must be"),
        ("model", "dropout", float("inf"), r"model\.dropout=inf must be finite"),
        ("optimizer", "learning_rate", float("inf"), r"learning_rate=inf must be finite"),
        (
            "optimizer",
            "frozen",
            [[1]],
            r"optimizer\.frozen=\(\[1\],\) must be a tuple of",
        ),
        ("model", "name", {"a": 1}, r"model\.name=\{'a': 1\} must be a string; choose gpt2"),
        (
            "train",
            "init_labels",
            "all",
            r"train\.init_labels='all' is unknown; choose by_name",
        ),
        (
            "train",
            "init_labels",
            "new",
            r"train\.init_labels='new' needs config\.init_from",
        ),
        ("eval", "num_batches", "all", r"eval\.num_batches='all' must be of type int"),
        ("eval", "num_batches", 0, r"eval\.num_batches=0 must be at least 1, or None"),
        ("data", "seed", 3, r"data\.seed: unknown key"),
        ("data", "paths", "a.txt", r"data\.paths='a\.txt' must be"),
        ("mesh", "model", 2.0, r"mesh\.model=2\.0 must be of type int"),
        ("precision", "compute", "int8", r"precision\.compute='int8' is unknown"),
        ("precision", "compute", "float64", "set both to float64, or neither"),
        ("pipeline", "schedule", "zigzag", r"pipeline\.schedule='zigzag' is unknown"),
    ],
)
def test_bad_value_in_a_file_is_rejected_with_its_key(section, key, value, message):
    with pytest.raises(ValueError, match=message):
        validate_config(edited(section, key, value))


@pytest.mark.parametrize(
    "key, value",
    [("depths", 2), ("depths", (2, "x")), ("depths", (2, 2.0)), ("image_mean", 0.5)],
)
def test_list_values_of_wrong_types_are_rejected(key, value):
    config = load(str(ROOT / "configs" / "swin.py"))
    with config.unlocked(), config.ignore_type():
        config.model[key] = value
    with pytest.raises(ValueError, match=rf"model\.{key}=.* must be a list of values of type \w+ "):
        validate_config(config)


def test_unknown_section_names_the_nearest():
    config = load(CONFIG)
    with config.unlocked():
        config.optimiser = ConfigDict()
    with pytest.raises(ValueError, match="config.optimiser is unknown.* nearest .* optimizer"):
        validate_config(config)


def test_key_outside_every_section_is_refused_by_name():
    config = load(CONFIG)
    with config.unlocked():
        config.num_steps = 3
    with pytest.raises(ValueError, match="config.num_steps"):
        validate_config(config)


def test_missing_key_is_refused_by_name():
    config = load(CONFIG)
    with config.unlocked():
        del config.train.num_steps
    with pytest.raises(ValueError, match="config.train.num_steps is missing"):
        validate_config(config)


def test_file_without_a_model_lists_the_models():
    config = load(CONFIG)
    with config.unlocked():
        del config.model
    with pytest.raises(ValueError, match="config.model.name is missing; choose gpt2"):
        validate_config(config)


def test_users_own_model_by_import_path(users_config):
    run = run_of("model.width=12", config=f"{users_config}:9")
    assert run.model_config(vocab_size=5) == run.model_class.Config(width=12, vocab_size=5)
    assert run.model_class.__name__ == "Net"
    with pytest.raises(ValueError, match="model.wdith: unknown key.* model.width"):
        run_of("model.wdith=12", config=users_config)
    with pytest.raises(
        ValueError, match=r"model\.name='users_model:Bare': .* must have a dataclass"
    ):
        run_of("model.name=users_model:Bare", config=users_config)
    with pytest.raises(
        ValueError, match=r"model\.name='users_model:Nut': .* nearest names are \['Net'\]"
    ):
        run_of("model.name=users_model:Nut", config=users_config)


def test_model_takes_unset_sizes_from_the_data():
    model = run_of("data.sequence_length=64").model_config(vocab_size=300)
    assert (model.vocab_size, model.max_positions) == (300, 64)
    given = ("model.vocab_size=512", "model.max_positions=256", "data.sequence_length=64")
    model = run_of(*given).model_config(vocab_size=300)
    assert (model.vocab_size, model.max_positions) == (512, 256)


@pytest.mark.parametrize(
    "change, message",
    [
        ("model.vocab_size=299", r"model\.vocab_size=299 is less than .*tokenizer's 300"),
        ("model.max_positions=8", r"model\.max_positions=8 is less than .*sequence_length=128"),
        ("model.num_heads=3", r"model\.num_heads=3 must divide model\.embed_dim=128"),
        ("model.vocab_size=many", r"model\.vocab_size='many' must be"),
    ],
)
def test_model_that_does_not_fit_the_data_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        run_of(change).model_config(vocab_size=300)


def test_model_config_without_a_size_names_the_missing_key():
    config = load(CONFIG)
    with config.unlocked():
        del config.model.num_heads
    with pytest.raises(ValueError, match=r"model\.num_heads is missing"):
        validate_config(config).model_config(vocab_size=300)


def test_indivisible_batch_size_error_names_the_next_that_fits():
    sizes = ("data.global_batch_size=20", "mesh.data=2", "mesh.fsdp=2", "train.num_microbatches=3")
    with pytest.raises(ValueError) as caught:
        run_of(*sizes)
    for part in ("num_microbatches=3", "mesh.data=2", "mesh.fsdp=2", "global_batch_size=20"):
        assert part in str(caught.value)
    assert str(caught.value).endswith("fits is 24")


def test_batch_is_checked_once_a_free_axis_has_its_size():
    run = run_of("data.global_batch_size=20", "mesh.data=-1")
    with pytest.raises(ValueError, match=r"mesh\.data=8.* must divide data\.global_batch_size=20"):
        dataclasses.replace(run, mesh=run.mesh.filled_in(8))
    assert dataclasses.replace(run, mesh=run.mesh.filled_in(4)).mesh == MeshConfig(data=4)


def test_context_that_does_not_divide_the_sequence_is_refused():
    with pytest.raises(ValueError, match=r"mesh\.context=3 must divide data\.sequence_length=128"):
        run_of("mesh.context=3")


def test_a_fraction_of_parameters_by_layer_needs_parameters_that_are_split():
    fraction = "memory.shard_parameters_fraction=0.5"
    message = r"memory\.shard_parameters_fraction=0\.5 requires memory\.zero_stage=3, not 2, or"
    with pytest.raises(ValueError, match=message):
        run_of(fraction, "memory.zero_stage=2")
    assert run_of(fraction, "mesh.fsdp=2").memory.shard_parameters_fraction == 0.5


def test_attention_belongs_to_the_run_not_to_the_model():
    config = load(f"{ROOT}/configs/gpt2.py", ("model.attention=plain",))
    validated = validate_config(config)
    assert validated.model.attention == "plain"
    assert "attention" not in validated.model_fields
    assert validate_config(load(f"{ROOT}/configs/gpt2.py")).model.attention == "auto"


def test_unknown_attention_is_refused():
    config = load(f"{ROOT}/configs/gpt2.py", ("model.attention=fast",))
    with pytest.raises(ValueError, match="model.attention='fast' is unknown; choose auto or plain"):
        validate_config(config)
