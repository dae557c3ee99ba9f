"""Changes the arrays of a checkpoint on purpose; `write_checksums` makes its checksums right."""

import json
from collections.abc import Callable
from pathlib import Path

import tensorstore as ts


def edit_store(step: Path, key: str, edit: Callable[[bytes], bytes | None]) -> None:
    """Change or delete a value of the store that contains the arrays."""
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{step}/state/"}}
    store = ts.KvStore.open(spec).result()
    store.write(key, edit(store.read(key).result().value)).result()


def edit_metadata(step: Path, array: str, **changes) -> None:
    """Change the zarr metadata of an array."""

    def edit(text: bytes) -> bytes:
        return json.dumps(json.loads(text) | changes).encode()

    edit_store(step, f"{array}/zarr.json", edit)


def edit_list(step: Path, **changes) -> None:
    """Change the list of arrays."""
    file = step / "state" / "_METADATA"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
