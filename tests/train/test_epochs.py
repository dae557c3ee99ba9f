"""Runs whose length is a number of epochs."""

import itertools
import json
from collections import Counter
from fractions import Fraction

import pytest

from data.batches import epoch_elements, train_batches
from tests.data.images.pictures import NUM_PLAIN
from tests.runs import CONFIG, TINY, arguments, make_run
from tests.train.config.loading import load
from tests.train.refusals import refusal
from train.config.config_files import shorten
from train.config.run_length import with_num_steps
from train.config.schema import validate_config
from train.main import main
from train.reporting.metrics import read_metrics
from train.run.compatibility import check_optimizer

pytestmark = pytest.mark.usefixtures("shared_steps")

FILE = """
from configs import gpt2
def get_config():
    config = gpt2.get_config()
    config.train.num_steps = {steps}
    config.train.num_epochs = {epochs}
    return config
"""


def chats(tmp_path, count: int) -> tuple[str, ...]:
    """Write conversations, of which several fit into a row; return the overrides to train on."""
    roles = ("user", "assistant")
    lines = [
        {"messages": [{"role": role, "content": f"{i}" * (1 + i % 5)} for role in roles]}
        for i in range(count)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return (
        *(override for override in TINY if "num_steps" not in override),
        f"data.paths={tmp_path}/chats.jsonl",
        f"data.cache_dir={tmp_path}/cache",
        "data.objective=chat",
        "data.chat_template=roles",
        "data.sequence_length=96",
        "data.validation_fraction=0",
        "model.num_layers=2",
    )


def test_every_example_is_read_once_an_epoch(tmp_path):
    """Conversations are packed, so there are fewer rows than lines."""
    run, corpus = make_run(chats(tmp_path, 150))
    size = run.config.data.global_batch_size
    num_rows = len(corpus.train)
    assert epoch_elements(corpus, run.config.data, run.config.images) == num_rows
    assert num_rows % size > 0 and num_rows < 150
    order = corpus.train
    seen: Counter[bytes] = Counter()
    batches = train_batches(corpus, run.config.data, range(size), seed=0)
    for batch in itertools.islice(batches, -(-2 * num_rows // size)):
        rows = zip(batch["index"], batch["tokens"], strict=True)
        seen.update(tokens.tobytes() for index, tokens in rows if index < 2 * num_rows)
    assert seen == Counter(order[i]["tokens"].tobytes() for i in range(num_rows) for _ in "12")


def test_images_that_are_repeated_count_once():
    overrides = (
        "data.name=tests.data.images.pictures:plain_images",
        "data.global_batch_size=9",
        "images.repeats=2",
    )
    run, corpus = make_run(overrides, CONFIG.replace("gpt2", "vit"))
    # 9 rows show 5 images.
    num_elements = epoch_elements(corpus, run.config.data, run.config.images)
    assert num_elements / 9 == Fraction(NUM_PLAIN, 5)


@pytest.mark.thorough
def test_run_of_epochs_resumes_on_another_mesh(tmp_path, capsys):
    overrides = chats(tmp_path, 150)
    num_rows = len(make_run(overrides)[1].train)
    expected = [-(-num_rows // 16), -(-5 * num_rows // 32)]  # 1 and 2.5 epochs
    run = tmp_path / "run"
    one = (*overrides, "train.num_epochs=1")
    two = (*overrides, "train.num_epochs=2.5", "mesh.data=2", "train.num_microbatches=4")
    assert main(arguments(run, one)) == 0
    printed = f"{expected[0]} steps; an epoch has {num_rows / 16:.3g} steps"
    assert printed in capsys.readouterr().err
    assert main(arguments(run, two)) == 0
    steps = [entry["step"] for entry in read_metrics(run / "metrics.jsonl")]
    assert steps == [*range(1, expected[1] + 1)]
    # The config that the run has written replays it, and says so if the data does not fit.
    saved = [f"--config={run}/config.yaml", f"--workdir={run}"]
    assert main(saved) == 0 and "nothing is left to train" in capsys.readouterr().err
    (tmp_path / "more.jsonl").write_text((tmp_path / "chats.jsonl").read_text() * 2)
    other = [saved[0], f"--workdir={tmp_path}/other", f"--config.data.paths={tmp_path}/more.jsonl"]
    assert main(other) == 2
    assert f"train.num_steps={expected[1]}, but train.num_epochs=2.5" in capsys.readouterr().err


def test_one_key_sets_the_length(tmp_path, capsys):
    file = tmp_path / "own.py"
    both = ("train.num_epochs=2", "train.num_steps=30")
    error = refusal(tmp_path / "run", both, capsys)
    assert "train.num_steps=30 and train.num_epochs=2 both set the length" in error
    file.write_text(FILE.format(steps=7, epochs=2.0))
    with pytest.raises(ValueError, match="remove one of them from the config file"):
        load(str(file))
    train = load(str(file), [both[1]]).train
    assert (train.num_steps, train.num_epochs) == (30, None)
    train = load(str(file), [both[0]]).train  # the number of steps is known later
    assert (train.num_steps, train.num_epochs) == (100, 2)


def test_decay_must_fit_into_the_length_when_it_is_known():
    decay = ("optimizer.schedule=wsd", "optimizer.decay_steps=200")
    config = validate_config(load(CONFIG, ["train.num_epochs=2", *decay]))
    check_optimizer(config)  # the data, and so the length, is not known yet
    size = config.data.global_batch_size
    assert with_num_steps(config, Fraction(150 * size)).train.num_steps == 300
    with pytest.raises(ValueError, match="decay_steps=200 is more than the 100 steps of the run"):
        with_num_steps(config, Fraction(50 * size))
    with pytest.raises(ValueError, match="decay_steps=200 is more than the 120 steps of the run"):
        check_optimizer(validate_config(load(CONFIG, ["train.num_steps=120", *decay])))
    config = load(CONFIG, [*decay])
    shorten(config)
    check_optimizer(validate_config(config))
