"""Config files, command-line overrides and their validation, and the configs in configs/."""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from sharding.mesh import MeshConfig, make_mesh
from tests.runs import CONFIG, ROOT
from train.config import config_files
from train.config.config_files import default_workdir, differences, overrides, save_yaml, shorten
from train.config.schema import RunConfig, resolve
from train.run.assemble import assemble_run

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


def load(path: str, changes: Sequence[str] = ()) -> Any:
    """Return the config without a static type, since ConfigDict's attributes vary."""
    return config_files.load(path, changes)


def run_of(*changes: str, config: str = CONFIG) -> RunConfig:
    return resolve(load(config, changes))


# Files.


def test_load_passes_the_argument_behind_the_colon():
    assert load(CONFIG).model.num_layers == 4
    assert load(f"{CONFIG}:medium").model.num_layers == 24
    with pytest.raises(ValueError, match="no size 'huge'; choose from tiny, small, medium"):
        load(f"{CONFIG}:huge")


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("none.py", None, r"none\.py: file .*none\.py does not exist"),
        ("empty.py", "x = 1", r"empty\.py defines no function get_config\(\)"),
        ("plain.py", "def get_config(): return 1", r"plain\.py:big: .* takes no argument"),
        ("config.json", "{}", r"config\.json must be a \.py or a \.yaml file"),
        ("broken.yaml", "a: [1", r"broken\.yaml is not valid YAML"),
        ("list.yaml", "- 1", r"list\.yaml must contain sections of keys"),
        ("flat.yaml", "num_steps: 3", r"flat\.yaml must contain sections of keys"),
    ],
)
def test_file_that_is_no_config_is_refused_by_name(name, text, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    argument = ":big" if name == "plain.py" else ""
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(f"{tmp_path / name}{argument}")


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("eval.num_batches=7", "model.vocab_size=300"),
        ("data.name=text", "data.paths=a/*.txt,b.jsonl"),
        ("rules.embed=('data', 'fsdp')", "rules.colour=model", "rules.mlp=none"),
        ("optimizer.learning_rate=1e-30", "optimizer.epsilon=1e-8", "mesh.data=-1"),
    ],
    ids=str,
)
def test_yaml_gives_back_an_equal_config(changes, tmp_path):
    config = load(CONFIG, changes)
    save_yaml(config, tmp_path / "config.yaml")
    again = load(str(tmp_path / "config.yaml"))
    assert again.to_dict() == config.to_dict()
    assert differences(again, config, list(config)) == []
    before = resolve(config)
    after = resolve(again)
    for field in dataclasses.fields(RunConfig):
        if field.name != "source":
            assert getattr(before, field.name) == getattr(after, field.name)


def test_yaml_appears_whole_and_leaves_nothing_beside_it(tmp_path):
    save_yaml(load(CONFIG), tmp_path / "config.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_replayed_yaml_takes_overrides_too(tmp_path):
    save_yaml(load(CONFIG, ["eval.num_batches=7"]), tmp_path / "config.yaml")
    again = load(str(tmp_path / "config.yaml"), ["eval.num_batches=none", "model.dropout=0.5"])
    assert again.eval.num_batches is None and again.model.dropout == 0.5


# Overrides.


@pytest.mark.parametrize(
    "override, expected",
    [
        ("train.num_steps=7", 7),
        ("optimizer.learning_rate=2e-4", 2e-4),
        ("optimizer.clip_norm=2", 2.0),
        ("data.name=text", "text"),
        ("data.tokenizer=123", "123"),
        ("data.paths=a.txt", ("a.txt",)),
        ("data.paths=a/*.txt,b/*.jsonl", ("a/*.txt", "b/*.jsonl")),
        ("data.paths=('a.txt', 'b.txt')", ("a.txt", "b.txt")),
        ("data.paths=", ()),
        ("eval.num_batches=3", 3),
        ("eval.num_batches=None", None),
        ("eval.num_batches=none", None),
        ("mesh.data=-1", -1),
    ],
)
def test_override_takes_the_type_of_its_key(override, expected):
    key = override.partition("=")[0]
    section, name = key.split(".")
    value = load(CONFIG, [override])[section][name]
    assert value == expected and type(value) is type(expected)


def test_later_override_wins():
    assert load(CONFIG, ["train.seed=1", "train.seed=2"]).train.seed == 2


def test_override_of_a_rule_adds_the_row():
    assert run_of("rules.colour=model").rules == {"colour": "model"}


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.num_stpes=3", "train.num_stpes: unknown key.* nearest .* train.num_steps$"),
        ("trian.num_steps=3", "trian.num_steps: unknown key.* nearest .* train.num_steps$"),
        ("num_steps=3", "num_steps: unknown key.* nearest .* train.num_steps$"),
        ("model.layers=3", "model.layers: unknown key.* nearest .* model.num_layers$"),
        ("train.num_steps=many", "train.num_steps=many must be of type int, such as 300"),
        ("train.num_steps=1.5", "train.num_steps=1.5 must be of type int"),
        ("train.num_steps=True", "train.num_steps=True must be of type int"),
        ("optimizer.clip_norm=no", "optimizer.clip_norm=no must be of type float"),
        ("train.num_steps", "train.num_steps has no value; write .*train.num_steps=value"),
    ],
)
def test_bad_override_is_refused_with_key_and_remedy(override, message):
    with pytest.raises(ValueError, match=message):
        load(CONFIG, [override])


