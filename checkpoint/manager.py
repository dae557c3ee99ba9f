"""Checkpoints of a run: saved asynchronously, verified on load, restored onto any mesh.

A checkpoint is a directory `<step>/` with `state/` (arrays, by name and global shape),
`data_state/` (JSON) and `checksums.sha256`. It has no trace of the mesh or of a sharding; only
the boundaries of the chunks on disk follow the shards that were written in parallel, and reading
ignores them. Nothing in it is ever unpickled.

All of it is written into a temporary directory, checksums last, and renamed: a checkpoint is
there whole or not at all, whenever the process is killed.
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from checkpoint.checksums import find_damage, write_checksums
from checkpoint.lazy import LazyArray, LazyHandler, save_args

_TMP_SUFFIX = ".orbax-checkpoint-tmp"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved and how many stay."""

    every_steps: int  # steps between two saves; 0 saves at the end only
    max_to_keep: int  # the newest so many stay; with 1 there is nothing to fall back on

    def __post_init__(self):
        if self.every_steps < 0:
            raise ValueError(
                f"checkpoint.every_steps={self.every_steps} must not be negative; "
                "choose a number of steps, or 0 to save at the end only"
            )
        if self.max_to_keep < 1:
            raise ValueError(
                f"checkpoint.max_to_keep={self.max_to_keep} must be at least 1; "
                "choose 2 or more to have one to fall back on"
            )


class Checkpoints:
    """The checkpoints in one directory.

    With several processes every method is called by all of them, in the same order, and
    `directory` is on a file system that all of them see.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig):
        self._directory = Path(directory).absolute()
        self._passed_over: list[int] = []  # damaged checkpoints, deleted by the next save
        self._may_hold_leftovers = True
        self._step_being_saved: int | None = None
        # No sharding file: it would name the mesh's axes and devices.
        arrays = ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False)
        state_handler = ocp.PyTreeCheckpointHandler(
            use_zarr3=True,
            # Trained weights shrink by under a tenth; the training loop needs the cores more.
            use_compression=False,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                (jax.Array, arrays), (LazyArray, LazyHandler())
            ),
        )
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={"state": state_handler, "data_state": ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(config.max_to_keep),
                # Every process must see the same list of steps, or they would wait for each other.
                single_host_load_and_broadcast=True,
                atomicity_options=ocp.options.AtomicityOptions(
                    mode=ocp.options.AtomicityMode.ATOMIC_RENAME
                ),
                async_options=ocp.AsyncOptions(post_finalization_callback=self._before_commit),
            ),
        )

    def save(self, step: int, state: Any, data_state: Mapping[str, Any]) -> bool:
        """Starts to save and returns; True, or False if `step` is there already.

        The arrays may be donated as soon as this returns. An earlier save that is still being
        written is waited for, and its failure is raised here.

        Args:
            step: the number of steps that `state` has behind it.
            state: any pytree of jax.Arrays, each sharded as it may be, or of LazyArrays, which
                must stay readable until `wait` returns.
            data_state: what can be written as JSON: the position in the data. The first
                process's is written, so it must be the same on all of them.
        """
        self.wait()
        self._remove_leftovers()
        if step in self.all_steps():
            return False
        self._step_being_saved = step
        return self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(state, save_args=jax.tree.map(save_args, state)),
                data_state=ocp.args.JsonSave(dict(data_state)),
            ),
            force=True,
        )

    def restore(self, abstract_state: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """Returns the newest undamaged (step, state, data_state), or None if there are none.

        A damaged checkpoint is passed over with a warning that names it and the reason; the next
        `save` deletes it, restoring alone deletes nothing.

        Args:
            abstract_state: the same pytree of jax.ShapeDtypeStruct, whose shardings are those
                wanted now. Each device reads its own shard.

        Raises:
            ValueError: if all checkpoints are damaged, or if the newest undamaged one has other
                names, shapes or dtypes than `abstract_state`.
        """
        self.wait()
        for step in reversed(self.all_steps()):
            damage = self._find_damage(step)
            if damage is not None:
                name = self._directory / str(step)
                logger.warning("Checkpoint %s is passed over: %s.", name, damage)
                self._passed_over.append(step)
                continue
            self._check_same_structure(step, abstract_state)
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(
                        abstract_state,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract_state),
                    ),
                    data_state=ocp.args.JsonRestore(),
                ),
            )
            return step, restored["state"], restored["data_state"]
        if self._passed_over:
            steps = ", ".join(map(str, sorted(self._passed_over)))
            raise ValueError(
                f"all checkpoints in {self._directory} are damaged (steps {steps}; the log says "
                "how); restore a copy of one, or start in another workdir"
            )
        return None

    def all_steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, oldest first, without those passed over."""
        return sorted(set(self._manager.all_steps()) - set(self._passed_over))

    def latest_step(self) -> int | None:
        """Returns the newest of `all_steps`, or None."""
        return max(self.all_steps(), default=None)

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises what a save failed with."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and frees the threads. Nothing can be saved or restored afterwards."""
        self._manager.close()

    def _before_commit(self) -> None:
        # Orbax calls this on the first process, in its own thread, when all processes have
        # written and before the rename, so that there is no checkpoint without checksums.
        write_checksums(self._directory / f"{self._step_being_saved}{_TMP_SUFFIX}")

    def _find_damage(self, step: int) -> str | None:
        directory = self._directory / str(step)
        process, num_processes = jax.process_index(), jax.process_count()
        damage = find_damage(directory, part=process, num_parts=num_processes)
        if num_processes == 1:
            return damage
        # All processes must come to the same verdict, or some would wait for the others forever.
        verdicts = np.asarray(multihost_utils.process_allgather(np.array(damage is not None)))
        if damage is None and verdicts.any():
            finder = int(verdicts.reshape(-1).argmax())
            damage = f"process {finder} found a damaged file (its log says which)"
        return damage

    def _check_same_structure(self, step: int, abstract_state: Any) -> None:
        metadata = self._manager.item_metadata(step)["state"]
        saved = _describe(metadata.tree)
        wanted = _describe(abstract_state)
        differences = [
            f"{name} is {saved.get(name, 'missing')} there and {wanted.get(name, 'missing')} here"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if differences:
            more = f" (and {len(differences) - 1} more differ)" if len(differences) > 1 else ""
            raise ValueError(
                f"checkpoint {self._directory / str(step)} is of another model: "
                f"{differences[0]}{more}; use the config it was saved with, or another workdir"
            )

    def _remove_leftovers(self) -> None:
        """Removes what a killed process left half written, and what `restore` passed over."""
        if self._may_hold_leftovers and jax.process_index() == 0:
            for path in self._directory.glob(f"*{_TMP_SUFFIX}*"):
                shutil.rmtree(path)
        self._may_hold_leftovers = False
        for step in self._passed_over:
            self._manager.delete(step)
        self._passed_over = []


def _describe(tree: Any) -> dict[str, str]:
    """Returns {'params.layer.kernel': 'float32[4, 8]'} of a tree of things with shape and dtype."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {
        ".".join(_key_name(key) for key in path): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
