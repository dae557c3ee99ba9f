"""Schedule-free learning is refused where it cannot work; see test_optimizer.py for its formula."""

import pytest

from tests.runs import CONFIG
from train.config.config_files import load
from train.config.schema import validate_config
from train.run.compatibility import check_optimizer


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.ema_decay=0.9", "cannot be combined with train.ema_decay=0.9; remove one of them"),
        ("precision.params=bfloat16", "rounds too much; set precision.params=float32"),
        ("memory.placement=host", "may need whole arrays; set optimizer.name=adamw or muon"),
    ],
)
def test_schedule_free_is_refused(override, message):
    config = validate_config(load(CONFIG, ["optimizer.name=schedule_free", override]))
    with pytest.raises(ValueError, match=message):
        check_optimizer(config)