def test_overrides_reads_both_spellings_of_the_command_line():
    arguments = ["--config.a.b=1", "--config.c.d", "2", "--config.e.f", "-3", "--config.g.h"]
    assert overrides(arguments) == ["a.b=1", "c.d=2", "e.f=-3", "g.h"]
    with pytest.raises(ValueError, match="unknown argument '--worlddir=x'"):
        overrides(["--worlddir=x"])


# Resolving.


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
            r"model\.name='gpt3' is neither one of gpt2, opt, llama, .*, moco nor an import path",
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
            r"train\.remat='mlp,' contains an empty name; choose none, full",
        ),
        ("train", "seed", -1, r"train\.seed=-1 must"),
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
        ("precision", "compute", "float8", r"precision\.compute='float8' is unknown"),
        ("precision", "compute", "float64", "set both to float64, or neither"),
        ("pipeline", "schedule", "zigzag", r"pipeline\.schedule='zigzag' is unknown"),
    ],
)
def test_bad_value_in_a_file_is_refused_with_its_key(section, key, value, message):
    with pytest.raises(ValueError, match=message):
        resolve(edited(section, key, value))


@pytest.mark.parametrize(
    "key, value",
    [("depths", 2), ("depths", (2, "x")), ("depths", (2, 2.0)), ("image_mean", 0.5)],
)
def test_values_of_another_kind_in_a_list_are_refused(key, value):
    config = load(str(ROOT / "configs" / "swin.py"))
    with config.unlocked(), config.ignore_type():
        config.model[key] = value
    with pytest.raises(ValueError, match=rf"model\.{key}=.* must be a list of values of type \w+ "):
        resolve(config)


def test_unknown_section_names_the_nearest():
    config = load(CONFIG)
    with config.unlocked():
        config.optimiser = ConfigDict()
    with pytest.raises(ValueError, match="config.optimiser is unknown.* nearest .* optimizer"):
        resolve(config)


def test_key_outside_every_section_is_refused_by_name():
    config = load(CONFIG)
    with config.unlocked():
        config.num_steps = 3
    with pytest.raises(ValueError, match="config.num_steps"):
        resolve(config)


def test_missing_key_is_refused_by_name():
    config = load(CONFIG)
    with config.unlocked():
        del config.train.num_steps
    with pytest.raises(ValueError, match="config.train.num_steps is missing"):
        resolve(config)


def test_file_without_a_model_says_which_there_are():
    config = load(CONFIG)
    with config.unlocked():
        del config.model
    with pytest.raises(ValueError, match="config.model.name is missing; choose gpt2"):
        resolve(config)


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
    with pytest.raises(ValueError, match=r"model\.name='users_model:Nut' is neither one of"):
        run_of("model.name=users_model:Nut", config=users_config)


def test_model_takes_from_the_data_what_its_config_leaves_open():
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
        resolve(config).model_config(vocab_size=300)


def test_batch_that_mesh_and_microbatches_do_not_divide_names_the_next_that_fits():
    sizes = ("data.global_batch_size=20", "mesh.data=2", "mesh.fsdp=2", "train.num_microbatches=3")
    with pytest.raises(ValueError) as caught:
        run_of(*sizes)
    for part in ("num_microbatches=3", "mesh.data=2", "mesh.fsdp=2", "global_batch_size=20"):
        assert part in str(caught.value)
    assert str(caught.value).endswith("fits is 24")


