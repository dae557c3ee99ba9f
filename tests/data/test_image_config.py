"""The config section `images`, and its compatibility with the section `data`."""

import dataclasses

import pytest

from data.config import DataConfig
from data.corpus import load_corpus
from data.image_config import ImageConfig, check_images

IMAGES = DataConfig(name="digits", objective="image_classification", global_batch_size=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, r"images\.size=0 must be at least 1"),
        ({"size": 224.0}, r"images\.size=224\.0 must be of type int"),
        ({"channels": 4}, r"images\.channels=4 is unknown; choose 3 \(color\) or 1 \(gray\)"),
        ({"crop_scale": (0.5, 0.2)}, r"images\.crop_scale=\(0\.5, 0\.2\) must have the smaller"),
        (
            {"crop_scale": (0.0, 1.0)},
            r"crop_scale=\(0\.0, 1\.0\) must be 2 numbers, each more than 0 and at most 1",
        ),
        ({"crop_scale": 0.5}, r"images\.crop_scale=0\.5 must be 2 numbers, .*\(0\.08, 1\.0\)"),
        (
            {"crop_ratio": (-1, 1)},
            r"images\.crop_ratio=\(-1, 1\) must be 2 numbers, each more than 0",
        ),
        ({"randaugment_num": -1}, r"images\.randaugment_num=-1 must be at least 0"),
        ({"randaugment_magnitude": 11}, r"magnitude=11\.0 must be from 0 to 10; .*_num=0"),
        ({"jitter": (0.4,)}, r"images\.jitter=\(0\.4,\) must be 4 numbers"),
        ({"jitter": (0, 0, 0, 0.6), "channels": 3}, r"jitter=.* the hue, must be at most 0\.5"),
        ({"jitter": (0, 0, 0.2, 0)}, r"change colors, but images\.channels=1 has none"),
        ({"grayscale": 0.2}, r"images\.grayscale=0\.2 .*channels=1 has none; set them to 0"),
        ({"blur": (1.0, 2.0)}, r"images\.blur=\(1\.0, 2\.0\) must be 2 numbers, each from 0 to 1"),
        ({"solarize": "often"}, r"images\.solarize='often' must be 2 numbers"),
        ({"erasing": 1.5}, r"images\.erasing=1\.5 must be from 0 to 1; 0 is none, 1 is all"),
        ({"cutmix_share": -1}, r"images\.cutmix_share=-1\.0 must be from 0 to 1"),
        ({"mixup": -0.1}, r"images\.mixup=-0\.1 must be at least 0"),
        ({"cutmix": float("inf")}, r"images\.cutmix=inf must be finite"),
        (
            {"crop_ratio": (1.0, float("inf"))},
            r"crop_ratio=\(1\.0, inf\) must be finite",
        ),
        ({"repeats": 0}, r"images\.repeats=0 must be at least 1"),
        ({"eval_crop": 0.0}, r"images\.eval_crop=0\.0 must be more than 0 and at most 1"),
        ({"train_fraction": 2}, r"images\.train_fraction=2\.0 must be more than 0 and at most 1"),
        ({"on_broken": "ignore"}, r"images\.on_broken='ignore' is unknown; choose refuse or skip"),
        ({"num_workers": -1}, r"images\.num_workers=-1 must be from 0 to 1024"),
    ],
)
def test_invalid_image_configs_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        ImageConfig(**changes)


@pytest.mark.parametrize(
    ("data", "images", "message"),
    [
        ({}, {"blur": (1.0, 0.1)}, r"images\.blur=.* is read only with .*'image_contrast', but"),
        (
            {"objective": "image_contrast"},
            {"mixup": 0.8},
            r"images\.mixup=0\.8 is read only with data\.objective='image_classification'",
        ),
        (
            {"global_batch_size": 5},
            {"cutmix": 1.0},
            r"pairs, but data\.global_batch_size=5 is odd; choose an even size such as 6",
        ),
        ({}, {"repeats": 4}, r"repeats=4 leaves fewer than two .*=6; repeat them at most 3"),
    ],
)
def test_incompatible_sections_are_rejected(data, images, message):
    with pytest.raises(ValueError, match=message):
        load_corpus(dataclasses.replace(IMAGES, **data), ImageConfig(**images))


def test_images_section_is_rejected_for_text():
    text = DataConfig(global_batch_size=5)
    check_images(text, ImageConfig())
    with pytest.raises(ValueError, match=r"images\.size=9 is read only for images, .*'causal_lm'"):
        check_images(text, ImageConfig(size=9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "bytes"}, r"data\.tokenizer='bytes' is read only for texts, .*='bpe'"),
        ({"sequence_length": 64}, r"data\.sequence_length=64 is read only .*sequence_length=128"),
        ({"vocab_size": 300}, r"data\.vocab_size=300 is read only for texts"),
        ({"whole_words": True}, r"data\.whole_words=True is read only with data\.objective='mask"),
        ({"name": "python_stdlib"}, r"'python_stdlib' has none; set data\.name='digits', 'imag"),
        ({"name": "text", "paths": ("a.txt",)}, r"reads images, but data\.name='text' has none"),
        ({"name": "image_folder"}, r"'image_folder' needs one or two folders in data\.paths=\(\)"),
        ({"name": "image_folder", "paths": ("a", "b", "c")}, r"needs one or two folders in"),
        ({"paths": ("a",)}, r"data\.paths=\('a',\) is read only with .*but data\.name='digits'"),
        ({"objective": "causal_lm"}, r"'causal_lm' reads texts, but data\.name='digits' has none"),
    ],
)
def test_data_config_rejects_settings_that_are_not_for_images(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(IMAGES, **changes)
