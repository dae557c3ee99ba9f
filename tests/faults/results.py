"""The results of a run: reads them from its log and its checkpoints, and compares them."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from checkpoint.config import CheckpointConfig
from checkpoint.layout import STATE
from checkpoint.manager import Checkpoints
from tests.faults.start import Broken
from train.reporting.metrics import METRICS_FILE

#: Logged values that differ between identical runs.
_TIMES = ("step_time_s", "data_wait_s", "tokens_per_s", "images_per_s", "mfu")


def trajectory(workdir: Path) -> dict[int, tuple]:
    """Return step -> everything that was logged for it, except times, in the order of the log."""
    steps: dict[int, tuple] = {}
    for line in (workdir / METRICS_FILE).read_text().splitlines():
        entry = json.loads(line)
        kept = tuple(sorted(item for item in entry.items() if item[0] not in _TIMES))
        steps[entry["step"]] = (*steps.get(entry["step"], ()), kept)
    return steps


def compare(found: Mapping[int, tuple], expected: Mapping[int, tuple]) -> None:
    """Check that two trajectories are equal.

    Args:
        found: trajectory of a disturbed run.
        expected: trajectory of the undisturbed run.

    Raises:
        Broken: they differ; the message names the first step at which they do.
    """
    for step in sorted(found.keys() | expected.keys()):
        if found.get(step) != expected.get(step):
            raise Broken(
                f"step {step} differs from the undisturbed run: logged {found.get(step)}, "
                f"expected {expected.get(step)}"
            )


def load(path: Path, scratch: Path) -> str:
    """Restore a checkpoint as a run does, and return a digest of its arrays and data state.

    Args:
        path: checkpoint, `<step>/`.
        scratch: directory that this function may overwrite.

    Returns:
        A SHA-256 digest in hexadecimal.

    Raises:
        Broken: the checkpoint does not load.
    """
    # Checkpoints.restore takes the newest checkpoint of a directory, so use one with only this.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / path.name).symlink_to(path.absolute())
    checkpoints = Checkpoints(scratch, CheckpointConfig(every_steps=0, max_to_keep=1))
    try:
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, enable_pinned_host_transfer=False)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
            handler.metadata(epath.Path(path / STATE)).tree,
            is_leaf=lambda leaf: hasattr(leaf, "shape"),
        )
        restored = checkpoints.restore(abstract)
        assert restored is not None
    except Exception as error:
        raise Broken(f"{path} passes verification but does not load: {error}") from error
    finally:
        checkpoints.close()
    _, state, data_state = restored
    digest = hashlib.sha256(json.dumps(data_state, sort_keys=True).encode())
    for name, leaf in jax.tree_util.tree_leaves_with_path(state):
        digest.update(str(name).encode() + np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
