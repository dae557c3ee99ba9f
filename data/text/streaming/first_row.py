"""Checks at the start of a run that `data.text_field` names a text of the shards.

Only the first shard with fields is read, and of it as little as possible:

    on this machine    one row, or the names of a table's columns
    in a store         its first bytes; of a .parquet file the last ones, which name the columns

Everything else that may be wrong with a shard is found when the run reads it.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.formats import TABLES, format_of
from data.table_files import Budget, open_table
from data.text.streaming.shards import Shard
from data.text.tables import is_plain, open_lines
from data.text.text_files import read_documents
from untrusted.limited import run_limited
from untrusted.limited_process import Limits

# Enough for a long document, and for the columns of a large table.
_PART_BYTES = 4 * 2**20


def check_text_field(shards: Sequence[Shard], config: DataConfig, limits: Limits) -> None:
    """Check that the first row of the first shard with rows has the field `data.text_field`.

    Args:
        limits: limits of the process that reads the shard, as for the process that tokenizes it.

    Raises:
        ValueError: The row has no such field, or a store refuses access.
        ConnectionError: A store or the hub cannot be reached.
    """
    has_fields = (
        shard
        for shard in shards
        if shard.size != 0 and not (format_of(shard.name) or "").startswith(".txt")
    )
    shard = next(has_fields, None)
    if shard is None:
        return
    with tempfile.TemporaryDirectory() as directory:
        file = Path(shard.name)
        if not shard.is_local:
            file = Path(directory, f"shard{format_of(shard.name)}")
            content = shard.read_part(_PART_BYTES, from_end=file.suffix == ".parquet")
            if content is None:
                return
            file.write_bytes(content)
        argument = {"file": str(file), "name": shard.name, "text_field": config.text_field}
        problem = run_limited(find_missing_field, argument, f"data.paths: {shard.name}", limits)
    if problem is not None:
        raise ValueError(problem)


def find_missing_field(argument: dict[str, Any]) -> str | None:
    """Return a message if the first row lacks the field, or None; in a process with limits.

    Args:
        argument: "file" to read, which may be only a part of the shard, the shard's "name" for
            messages, and the "text_field".
    """
    file = Path(argument["file"])
    field = argument["text_field"]
    try:
        if file.suffix in TABLES:
            with open_table(file, Budget([file])) as (schema, _):
                columns = sorted(each.name for each in schema if is_plain(each.type))
            if field not in columns:
                return (
                    f"data.paths: {argument['name']} has the columns {columns}, but no "
                    f"data.text_field={field!r}; set data.text_field to the column that contains "
                    "the text"
                )
        else:
            with open_lines(file) as lines:
                next(read_documents(lines, file, field), None)
    except (OSError, ValueError) as error:
        # The others may come from the end of a part, or are found when the shard is read.
        if f"data.text_field={field!r}" in str(error):
            return str(error).replace(str(file), argument["name"])
    return None
