"""A run resumes, and is exported and continued elsewhere, with the config of its checkpoints."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from checkpoint.__main__ import main as checkpoint
from convert import to_hf
from tests.runs import TINY, arguments, write_corpus
from tests.train.refusals import refusal
from train.config import old_keys
from train.main import main

pytestmark = [pytest.mark.usefixtures("shared_steps"), pytest.mark.drawn(1, among="thorough")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 steps with checkpoints of steps 2 and 4, and its overrides."""
    directory = tmp_path_factory.mktemp("trained")
    overrides = (
        *TINY,
        *write_corpus(directory),
        "train.num_steps=4",
        "optimizer.schedule=constant",
        "checkpoint.every_steps=2",
        "data.tokenizer=bpe",
        "data.vocab_size=300",
    )
    assert main(arguments(directory / "run", overrides)) == 0
    return directory / "run", overrides


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of the run, to be changed, and the overrides to train it for longer."""
    shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
    return tmp_path, (*trained[1], "train.num_steps=5")


def change_seed(file: Path) -> None:
    text = file.read_text()
    assert "seed: 0" in text
    file.write_text(text.replace("seed: 0", "seed: 1"))


def change_activation(file: Path) -> None:
    """Change a value that no shape depends on, so that no other check could notice it."""
    text = file.read_text()
    assert "activation: gelu_tanh" in text
    file.write_text(text.replace("activation: gelu_tanh", "activation: relu"))


def drop_checksums_of_configs(run: Path) -> None:
    """Make checkpoints look as if an older version had written them."""
    for file in run.glob("checkpoints/*/checksums.sha256"):
        head, *lines = file.read_text().splitlines(keepends=True)
        kept = [line for line in lines if "config.yaml" not in line]
        assert head == f"# {len(lines)} files\n" and len(kept) == len(lines) - 1
        file.write_text("".join([f"# {len(kept)} files\n", *kept]))


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("change", [Path.unlink, change_seed])
def test_another_seed_is_rejected_even_if_the_config_of_the_workdir_was_changed(
    change, copy, capsys
):
    workdir, overrides = copy
    change(workdir / "config.yaml")
    error = refusal(workdir, (*overrides, "train.seed=1"), capsys)
    assert "train.seed: 0 -> 1" in error


@pytest.mark.parametrize("change", [Path.unlink, change_seed])
def test_checkpoints_with_changed_configs_are_damaged(change, copy, capsys):
    workdir, overrides = copy
    for file in (workdir / "config.yaml", *workdir.glob("checkpoints/*/config.yaml")):
        change(file)
    assert checkpoint(["verify", str(workdir)]) == 1
    printed = capsys.readouterr().out
    assert len(re.findall(r"step \d: damaged: config.yaml (is missing|has changed)", printed)) == 2
    for seed in (0, 1):
        error = refusal(workdir, (*overrides, f"train.seed={seed}"), capsys)
        assert "has an intact config.yaml" in error and "checkpoints/4: config.yaml" in error


def test_intact_older_checkpoint_decides_if_the_newest_config_was_changed(copy, capsys):
    workdir, overrides = copy
    change_seed(workdir / "checkpoints" / "4" / "config.yaml")
    assert "train.seed: 0 -> 1" in refusal(workdir, (*overrides, "train.seed=1"), capsys)
    assert main(arguments(workdir, overrides)) == 0
    log = capsys.readouterr().err
    assert "checkpoints/4: config.yaml has changed" in log
    assert "step 2 of train.num_steps=5" in log


@pytest.mark.thorough
def test_run_resumes_from_checkpoints_without_checksums_of_their_configs(copy, capsys):
    workdir, overrides = copy
    drop_checksums_of_configs(workdir)
    assert checkpoint(["verify", str(workdir)]) == 0
    assert "train.seed: 0 -> 1" in refusal(workdir, (*overrides, "train.seed=1"), capsys)
    assert main(arguments(workdir, overrides)) == 0
    assert "step 4 of train.num_steps=5" in capsys.readouterr().err


def test_run_resumes_from_checkpoints_without_configs(copy, capsys):
    """The config of the workdir stands in, even if it lacks keys that were added later."""
    workdir, overrides = copy
    drop_checksums_of_configs(workdir)
    for file in workdir.glob("checkpoints/*/config.yaml"):
        file.unlink()
    file = workdir / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    file.unlink()
    assert "config.yaml is missing" in refusal(workdir, overrides, capsys)
    del saved["init_from"], saved["data"]["objective"], saved["model"]["head"]
    file.write_text(yaml.safe_dump(saved))
    error = refusal(workdir, (*overrides, "data.objective=masked_lm"), capsys)
    assert "data.objective" in error
    assert main(arguments(workdir, overrides)) == 0
    assert "step 4 of train.num_steps=5" in capsys.readouterr().err


@pytest.mark.thorough
def test_run_of_an_earlier_version_resumes_without_a_changed_config(copy, capsys):
    """Its stored configs have `pipeline.remat`, which is a part of `train.remat` now."""
    workdir, overrides = copy
    drop_checksums_of_configs(workdir)
    for file in (workdir / "config.yaml", *workdir.glob("checkpoints/*/config.yaml")):
        saved = yaml.safe_load(file.read_text())
        saved["pipeline"]["remat"] = "full"
        saved["train"]["remat"] = "dots"
        file.write_text(yaml.safe_dump(saved, sort_keys=False))
    old_keys._warn.cache_clear()
    assert main(arguments(workdir, (*overrides, "train.remat=stage,dots"))) == 0
    log = capsys.readouterr().err
    assert "step 4 of train.num_steps=5" in log
    assert log.count("pipeline.remat=full is now a part of train.remat; write train.remat=st") == 1
    assert re.findall(r"^  (\S+): .* -> ", log, re.MULTILINE) == ["train.num_steps"]


@pytest.mark.thorough
def test_contents_of_files_can_be_verified_from_a_later_start_on(copy, capsys):
    """The tokenizer and the tokens are computed again, and must be those of the checkpoint."""
    workdir, overrides = copy
    assert main(arguments(workdir, (*overrides, "data.verify=full"))) == 0
    log = capsys.readouterr().err
    assert "Tokenizing" in log and "step 4 of train.num_steps=5" in log


def exported_activation(run: Path, to: Path) -> str:
    """Export a run; return the activation of the exported model."""
    assert to_hf.main([str(run), str(to)]) == 0
    return json.loads((to / "config.json").read_text())["activation_function"]


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("change", [Path.unlink, change_activation])
def test_conversion_and_init_from_ignore_a_changed_config_of_the_workdir(
    change, copy, tmp_path_factory
):
    run, overrides = copy
    change(run / "config.yaml")
    out = tmp_path_factory.mktemp("out")
    assert exported_activation(run, out / "exported") == "gelu_new"
    started = (*overrides, "train.num_steps=1", f"init_from={run}")
    assert main(arguments(out / "started", started)) == 0
    assert "activation: gelu_tanh" in (out / "started" / "config.yaml").read_text()


def test_conversion_skips_a_checkpoint_whose_config_was_changed(copy, tmp_path_factory, capsys):
    run, overrides = copy
    out = tmp_path_factory.mktemp("out")
    change_activation(run / "checkpoints" / "4" / "config.yaml")
    assert exported_activation(run, out / "exported") == "gelu_new"
    assert "checkpoints/4 is skipped: config.yaml has changed" in capsys.readouterr().err
    change_activation(run / "checkpoints" / "2" / "config.yaml")
    assert to_hf.main([str(run), str(out / "another")]) == 2
    assert "contains only damaged checkpoints" in capsys.readouterr().err
    assert not (out / "another").exists()
    error = refusal(out / "started", (*overrides, f"init_from={run}"), capsys)
    assert "contains only damaged checkpoints" in error


@pytest.mark.thorough
def test_conversion_of_checkpoints_without_configs_reads_the_config_of_the_workdir(
    copy, tmp_path_factory
):
    run, _ = copy
    drop_checksums_of_configs(run)
    for file in run.glob("checkpoints/*/config.yaml"):
        file.unlink()
    change_activation(run / "config.yaml")
    assert exported_activation(run, tmp_path_factory.mktemp("out") / "exported") == "relu"
