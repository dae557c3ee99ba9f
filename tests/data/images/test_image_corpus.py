"""Batches of images: their content, which depends only on the seed and the element."""

import dataclasses
import json
import time

import numpy as np
import pytest

from data import batches
from data.batches import batches_ahead, train_batches, validation_batches
from data.corpus import load_corpus
from data.examples import PAIR, generator
from data.image_config import ImageConfig
from data.images.image_corpus import Images
from data.images.transforms.mixing import draw_mix
from data.shapes import example_shapes
from tests.data.corpora import SEED, assert_rows, take
from tests.data.images.pictures import NUM_PLAIN, image_config, load, values_of

NOISE = "tests.data.images.pictures:textured_images"
CASES = {
    "image_classification": ImageConfig(
        size=16, channels=3, crop_scale=(0.3, 1.0), flip=True, randaugment_num=2, erasing=0.5
    ),
    "image_classification, mixed": ImageConfig(
        size=16, channels=3, crop_scale=(0.3, 1.0), mixup=0.8, cutmix=1.0, repeats=2
    ),
    "image_reconstruction": ImageConfig(size=16, channels=1, crop_scale=(0.2, 1.0), flip=True),
    "image_contrast": ImageConfig(
        size=16,
        channels=3,
        crop_scale=(0.2, 1.0),
        flip=True,
        jitter=(0.4, 0.4, 0.2, 0.1),
        grayscale=0.2,
        blur=(1.0, 0.1),
        solarize=(0.0, 0.2),
    ),
}
KEYS = {
    "image_classification": {"images", "targets", "weights"},
    "image_classification, mixed": {
        "images",
        "targets",
        "weights",
        "other_targets",
        "target_shares",
    },
    "image_reconstruction": {"images", "mask_seeds", "weights"},
    "image_contrast": {"images", "weights"},
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """Return the name of a case, its config sections `data` and `images`, and its corpus."""
    changes = {"name": NOISE, "objective": request.param.partition(",")[0]}
    config = image_config(tmp_path, **changes)
    images = CASES[request.param]
    return request.param, config, images, load(tmp_path, images, **changes)


def test_batches_have_the_shapes_given_by_the_config(case):
    name, config, images, corpus = case
    shapes = example_shapes(config, images)
    assert shapes.keys() == KEYS[name]
    expected = {key: ((4, *shape), dtype) for key, (shape, dtype) in shapes.items()}
    expected["index"] = ((4,), np.dtype(np.uint32))
    rows = [5, 0, 2, 1]
    batches = take(train_batches(corpus, config, rows, seed=SEED), 3)
    batches += list(validation_batches(corpus, config, rows))
    for batch in batches:
        assert {key: (value.shape, value.dtype) for key, value in batch.items()} == expected


@pytest.mark.drawn(2)
def test_batches_do_not_depend_on_processes_threads_or_restarts(case, tmp_path):
    _, config, images, corpus = case
    whole = take(train_batches(corpus, config, range(6), seed=SEED), 16)
    assert 16 * 6 > 2 * len(corpus.train)  # The batches reach the third epoch.
    for rows in ([0, 1, 2], [5, 3, 4], [1], [4, 5]):
        threads = dataclasses.replace(config, num_threads=1 + len(rows))
        iterator = train_batches(corpus, threads, rows, seed=SEED)
        assert_rows(take(iterator, 7), whole[:7], rows)
        state = json.loads(json.dumps(iterator.get_state()))
        resumed = train_batches(corpus, config, rows[:2], seed=SEED)
        take(resumed, 2)
        resumed.set_state(state)
        assert_rows(take(resumed, 9), whole[7:], rows[:2])


@pytest.mark.thorough
@pytest.mark.drawn(1)
def test_worker_processes_read_the_same_batches_and_states(case, tmp_path):
    _, config, images, corpus = case
    rows = [3, 0, 5, 2]  # Both rows of one pair, and one row of two other pairs.
    expected = take(train_batches(corpus, config, rows, seed=SEED), 8)
    evaluated = list(validation_batches(corpus, config, rows))
    in_workers = dataclasses.replace(images, num_workers=2)
    other = load(tmp_path, in_workers, name=config.name, objective=config.objective)
    assert other.fingerprint == corpus.fingerprint
    iterator = train_batches(other, config, rows, seed=SEED)
    found = take(iterator, 3)
    state = iterator.get_state()
    resumed = train_batches(corpus, config, rows, seed=SEED)
    resumed.set_state(state)
    assert_rows(found, expected[:3], slice(None))
    assert_rows(take(resumed, 5), expected[3:], slice(None))
    back = train_batches(other, config, rows, seed=SEED)
    back.set_state(state)
    assert_rows(take(back, 5), expected[3:], slice(None))
    assert_rows(list(validation_batches(other, config, rows)), evaluated, slice(None))


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_any_number_of_workers_reads_the_same_batches(num_workers, tmp_path):
    config = image_config(tmp_path, name=NOISE, global_batch_size=18)
    images = CASES["image_classification, mixed"]
    expected = take(train_batches(load_corpus(config, images), config, range(18), seed=SEED), 5)
    workers = load_corpus(config, dataclasses.replace(images, num_workers=num_workers))
    assert_rows(
        take(train_batches(workers, config, range(18), seed=SEED), 5), expected, slice(None)
    )
    rows = [17, 4, 5, 0, 9]
    assert_rows(take(train_batches(workers, config, rows, seed=SEED), 5), expected, rows)


@pytest.mark.drawn(2)
def test_validation_yields_each_image_once_then_rows_of_zero_weight(case):
    name, config, _, corpus = case
    length = len(corpus.validation)
    batches = list(validation_batches(corpus, config, range(6)))
    assert length % 6 and len(batches) == -(-length // 6)
    rows = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    for i in range(length):
        for key, value in corpus.validation[i].items():
            np.testing.assert_array_equal(rows[key][i], value)
    assert not any(values[length:].any() for key, values in rows.items() if key != "index")
    assert (rows["weights"][:length] == 1).all()
    if "mixed" in name:
        assert (rows["target_shares"][:length] == 1).all()
        np.testing.assert_array_equal(rows["other_targets"], rows["targets"])


def test_evaluation_images_depend_only_on_the_row(case, tmp_path):
    _, config, images, corpus = case
    again = load(tmp_path, images, name=config.name, objective=config.objective)
    for index in range(3):
        for key, value in corpus.validation[index].items():
            np.testing.assert_array_equal(value, again.validation[index][key])


@pytest.mark.drawn(2)
def test_augmentation_differs_between_epochs_and_seeds(case, tmp_path):
    name, config, images, corpus = case
    few = take(train_batches(corpus, config, range(6), seed=SEED), 40)
    # Each image occurs about six times; two random versions of it are very unlikely to be equal.
    seen = {row["images"].tobytes() for row in rows_of(few)}
    assert len(seen) > 0.99 * 240
    batch = next(train_batches(corpus, config, range(6), seed=SEED + 1))
    assert not {row["images"].tobytes() for row in rows_of([batch])} & seen
    if name == "image_reconstruction":
        assert len({int(row["mask_seeds"]) for row in rows_of(few)}) == 240


def rows_of(batches):
    return [
        {key: value[row] for key, value in batch.items()}
        for batch in batches
        for row in range(len(batch["weights"]))
    ]


def test_two_views_of_an_image_differ(tmp_path):
    corpus = load(tmp_path, CASES["image_contrast"], name=NOISE, objective="image_contrast")
    batch = next(train_batches(corpus, image_config(tmp_path), range(6), seed=SEED))
    assert all((first != second).any() for first, second in batch["images"])
    plain = load(tmp_path, ImageConfig(size=8), objective="image_contrast")
    views = next(train_batches(plain, image_config(tmp_path), range(6), seed=SEED))["images"]
    np.testing.assert_array_equal(views[:, 0], views[:, 1])


def test_train_stream_visits_each_image_once_an_epoch_with_its_label(tmp_path):
    corpus = load(tmp_path, ImageConfig(size=8))
    config = image_config(tmp_path)
    batches = take(train_batches(corpus, config, range(6), seed=SEED), 2 * NUM_PLAIN // 6)
    values = np.concatenate([values_of(batch) for batch in batches])
    targets = np.concatenate([batch["targets"] for batch in batches])
    np.testing.assert_array_equal(targets, values % 3)
    first = values[:NUM_PLAIN]
    second = values[NUM_PLAIN:]
    assert sorted(first) == sorted(second) == list(range(1, NUM_PLAIN + 1))
    assert list(first) != list(second) and list(first) != sorted(first)
    elements = np.concatenate([batch["index"] for batch in batches])
    np.testing.assert_array_equal(elements, np.arange(2 * NUM_PLAIN))


@pytest.mark.parametrize("rows", [range(6), [3], [4, 1]], ids=str)
def test_both_images_of_a_pair_are_mixed_by_the_same_share(rows, tmp_path):
    config = image_config(tmp_path)
    images = ImageConfig(size=8, mixup=0.5)
    mixed = take(train_batches(load(tmp_path, images), config, rows, seed=SEED), 6)
    alone = take(train_batches(load(tmp_path, ImageConfig(size=8)), config, range(6), seed=SEED), 6)
    for number, (batch, plain) in enumerate(zip(mixed, alone, strict=True)):
        values = values_of(plain).astype(np.float32)
        for place, row in enumerate(rows):
            other = row ^ 1
            element = 6 * number + row
            share = batch["target_shares"][place]
            # The share depends on the seed and the number of the pair.
            drawn = draw_mix(images, generator((PAIR, SEED, element // 2))).share
            assert share == np.float32(drawn)
            expected = share * values[row] + (1 - share) * values[other]
            np.testing.assert_allclose(batch["images"][place], expected, atol=0.501)
            assert batch["targets"][place] == plain["targets"][row]
            assert batch["other_targets"][place] == plain["targets"][other]


def test_cutmix_shares_equal_the_fractions_of_pixels(tmp_path):
    batches = take(
        train_batches(
            load(tmp_path, ImageConfig(size=8, cutmix=1.0)),
            image_config(tmp_path),
            range(6),
            seed=SEED,
        ),
        10,
    )
    for row in rows_of(batches):
        values, counts = np.unique(row["images"], return_counts=True)
        own = counts[values % 3 == row["targets"]].sum() / 64
        if row["targets"] != row["other_targets"]:
            assert own == pytest.approx(row["target_shares"])


def test_repeated_images_share_a_batch_and_are_not_mixed_with_themselves(tmp_path):
    config = image_config(tmp_path, global_batch_size=12)
    corpus = load(tmp_path, ImageConfig(size=8, repeats=3), global_batch_size=12)
    batches = take(train_batches(corpus, config, range(12), seed=SEED), 15)
    for batch in batches:
        values = values_of(batch)
        _, counts = np.unique(values, return_counts=True)
        assert list(counts) == [3, 3, 3, 3]
        assert (values[::2] != values[1::2]).all()
    # Fifteen batches of four images are one epoch.
    assert len({value for batch in batches for value in values_of(batch)}) == NUM_PLAIN
    # Three images, four times each, do not fit into ten rows, so some occur only three times.
    uneven = load(tmp_path, ImageConfig(size=8, repeats=4), global_batch_size=10)
    batch = next(
        train_batches(uneven, image_config(tmp_path, global_batch_size=10), range(10), seed=SEED)
    )
    assert sorted(np.unique(values_of(batch), return_counts=True)[1]) == [3, 3, 4]


def test_train_fraction_is_equal_per_class_and_smaller_is_a_subset_of_larger(tmp_path):
    found = {}
    for fraction in (0.1, 0.5, 1.0):
        corpus = load(tmp_path, ImageConfig(size=8, train_fraction=fraction))
        assert len(corpus.train) == round(NUM_PLAIN * fraction)
        assert len(corpus.validation) == 13
        values = [int(corpus.train[i]["images"][0, 0, 0]) for i in range(len(corpus.train))]
        counts = np.bincount(np.array(values) % 3)
        assert (counts == counts[0]).all()
        found[fraction] = set(values)
    assert found[0.1] < found[0.5] < found[1.0]
    fingerprints = {
        load(tmp_path, ImageConfig(size=8, train_fraction=f)).fingerprint for f in (0.1, 0.5, 1.0)
    }
    assert len(fingerprints) == 3


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_large_batches_are_prefetched_less(num_ahead, tmp_path, monkeypatch):
    assert [batches_ahead(size) for size in (0, 2**27, 2**28, 2**30, 2**40)] == [8, 8, 4, 1, 1]
    corpus = load(tmp_path, ImageConfig(size=16, channels=3))
    read = []
    train_rows = Images.train_rows

    def counted(self, places):
        rows = train_rows(self, places)
        # Threads of earlier tests may still read ahead from their own images.
        if self is corpus.train:
            read.append(rows)
        return rows

    monkeypatch.setattr(Images, "train_rows", counted)
    bound = num_ahead * 6 * corpus.train.row_bytes
    monkeypatch.setattr(batches, "_PREFETCHED_BYTES", bound)
    iterator = train_batches(corpus, image_config(tmp_path), range(6), seed=SEED)
    next(iterator)
    deadline = time.monotonic() + 30
    while len(read) <= num_ahead and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    # In addition to the prefetched batches, one was taken, and one is waiting to be put in.
    assert num_ahead < len(read) <= num_ahead + 2
    sizes = [values.nbytes for name, values in read[0].items() if name != "index"]
    assert sum(sizes) == bound // num_ahead


def test_too_few_images_for_a_batch_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"batch_size=64 .* needs 64 .* has 60 with data\.valid"):
        load(tmp_path, global_batch_size=64)
    with pytest.raises(ValueError, match=r"has 6 with .* images\.train_fraction=0\.1; reduce"):
        load(tmp_path, ImageConfig(train_fraction=0.1), global_batch_size=8)
    load(tmp_path, ImageConfig(train_fraction=0.1, repeats=2), global_batch_size=8)
