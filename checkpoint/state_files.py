"""Writes and reads the arrays of a training state with Orbax, if they are those of the run."""

import asyncio
import functools
import logging
import sys
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from checkpoint.arrays import DESCRIPTIONS, find_damage_of_arrays
from checkpoint.errors import read_patiently
from checkpoint.layout import STATE
from checkpoint.lazy import LazyArray, LazyHandler, save_args
from checkpoint.paths import check_path
from untrusted.messages import shortened

T = TypeVar("T")


class StateFiles:
    """Writes and reads the arrays of checkpoints. Every process handles its own shards."""

    def __init__(self):
        _keep_orbax_quiet()
        self._handler = _state_handler()

    def start_writing(self, path: Path, state: Any) -> Sequence[Any]:
        """Copy the arrays of a state, and return the futures of their writes in Orbax's threads.

        Args:
            state: pytree of jax.Arrays or LazyArrays.
        """
        args = ocp.args.PyTreeSave(
            state,
            save_args=jax.tree.map(save_args, state),
            custom_metadata={DESCRIPTIONS: {**_describe(state)}},
        )
        # Returns as soon as the arrays are copied. Orbax writes them in its own threads.
        return _run(self._handler.async_save(_orbax_path(path), args=args)) or []

    def finalize(self, path: Path) -> None:
        """Complete the files, once all processes have written theirs; runs on the first process.

        Raises:
            OSError: the arrays are not complete. Orbax only logs a warning if it does not find the
                files of a process.
        """
        self._handler.finalize(_orbax_path(path))
        damage = find_damage_of_arrays(path)
        if damage is not None:
            raise OSError(damage)

    def read(self, path: Path, abstract_state: Any, may_lack: Collection[str]) -> Any:
        """Read the arrays of a checkpoint; each device reads its own shard.

        Args:
            abstract_state: state, as in `Checkpoints.restore`.
            may_lack: fields that either of them may lack, as in `Checkpoints.restore`.

        Returns:
            The state, with None in place of each field that the checkpoint does not have.

        Raises:
            ValueError: other names, shapes or dtypes differ, or somebody has changed the files.
            ReadError: a file cannot be read.
        """
        directory = _orbax_path(path)
        saved_tree = _read(path, lambda: self._handler.metadata(directory).tree)
        present = _check_same_structure(path, saved_tree, abstract_state, may_lack)
        args = ocp.args.PyTreeRestore(
            present,
            restore_args=ocp.checkpoint_utils.construct_restore_args(present),
            # The checkpoint may have more fields; the check above requires them in may_lack.
            partial_restore=True,
        )
        return _read(path, lambda: self._handler.restore(directory, args=args))

    def close(self) -> None:
        """Free the threads."""
        self._handler.close()


def _orbax_path(path: Path) -> Any:
    """Return the directory of a checkpoint's arrays, for methods that expect an `epath.Path`."""
    return check_path(path / STATE)


def _read(path: Path, read: Callable[[], T]) -> T:
    """Read with Orbax, and turn its errors about a checkpoint into a ValueError that names it.

    The checksums are right at this point, so somebody has changed the files on purpose.
    """
    try:
        return read_patiently(path, read)
    except (OSError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # the disk, or too little memory
    except Exception as error:  # Orbax raises many types for files that it does not expect.
        reason = shortened(error.__cause__ or error)  # Orbax wraps TensorStore's errors.
        raise ValueError(
            f"checkpoint {path} cannot be read ({reason}); restore the original, or "
            "delete it to use an older one"
        ) from error


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    # No sharding file, because it would record the mesh's axes and devices.
    arrays = ocp.type_handlers.ArrayHandler(
        enable_write_sharding_file=False,
        # Replicas share the writing of arrays of at least this size. Slicing an array for its
        # replicas compiles a program for each shape and device. For small arrays, these
        # compilations would delay the first save by seconds.
        min_slice_bytes_for_replica_parallel=32 * 2**20,
    )
    return ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        # Compression shrinks trained weights by less than 10 %, and takes CPU time from training.
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (LazyArray, LazyHandler())
        ),
    )


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    # asyncio.run would iterate over the tasks of all threads while Orbax's threads change them.
    loop = asyncio.new_event_loop()
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # none is running
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()
    # In a notebook one is running in this thread, which admits no second one.
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(loop.run_until_complete, coroutine).result()
    finally:
        loop.close()


@functools.cache
def _keep_orbax_quiet() -> None:
    """Suppress the tracebacks of writes that fail in Orbax's threads, from now on.

    `Checkpoints` still receives these errors and logs each failed save in one line. Without this
    function, Orbax prints a traceback, and asyncio reports every other array of the same save as
    an exception that was never retrieved.
    """
    logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in str(record.msg))
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    sys.unraisablehook = hook


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "exception was never retrieved" not in message or "orbax" not in message


def _check_same_structure(
    path: Path, saved_tree: Any, abstract_state: Any, may_lack: Collection[str]
) -> Any:
    """Check that a checkpoint matches a state.

    Args:
        saved_tree: checkpoint's arrays, as a pytree whose leaves have a shape and a dtype.
        abstract_state: state, as in `Checkpoints.restore`.
        may_lack: fields that either of them may lack, as in `Checkpoints.restore`.

    Returns:
        `abstract_state`, with None in place of each field that the checkpoint does not have.

    Raises:
        ValueError: other names, shapes or dtypes differ.
    """
    saved = _describe(saved_tree)
    wanted = _describe(abstract_state)
    differences = [
        f"{name} is {saved.get(name, 'missing')} in the checkpoint and "
        f"{wanted.get(name, 'missing')} in this run"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
        and not (name.partition(".")[0] in may_lack and not (name in saved and name in wanted))
    ]
    if differences:
        more = f" (and {len(differences) - 1} more differ)" if len(differences) > 1 else ""
        raise ValueError(
            f"checkpoint {path} does not match the model: "
            f"{differences[0]}{more}; use the config it was saved with, or another workdir"
        )
    lacking = {name.partition(".")[0] for name in wanted.keys() - saved.keys()}

    def is_lacking(keys: Sequence[Any], _: Any = None) -> bool:
        return _leaf_name(keys) in lacking

    return jax.tree_util.tree_map_with_path(
        lambda keys, part: None if is_lacking(keys) else part,
        abstract_state,
        is_leaf=is_lacking,
        is_leaf_takes_path=True,
    )


def _leaf_name(path: Sequence[Any]) -> str:
    """Return the name of an array in a checkpoint, such as `params.layer.kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def _describe(tree: Any) -> dict[str, str]:
    """Return dtypes and shapes by name, as in `{'params.layer.kernel': 'float32[4, 8]'}`.

    Args:
        tree: pytree whose leaves have a shape and a dtype; other leaves are ignored.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {
        _leaf_name(path): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }
