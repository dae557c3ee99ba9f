"""Keys of earlier versions are translated, with one warning that says what to write instead."""

import pytest

from tests.runs import CONFIG
from tests.train.config.loading import load
from train.config import old_keys
from train.config.config_files import as_yaml, load_data
from train.config.overrides import Overrides

#: `pipeline.remat`, `train.remat` -> the value of `train.remat` that stands for both.
BOTH = [
    ("full", "none", "stage"),
    ("full", "dots", "stage,dots"),
    ("full", "stage,dots", "stage,dots"),
    ("full", "auto", "stage,dots"),
    ("none", "none", "none"),
    ("none", "auto", "dots"),
    ("none", "qkv,mlp", "qkv,mlp"),
    ("none", "stage", "none"),  # the present default
]


@pytest.fixture(autouse=True)
def forget_warnings():
    old_keys._warn.cache_clear()


def warning(old: str, new: str) -> str:
    return f"pipeline.remat={old} is now a part of train.remat; write train.remat={new} instead"


@pytest.mark.parametrize(("stages", "layers", "expected"), BOTH)
def test_command_line_sets_both_keys_in_any_order(stages, layers, expected, caplog):
    overrides = [f"pipeline.remat={stages}", f"train.remat={layers}"]
    for order in (overrides, overrides[::-1]):
        config = load(CONFIG, order)
        assert config.train.remat == expected and "remat" not in config.pipeline
        assert Overrides.of(order).keys == {"train.remat"}
    assert caplog.messages == [warning(stages, expected)]


@pytest.mark.parametrize(("stages", "layers", "expected"), BOTH)
def test_files_of_data_and_of_code_set_both_keys(stages, layers, expected, tmp_path, caplog):
    tree = load(CONFIG).to_dict()
    tree["pipeline"]["remat"] = stages
    tree["train"]["remat"] = layers
    stored = tmp_path / "config.yaml"
    stored.write_text(as_yaml(tree))
    code = tmp_path / "users_config.py"
    code.write_text(
        "from configs import gpt2\n"
        "def get_config():\n"
        "    config = gpt2.get_config()\n"
        f"    config.pipeline.remat = {stages!r}\n"
        f"    config.train.remat = {layers!r}\n"
        "    return config\n"
    )
    for file in (stored, code):
        assert load(str(file)).train.remat == expected
    saved = load_data(stored)
    assert saved["train"]["remat"] == expected and "remat" not in saved["pipeline"]
    assert caplog.messages == [warning(stages, expected)]


def test_old_key_without_the_new_one_keeps_the_default_of_the_layers(tmp_path):
    (tmp_path / "config.yaml").write_text("pipeline: {remat: none}\n")
    assert load_data(tmp_path / "config.yaml") == {"pipeline": {}, "train": {"remat": "none"}}
    assert load(CONFIG, ["pipeline.remat=none"]).train.remat == "none"


def test_command_line_replaces_what_an_old_file_says(tmp_path):
    (tmp_path / "config.yaml").write_text("pipeline: {remat: full}\ntrain: {remat: none}\n")
    assert load(str(tmp_path / "config.yaml"), ["train.remat=dots"]).train.remat == "dots"


def test_value_that_the_old_key_never_had_is_refused():
    with pytest.raises(ValueError, match=r"pipeline\.remat='dots' must be full or none; write"):
        load(CONFIG, ["pipeline.remat=dots"])


@pytest.mark.parametrize(
    ("stored", "expected", "warnings"), [(0, None, 0), (1, ("full", "window", "window"), 1)]
)
def test_number_of_layers_without_a_window_becomes_the_types_of_layers(
    stored, expected, warnings, caplog
):
    model = {"num_layers": 3, "sliding_window": 4, "first_windowed_layer": stored}
    old_keys.replace_old_keys({"model": model})
    assert "first_windowed_layer" not in model and model.get("layer_types") == expected
    assert len(caplog.messages) == warnings


def test_number_of_layers_without_a_window_that_no_model_could_have_is_refused():
    with pytest.raises(ValueError, match="model.first_windowed_layer=3 must be from 0 to"):
        old_keys.replace_old_keys({"model": {"num_layers": 3, "first_windowed_layer": 3}})
