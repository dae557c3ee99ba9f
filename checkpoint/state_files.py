"""Writes and reads the arrays of a training state with Orbax."""

import asyncio
import contextlib
from collections.abc import Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from checkpoint.layout import STATE
from checkpoint.lazy import LazyArray, LazyHandler, save_args
from checkpoint.structure import check_same_structure
from untrusted.messages import shortened

T = TypeVar("T")


class StateFiles:
    """Writes and reads the arrays of checkpoints. Every process handles its own shards."""

    def __init__(self):
        self._handler = _state_handler()

    def start_writing(self, path: Path, state: Any) -> Sequence[Any]:
        """Copy the arrays of a state, and start to write them in Orbax's threads.

        Args:
            path: the directory of the checkpoint.
            state: a pytree of jax.Arrays or LazyArrays.

        Returns:
            Futures of the writes of this process.
        """
        args = ocp.args.PyTreeSave(state, save_args=jax.tree.map(save_args, state))
        # Returns as soon as the arrays are copied. Orbax writes them in its own threads.
        return _run(self._handler.async_save(epath.Path(path / STATE), args=args)) or []

    def finalize(self, path: Path) -> None:
        """Complete the files, once all processes have written theirs; runs on the first process.

        Args:
            path: the directory of the checkpoint.
        """
        self._handler.finalize(epath.Path(path / STATE))

    def read(self, path: Path, abstract_state: Any, may_lack: Collection[str]) -> Any:
        """Read the arrays of a checkpoint; each device reads its own shard.

        Args:
            path: the directory of the checkpoint.
            abstract_state: the state, as in `Checkpoints.restore`.
            may_lack: fields that either of them may lack, as in `Checkpoints.restore`.

        Returns:
            The state, with None in place of each field that the checkpoint does not have.

        Raises:
            ValueError: other names, shapes or dtypes differ, or somebody has changed the files.
        """
        directory = epath.Path(path / STATE)
        with _readable(path):
            saved_tree = self._handler.metadata(directory).tree
        present = check_same_structure(path, saved_tree, abstract_state, may_lack)
        args = ocp.args.PyTreeRestore(
            present,
            restore_args=ocp.checkpoint_utils.construct_restore_args(present),
            # The checkpoint may have more fields; the check above requires them in may_lack.
            partial_restore=True,
        )
        with _readable(path):
            return self._handler.restore(directory, args=args)

    def close(self) -> None:
        """Free the threads."""
        self._handler.close()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn Orbax's errors about a checkpoint into a ValueError that names it.

    The checksums are right at this point, so somebody has changed the files on purpose.
    """
    try:
        yield
    except (OSError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # the disk, or too little memory
    except Exception as error:  # Orbax raises many types for files that it does not expect.
        raise ValueError(
            f"checkpoint {path} cannot be read ({shortened(error)}); restore the original, or "
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
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
