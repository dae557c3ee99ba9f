"""Config files, YAML, and command-line overrides."""

import dataclasses
import datetime
import re
from pathlib import Path

import pytest
import yaml

from tests.runs import CONFIG
from tests.train.config.loading import load, run_of
from train.config.config_files import as_yaml, default_workdir, differences, shorten
from train.config.overrides import Overrides
from train.config.schema import RunConfig, checked_value, validate_config
from train.main import main


def test_load_passes_the_argument_after_the_colon():
    assert load(CONFIG).model.num_layers == 4
    assert load(f"{CONFIG}:medium").model.num_layers == 24
    with pytest.raises(ValueError, match=r"configs/gpt2\.py:huge does not exist; choose tiny, sm"):
        load(f"{CONFIG}:huge")


@pytest.mark.parametrize("folder", ["2026-11-28T10:00:00", "a.py:b", "a:b"])
def test_colons_in_the_names_of_folders_begin_no_argument(folder, tmp_path):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.yaml").write_text(as_yaml(load(CONFIG).to_dict()))
    assert load(f"{tmp_path}/{folder}/config.yaml").model.num_layers == 4
    (tmp_path / folder / "own.py").write_text(Path(CONFIG).read_text())
    assert load(f"{tmp_path}/{folder}/own.py:medium").model.num_layers == 24


@pytest.mark.parametrize("name", ["configs/gpt2.py", "gpt2.py", "gpt2"])
def test_config_of_the_project_is_found_from_any_folder(name, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    assert load(f"{name}:medium").model.num_layers == 24
    assert str(default_workdir(f"{name}:medium")) == "runs/gpt2_medium"
    assert caplog.messages == [f"config  {CONFIG}"]
    users_config = tmp_path / name
    users_config.parent.mkdir(exist_ok=True)
    users_config.write_text("def get_config(size): return {'train': {'num_steps': 7}}")
    if users_config.suffix == ".py":  # it comes first, and nothing is logged
        assert load(f"{name}:medium").train.num_steps == 7
        assert len(caplog.messages) == 1


def test_missing_config_file_lists_the_configs_of_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt3", "configs/gpt3.py:small", "other/gpt2.py"):
        message = f"--config={name}: file .* does not exist; .*: bert, .*, gpt2, gpt2_3d, .*vit_pro"
        with pytest.raises(FileNotFoundError, match=message):
            load(name)


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
        ("none.yaml", "train: null", r"none\.yaml must contain sections .* but train is None"),
        ("init.yaml", "init_from: [x]", r"init\.yaml: init_from=\['x'\] must be a path"),
        (
            "huge.yaml",
            f"model: {{name: gpt2}}\noptimizer: {{learning_rate: {10**400}}}",
            r"optimizer\.learning_rate=an integer of 400 digits must be finite",
        ),
    ],
)
def test_invalid_config_file_is_rejected_by_name(name, text, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    argument = ":big" if name == "plain.py" else ""
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_of(config=f"{tmp_path / name}{argument}")


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
def test_yaml_round_trip_gives_an_equal_config(changes, tmp_path):
    config = load(CONFIG, changes)
    (tmp_path / "config.yaml").write_text(as_yaml(config.to_dict()))
    again = load(str(tmp_path / "config.yaml"))
    assert again.to_dict() == config.to_dict()
    assert differences(again.to_dict(), config.to_dict(), list(config)) == []
    before = validate_config(config)
    after = validate_config(again)
    for field in dataclasses.fields(RunConfig):
        if field.name != "source":
            assert getattr(before, field.name) == getattr(after, field.name)


def test_yaml_is_written_atomically_without_leftovers(tmp_path):
    (tmp_path / "config.yaml").write_text(as_yaml(load(CONFIG).to_dict()))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_replayed_yaml_takes_overrides_too(tmp_path):
    (tmp_path / "config.yaml").write_text(as_yaml(load(CONFIG, ["eval.num_batches=7"]).to_dict()))
    again = load(str(tmp_path / "config.yaml"), ["eval.num_batches=none", "model.dropout=0.5"])
    assert again.eval.num_batches is None and again.model.dropout == 0.5


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
def test_override_is_converted_to_the_type_of_its_key(override, expected):
    value = checked_value(load(CONFIG, [override]), override.partition("=")[0])
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
        ("train.num_steps=many", "train.num_steps='many' must be of type int, such as 100"),
        ("train.num_steps=1.5", "train.num_steps=1.5 must be of type int"),
        ("train.num_steps=True", "train.num_steps=True must be of type int"),
        ("optimizer.clip_norm=no", "optimizer.clip_norm='no' must be of type float, such as 1.0"),
        ("optimizer.clip_norm=True", "optimizer.clip_norm=True must be of type float"),
        ("train.num_steps={'a.b': 2}", "train.num_steps={'a.b': 2} must be of type int"),
        ("train.skip_spikes=True", "train.skip_spikes=True must be of type float or None"),
        ("train.num_steps", "train.num_steps has no value; write .*train.num_steps=value"),
    ],
)
def test_bad_override_is_refused_with_key_and_remedy(override, message):
    with pytest.raises(ValueError, match=message):
        run_of(override)