def test_batch_is_checked_once_a_free_axis_has_its_size():
    run = run_of("data.global_batch_size=20", "mesh.data=-1")
    with pytest.raises(ValueError, match=r"mesh\.data=8.* must divide data\.global_batch_size=20"):
        dataclasses.replace(run, mesh=run.mesh.resolve(8))
    assert dataclasses.replace(run, mesh=run.mesh.resolve(4)).mesh == MeshConfig(data=4)


def test_context_that_does_not_divide_the_sequence_is_refused():
    with pytest.raises(ValueError, match=r"mesh\.context=3 must divide data\.sequence_length=128"):
        run_of("mesh.context=3")


def test_differences_names_keys_below_the_given_ones_with_both_values():
    old = load(CONFIG)
    new = load(
        CONFIG, ["model.num_layers=6", "data.paths=a.txt", "train.seed=3", "train.remat=full"]
    )
    assert differences(old, new, ["model", "data", "train.seed"]) == [
        "data.paths: [] -> ['a.txt']",
        "model.num_layers: 4 -> 6",
        "train.seed: 0 -> 3",
    ]
    assert differences(old, new, ["mesh", "train.see"]) == []


def test_shorten_makes_a_run_of_3_steps_that_resolves():
    config = load(f"{CONFIG}:small")
    shorten(config)
    run = resolve(config)
    assert (run.train.num_steps, run.log.every_steps, run.eval.num_batches) == (3, 1, 1)


# The configs in configs/.

#: Not configs, or configs that need a checkpoint (see test_init_from.py).
NOT_ALONE = ("__init__", "common", "sizes", "opt_finetune", "bert_classify")
NAMES = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem not in NOT_ALONE)


def shipped() -> list[str]:
    """Return every config, once for each of its sizes."""
    sizes = {
        name: getattr(importlib.import_module(f"configs.{name}"), "SIZES", ()) for name in NAMES
    }
    sizes["gpt2_3d"] = sizes["gpt2"]
    return [f"{n}:{a}" if a else n for n in NAMES for a in ("", "tiny", *sizes[n])]


@pytest.mark.parametrize("name", shipped())
def test_shipped_config_resolves_and_fits_its_mesh(name):
    file, _, argument = name.partition(":")
    path = str(ROOT / "configs" / f"{file}.py") + (f":{argument}" if argument else "")
    run = run_of(config=path)
    # Only shapes and shardings are computed, so 175 B parameters need no memory.
    vocab_size = None if run.data.reads_images else run.data.vocab_size
    made = assemble_run(run, make_mesh(run.mesh, jax.devices()), vocab_size=vocab_size)
    assert made.num_params > 0


@pytest.mark.parametrize("name", [*NAMES, "opt_finetune", "bert_classify"])
def test_shipped_config_says_what_it_takes(name):
    text = importlib.import_module(f"configs.{name}").__doc__ or ""
    assert f"python -m train.main --config=configs/{name}.py" in text
    assert "Hardware:" in text
    assert "TIME" not in text and "LOSS" not in text, "the measured figures are not filled in"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("configs/gpt2_3d.py", "runs/gpt2_3d"),
        ("configs/llama.py:3-8b", "runs/llama_3-8b"),
        ("somewhere/gpt2/config.yaml", "runs/gpt2"),
        ("mine.yaml", "runs/mine"),
        ("configs/own.py:a/b", "runs/own_a_b"),
    ],
)
def test_default_workdir_is_named_after_the_config(config, expected):
    assert str(default_workdir(config)) == expected


def test_attention_of_a_config_is_the_runs_and_not_the_models():
    config = load(f"{ROOT}/configs/gpt2.py", ("model.attention=plain",))
    resolved = resolve(config)
    assert resolved.attention == "plain"
    assert "attention" not in resolved.model_fields
    assert resolve(load(f"{ROOT}/configs/gpt2.py")).attention == "auto"


def test_unknown_attention_is_refused():
    config = load(f"{ROOT}/configs/gpt2.py", ("model.attention=fast",))
    with pytest.raises(ValueError, match="model.attention='fast' is unknown; choose auto or plain"):
        resolve(config)
