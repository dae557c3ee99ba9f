"""Folders that `save_to_disk` of a `datasets.Dataset` or `DatasetDict` has written."""

from pathlib import Path
from typing import Any

from untrusted.documents import read_json
from untrusted.files import check_link
from untrusted.schema import check_fields

#: Files that `save_to_disk` of a Dataset, and of a DatasetDict, write into their folders.
_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def files_of_folder(folder: Path) -> list[Path]:
    """Return the .arrow files of a dataset that `datasets` has saved, in order; [] if it is none.

    Raises:
        ValueError: It has several splits, or its rows were selected or reordered without rewriting
            the files.
    """
    if splits := saved_splits(folder):
        raise ValueError(
            f"data.paths: {folder} has the splits {', '.join(splits)}; name the folder of one, "
            f"such as {folder / splits[0]}"
        )
    if not (folder / _STATE).is_file():
        return []
    state = read_json(folder / _STATE, within=folder)
    kinds = {"_data_files": list[dict[str, Any]], "_indices_files": list[Any] | None}
    check_fields(state, kinds, folder / _STATE)
    if state.get("_indices_files"):
        raise ValueError(
            f"data.paths: the rows of {folder} were selected or reordered; call flatten_indices() "
            "before save_to_disk"
        )
    files = [folder / str(each.get("filename")) for each in state["_data_files"]]
    for file in files:
        check_link(file, folder)
    return files


def saved_splits(folder: Path) -> tuple[str, ...]:
    """Return the splits of a `DatasetDict` that `datasets` has saved, sorted; () if it is none."""
    if not (folder / _SPLITS).is_file():
        return ()
    return tuple(sorted(path.parent.name for path in folder.glob(f"*/{_STATE}")))