def test_overrides_reads_both_spellings_of_the_command_line():
    arguments = ["--config.a.b=1", "--config.c.d", "2", "--config.e.f", "-3"]
    parsed = Overrides.parse(arguments)
    assert parsed.command_line == (("a.b", "1", 1), ("c.d", "2", 2), ("e.f", "-3", -3))
    assert parsed == Overrides.of(["a.b=1", "c.d=2", "e.f=-3"])
    with pytest.raises(ValueError, match="unknown argument '--worlddir=x'"):
        Overrides.parse(["--worlddir=x"])
    for others in ([], ["--config.a.b=1"]):
        with pytest.raises(ValueError, match="^--config.g.h has no value; write --config.g.h=valu"):
            Overrides.parse(["--config.g.h", *others])


def test_overrides_know_where_a_value_came_from():
    overrides = Overrides.of(["optimizer.clip_norm=2"])
    both = overrides.with_deepspeed({"optimizer.clip_norm": 0.5, "memory.zero_stage": 3})
    assert both.command_line_keys == {"optimizer.clip_norm"}
    assert both.keys == {"optimizer.clip_norm", "memory.zero_stage"}
    config = load(CONFIG, both)
    assert (config.optimizer.clip_norm, config.memory.zero_stage) == (2.0, 3)


@pytest.mark.parametrize("text", ["{{1}}", "{[]: 1}", "a\\0b", "(1", "1" * 5000])
def test_text_that_is_no_literal_stays_text(text):
    assert load(CONFIG, [f"data.tokenizer={text}"]).data.tokenizer == text
    assert Overrides.of([f"data.tokenizer={text}"]).command_line[0].value == text


def test_differences_names_keys_below_the_given_ones_with_both_values():
    old = load(CONFIG)
    new = load(
        CONFIG, ["model.num_layers=6", "data.paths=a.txt", "train.seed=3", "train.remat=full"]
    )
    assert differences(old.to_dict(), new.to_dict(), ["model", "data", "train.seed"]) == [
        "data.paths: [] -> ['a.txt']",
        "model.num_layers: 4 -> 6",
        "train.seed: 0 -> 3",
    ]
    assert differences(old.to_dict(), new.to_dict(), ["mesh", "train.see"]) == []


def test_shorten_replaces_values_of_any_type(tmp_path):
    text = as_yaml(load(CONFIG).to_dict()).replace("num_steps: ", "num_steps: 2026-01-01 #")
    (tmp_path / "config.yaml").write_text(text)
    config = load(str(tmp_path / "config.yaml"))
    assert isinstance(config.train.num_steps, datetime.date)
    shorten(config)
    assert config.train.num_steps == 3


@pytest.mark.parametrize("key, value", [("optimizer.epsilon", 10**400), ("model.dropout", "1e999")])
def test_override_with_a_huge_number_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"^{key}=.* must be finite"):
        run_of(f"{key}={value}")


