"""Schedule-free learning is refused where it cannot work; see test_optimizer.py for its formula."""

import pytest

from tests.runs import CONFIG, TINY, arguments
from tests.train.refusals import refusal
from train.config.config_files import load
from train.config.schema import validate_config
from train.main import main
from train.run.compatibility import check_optimizer


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.ema_decay=0.9", "cannot be combined with train.ema_decay=0.9; remove one of them"),
        ("optimizer.layer_decay=0.9", "a part of their updates only; set optimizer.layer_decay=1"),
        ("precision.params=bfloat16", "rounds too much; set precision.params=float32"),
        ("memory.placement=host", "may need whole arrays; set optimizer.name=adamw or muon"),
    ],
)
def test_schedule_free_is_refused(override, message):
    config = validate_config(load(CONFIG, ["optimizer.name=schedule_free", override]))
    with pytest.raises(ValueError, match=message):
        check_optimizer(config)


@pytest.mark.usefixtures("shared_steps")
@pytest.mark.thorough
def test_run_resumes_only_with_the_beta_of_its_average(corpus_overrides, tmp_path, capsys):
    overrides = (*TINY, *corpus_overrides, "optimizer.name=schedule_free", "train.num_steps=1")
    assert main(arguments(tmp_path, overrides)) == 0
    error = refusal(tmp_path, (*overrides, "optimizer.beta1=0.98"), capsys)
    assert "these keys differ (saved -> now): optimizer.beta1: 0.9 -> 0.98" in error
