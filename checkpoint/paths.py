"""Which directories can contain checkpoints: those whose names TensorStore does not interpret."""

from pathlib import Path

import tensorstore as ts


def check_path(path: Path) -> Path:
    """Check that TensorStore and Orbax can read and write files in a directory.

    Orbax must get the returned path, which is not an `epath.Path`. Methods of epath.Path interpret
    the names of the directories that contain a file: `glob` treats `[1]` and `*` as patterns, and
    `/gs/` and `/s3/` stand for buckets.

    Args:
        path: directory; it need not exist.

    Returns:
        The same directory without `..` and links, which TensorStore and Orbax resolve differently.

    Raises:
        ValueError: they would use another directory or none.
    """
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:  # a RuntimeError before Python 3.13
        raise ValueError(
            f"checkpoints cannot be stored in {path}: it is a link in a circle ({error}); remove "
            "the link, or choose another directory"
        ) from None
    try:
        is_kept = ts.KvStore.Spec({"driver": "file", "path": f"{real}/"}).path == f"{real}/"
    except (ValueError, RuntimeError):  # A RuntimeError if the path is not UTF-8.
        is_kept = False
    if not is_kept or "gs:/" in f"{real}/":  # Orbax turns it into gs://.
        raise ValueError(
            f"checkpoints cannot be stored in {path}: TensorStore does not support names with a "
            "backslash or with bytes that are not UTF-8, and names that end with '.__lock' or 'gs:'"
            "; choose another directory"
        )
    return real
