"""Records a run with Weights & Biases (`log.trackers=wandb`).

The library's environment variables apply, such as WANDB_PROJECT, WANDB_ENTITY and
WANDB_MODE=offline. Its files are in `WORKDIR/wandb/`.
"""

import logging
import os
from collections.abc import Mapping

import wandb
from requests.utils import get_netrc_auth

from train.reporting.trackers import TrackedRun

_log = logging.getLogger(__name__)


def check_settings() -> None:
    """Check that somebody is logged in, unless W&B is offline. This does not use the network.

    Raises:
        ValueError: nobody is; the library would ask for a key on the terminal.
    """
    settings = wandb.setup().settings
    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    has_key = any(os.environ.get(name) for name in variables) or bool(settings.api_key)
    if settings.mode == "online" and not has_key and not get_netrc_auth(settings.base_url):
        raise ValueError(
            "log.trackers=wandb has no API key; run `wandb login`, set WANDB_API_KEY, or record "
            "without a network with WANDB_MODE=offline"
        )


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self, run: TrackedRun):
        """Create the record, or continue it."""
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "taibai"),
            name=os.environ.get("WANDB_NAME", run.workdir.resolve().name),
            id=run.record_id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", run.workdir),
            config=dict(run.parameters),
            allow_val_change=True,  # a run may resume with another learning rate
            # Leave the output of the run alone, and copy no code.
            settings=wandb.Settings(console="off", silent=True, save_code=False),
        )
        self.record_id = self._run.id
        if not self._run.offline:
            _log.info("W&B records the run at %s", self._run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record values. W&B ignores steps before the newest one that it has."""
        self._run.log(dict(metrics), step=step)

    def finish(self, ended: str) -> None:
        """Upload the remaining values."""
        if ended == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ended == "finished" else 1)


start = WandbTracker
