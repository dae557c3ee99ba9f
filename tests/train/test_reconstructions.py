"""The command train.reconstructions: its picture, and its error messages."""

import matplotlib.image
import numpy as np
import pytest

from convert import from_hf
from tests.convert import cases
from tests.runs import ROOT
from train.config import config_files
from train.main import main as train
from train.reconstructions import main


@pytest.mark.thorough
def test_reconstructions_of_a_run_are_drawn(tmp_path, capsys):
    overrides = (
        f"data.cache_dir={tmp_path}/cache",
        "data.global_batch_size=16",
        "train.num_steps=1",
        "model.num_layers=1",
        "model.decoder_num_layers=1",
        "eval.every_steps=0",
    )
    flags = [f"--config.{override}" for override in overrides]
    workdir = tmp_path / "run"
    assert train([f"--config={ROOT}/configs/mae.py", f"--workdir={workdir}", *flags]) == 0
    heights = []
    for num_images in (1, 3):
        out = tmp_path / f"{num_images}.png"
        main([str(workdir), f"--out={out}", f"--num_images={num_images}"])
        picture = matplotlib.image.imread(out)[..., 0]
        heights.append(picture.shape[0])
        # Three quarters of the visible-patches image are grey; the background is white.
        third = np.array_split(picture, 3, axis=1)[1]
        assert 0.4 < (np.abs(third - 0.5) < 0.01).mean() < 0.75
    assert heights[1] > 2 * heights[0]
    assert "wrote" in capsys.readouterr().out
    assert main([str(workdir), f"--out={tmp_path / 'a.xyz'}"]) == 2
    assert "a.xyz cannot be written" in capsys.readouterr().err
    assert main([str(workdir), "--num_images=0"]) == 2
    assert "--num_images=0 must be at least 1" in capsys.readouterr().err


def test_model_without_reconstructions_is_rejected(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "neither a config.json nor a checkpoint; use the direc" in capsys.readouterr().err
    cases.save("vit", tmp_path / "theirs")
    from_hf.convert(tmp_path / "theirs", tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(
        config_files.as_yaml(config_files.load(f"{ROOT}/configs/vit.py").to_dict())
    )
    assert main([str(tmp_path / "run")]) == 2
    assert "model.name='vit', which does not reconstruct images" in capsys.readouterr().err
