"""The conversion of preprocessor_config.json: our models normalize pixels as it describes."""

import json

import numpy as np
import pytest
import transformers

from convert import from_hf, to_hf
from convert.source import read_source
from tests.convert import cases

COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
SIZE = {"size": {"height": 20, "width": 20}}
FILE = "preprocessor_config.json"


def saved(directory, said, name="vit"):
    """Write a case's model and this preprocessor_config.json; return the directory."""
    cases.save(name, directory)
    (directory / FILE).write_text(json.dumps(said))
    return directory


def assert_same_pixels(directory, config):
    """Compare the pixels of the preprocessor and of our model, for all values and channels."""
    processor = transformers.AutoImageProcessor.from_pretrained(directory)
    side = config.image_size
    channels = config.num_channels
    rng = np.random.default_rng(0)
    images = rng.permuted(np.arange(2 * side**2 * channels) % 256).astype(np.uint8)
    images = images.reshape(2, side, side, channels)
    theirs = processor(list(images), return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    # A few float32 roundings of the largest value, because the order of divisions differs.
    tolerance = 5e-7 * np.abs(theirs).max()
    np.testing.assert_allclose(config.normalised(images, np.float32), theirs, 0, atol=tolerance)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "said",
    [
        {**COLOURS, **SIZE},
        {**COLOURS, "size": 20},
        {**COLOURS, "size": {"shortest_edge": 30}, "do_center_crop": True, "crop_size": 20},
        {**COLOURS, **SIZE, "rescale_factor": 1 / 127.5},
        {**COLOURS, **SIZE, "do_rescale": False},
        {**COLOURS, **SIZE, "do_normalize": False},
        {**SIZE, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True},
    ],
    ids=str,
)
def test_pixels_are_normalised_like_by_the_processor(said, tmp_path):
    cropped = "do_center_crop" in said
    said = {"image_processor_type": f"{'DeiT' if cropped else 'ViT'}ImageProcessor", **said}
    directory = saved(tmp_path / "theirs", said)
    source = read_source(directory)
    if not cropped:  # A cropping processor first resizes even images that have the right size.
        assert_same_pixels(directory, source.config)
    from_hf.convert(directory, tmp_path / "ours")
    assert read_source(tmp_path / "ours").config == source.config
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / FILE).read_text() == (directory / FILE).read_text()


@pytest.mark.thorough(but=["vit", "vit_odd"])
@pytest.mark.parametrize("name", ["vit", "vit_odd", "swin", "swinv2_odd"])
def test_processor_is_written_for_a_model_without_one(name, tmp_path):
    from_hf.convert(cases.save(name, tmp_path / "theirs"), tmp_path / "ours")
    file = tmp_path / "ours" / "config.yaml"
    text = file.read_text()
    assert text.startswith("model:\n") and "image_mean" not in text  # The run's config decides.
    file.write_text(text.rstrip("\n") + "\n  image_mean:\n  - 0.25\n")
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    config = read_source(tmp_path / "ours").config
    assert config.image_mean == (0.25,)
    assert_same_pixels(tmp_path / "back", config)
    again = read_source(tmp_path / "back").config
    assert set(again.image_mean) == {0.25} and set(again.image_stddev) == {0.5}


def test_processor_describes_the_normalisation_of_the_run(tmp_path):
    from_hf.convert(saved(tmp_path / "theirs", {**COLOURS, **SIZE}), tmp_path / "ours")
    file = tmp_path / "ours" / "config.yaml"
    file.write_text(file.read_text().replace("- 0.1\n", "- 0.7\n"))
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    config = read_source(tmp_path / "ours").config
    assert config.image_mean == (0.7, 0.2, 0.3)
    assert_same_pixels(tmp_path / "back", config)


@pytest.mark.parametrize(
    "said, message",
    [
        ({**COLOURS, "size": 24}, r"images of 24 × 24 pixels, .* has image_size=20; correct"),
        (
            {**COLOURS, **SIZE, "do_center_crop": True, "crop_size": {"height": 20, "width": 16}},
            r"produces images of 20 × 16 pixels",
        ),
        ({**COLOURS, "size": {"longest_edge": 20}}, r"size=\{'longest_edge': 20\}, which is not"),
        ({**COLOURS, **SIZE, "do_pad": True}, r"do_pad=True, which .* --harmless=do_pad"),
        ({**COLOURS, **SIZE, "image_mean": [0.5, 0.5]}, r"image_mean=\[0\.5, 0\.5\], .*channels=3"),
        ({**SIZE, "image_std": [1, 1, 1]}, r"image_mean=None, which must be a number"),
        (
            {**COLOURS, **SIZE, "image_std": [1, 0, 1]},
            r"image_std=\[1, 0, 1\], which must be",
        ),
        ({**COLOURS, **SIZE, "rescale_factor": 0}, r"rescale_factor=0, which must be a positive"),
        ({**COLOURS, **SIZE, "rescale_factor": None}, r"rescale_factor=None, which must be a pos"),
    ],
    ids=str,
)
def test_unsupported_processors_are_rejected(said, message, tmp_path, capsys):
    directory = saved(tmp_path / "theirs", said)
    assert from_hf.main([str(directory), str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        read_source(directory)
    assert not (tmp_path / "ours").exists()


def test_unknown_key_declared_harmless_is_ignored(tmp_path):
    directory = saved(tmp_path / "theirs", {**COLOURS, **SIZE, "do_pad": True})
    args = [str(directory), str(tmp_path / "ours"), "--harmless=do_pad"]
    assert from_hf.main(args) == 0


def test_text_models_have_no_preprocessor(tmp_path):
    from_hf.convert(saved(tmp_path / "theirs", {"do_pad": True}, "gpt2"), tmp_path / "ours")
    to_hf.convert(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back" / FILE).exists()
