"""The file formats of texts and examples, by the ends of their names."""

from pathlib import Path

from data.table_files import SUFFIXES as TABLES

#: Files that are read as they are.
PLAIN = (".txt", ".jsonl")
#: Character between the values of a row.
DELIMITERS = {".csv": ",", ".tsv": "\t"}
#: A file with a list of objects, or with an object per line as in .jsonl.
JSON = ".json"
#: Compressed files: the end of the name after the one of the content.
COMPRESSED = (".gz", ".zst")
#: All formats.
FORMATS = (
    *PLAIN,
    *TABLES,
    *DELIMITERS,
    JSON,
    *(plain + compressed for plain in PLAIN for compressed in COMPRESSED),
)


def format_of(file: str | Path) -> str | None:
    """Return the format of a file, one of FORMATS; None if it has none of them."""
    return next((each for each in FORMATS if str(file).endswith(each)), None)


def named_formats() -> str:
    """Return the formats for a message."""
    return f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