def test_partial_model_takes_the_defaults_of_its_fields(tmp_path):
    sizes = {"num_layers": 2, "num_heads": 2, "embed_dim": 8, "vocab_size": 300}
    tree = {"model": {"name": "gpt2", **sizes}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    config = validate_config(load(str(tmp_path / "config.yaml"))).model_config()
    assert (config.dropout, config.max_positions) == (0.0, 128)


def test_shorten_makes_a_run_of_3_steps_that_resolves():
    config = load(f"{CONFIG}:small")
    shorten(config)
    run = validate_config(config)
    assert (run.train.num_steps, run.log.every_steps, run.eval.num_batches) == (3, 1, 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("configs/gpt2_3d.py", "runs/gpt2_3d"),
        ("configs/llama.py:3-8b", "runs/llama_3-8b"),
        ("somewhere/gpt2/config.yaml", "runs/gpt2"),
        ("mine.yaml", "runs/mine"),
        ("configs/own.py:a/b", "runs/own_a_b"),
        ("runs/2026-11-28T10:00:00/config.yaml", "runs/2026-11-28T10:00:00"),
        ("10:00/own.py:tiny", "runs/own_tiny"),
    ],
)
def test_default_workdir_is_named_after_the_config(config, expected):
    assert str(default_workdir(config)) == expected


@pytest.mark.parametrize(
    "content, message",
    [
        ("x = (\n", r"broken\.py, line 1: SyntaxError: '\(' was never closed"),
        ("\nimport no_such_module\n", r"broken\.py, line 2: ModuleNotFoundError: No module named"),
        (
            "def get_config():\n    x = 1\n    return x / 0\n",
            r"broken\.py, line 3: ZeroDivisionError: division by zero",
        ),
        ("def get_config():\n    pass\n", r"get_config\(\) returned None, but must return .* dict"),
        ("def get_config():\n    return 'x'\n", r"get_config\(\) returned 'x', but must return"),
        ("def get_config(): return {1: {2: 3}}\n", r"get_config\(\) has the key 1, but keys must"),
        (
            "def get_config(): return {'train': {2: 3}}\n",
            r"has the key 2, but keys must be",
        ),
        ("def get_config(): return {'train': None}\n", r"sections of keys, .* but train is None"),
        ("get_config = 3\n", r"broken\.py defines no function get_config"),
        ("raise SystemExit('no')\n", r"broken\.py, line 1: SystemExit: no"),
        ("def get_config(): return {'model': 3}\n", r"sections of keys, .* but model is 3"),
    ],
)
def test_broken_config_file_is_one_sentence_and_exit_code_2(content, message, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(content)
    assert main([f"--config={tmp_path / 'broken.py'}", f"--workdir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and re.search(message, error)


@pytest.mark.parametrize("kind", ["py", "yaml"])
def test_partial_config_takes_defaults_and_overrides(kind, tmp_path):
    tree = {"model": {"name": "gpt2", "num_layers": 2}, "train": {"num_steps": 7}}
    file = tmp_path / f"config.{kind}"
    file.write_text(f"def get_config(): return {tree!r}" if kind == "py" else yaml.safe_dump(tree))
    overrides = [
        "model.num_heads=2",
        "model.embed_dim=8",
        "model.mlp_dim=16",
        "model.dropout=0",
        "mesh.data=2",
    ]
    config = validate_config(load(str(file), overrides))
    assert config.train.num_steps == 7 and config.mesh.data == 2
    assert config.model_config(vocab_size=50).num_heads == 2


@pytest.mark.parametrize(
    "config, override, field, value",
    [
        ("gpt2", "activation=relu", "activation", "relu"),
        ("swin", "mlp_ratio=2", "mlp_ratio", 2.0),
        ("llama", "sliding_window=4", "sliding_window", 4),
    ],
)
def test_every_field_of_a_model_can_be_set(config, override, field, value):
    loaded = validate_config(load(f"configs/{config}.py", [f"model.{override}"]))
    assert loaded.model_fields[field] == value and type(loaded.model_fields[field]) is type(value)


@pytest.mark.parametrize("text", ["-" * 100_000 + "1", "[" * 5000, "9" * 5000])
def test_value_that_python_cannot_parse_is_refused_in_one_short_sentence(text):
    with pytest.raises(ValueError, match="^train.num_steps=.{1,63} must be ") as caught:
        run_of(f"train.num_steps={text}")
    assert len(str(caught.value)) < 200


def test_attention_of_a_config_without_a_model_is_refused_by_name(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("data:\n  name: stdlib\n")
    with pytest.raises(ValueError, match=r"--config\.model\.attention: unknown key"):
        load(str(path), ["model.attention=plain"])
