"""The TFDS data set `python_stdlib`: the sources of this machine's Python standard library.

It provides real text on every machine without a download: about 11 MB in 700 files. Importing this
module imports tensorflow_datasets, which is slow, so it is imported only when the data set is used.
"""

import hashlib
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

VALIDATION_FRACTION = 0.05
# Increase this when the choice of files or the split changes: TFDS then builds the data set again.
_REVISION = 1
# Tests repeat boilerplate, and pydoc_data is generated. Installed packages and the configuration of
# the Python build (config-*, _sysconfigdata*) differ from machine to machine.
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """Builder of {'text', 'path'} examples, one per source file, without TensorFlow."""

    # Python 3.11.7 has version 1.311.7, so each Python version gets a data set of its own.
    VERSION = tfds.core.Version(
        f"{_REVISION}.{sys.version_info.major * 100 + sys.version_info.minor}"
        f".{sys.version_info.micro}"
    )
    RELEASE_NOTES = {str(VERSION): f"The standard library of Python {sys.version.split()[0]}."}
    # Without this, TFDS locates this file with the optional library importlib_resources.
    code_path = tfds.core.Path(__file__)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Sources of the Python standard library, one example per file, no tests.",
            features=tfds.features.FeaturesDict(
                {"text": tfds.features.Text(), "path": tfds.features.Text()}
            ),
            homepage="https://docs.python.org/3/library/",
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # Nothing is downloaded.
        files = stdlib_files(Path(sysconfig.get_paths()["stdlib"]))
        held_out = {path for path in files if is_validation(path)}
        return {
            "train": self._generate_examples(
                {path: file for path, file in files.items() if path not in held_out}
            ),
            "validation": self._generate_examples({path: files[path] for path in held_out}),
        }

    def _generate_examples(self, files: dict[str, Path]) -> Iterator[tuple[str, dict[str, str]]]:
        for path, file in sorted(files.items()):
            # A few sources are not UTF-8; tokenize.open honors their coding cookies.
            with tokenize.open(file) as source:
                text = source.read()
            if text:
                yield path, {"text": text, "path": path}


def stdlib_files(root: Path) -> dict[str, Path]:
    """Return path relative to `root`, written with '/' -> file, for each source of the library."""
    files = {}
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        skipped = _SKIPPED_DIRECTORIES.intersection(relative.parts[:-1])
        if not skipped and not relative.parts[0].startswith(_SKIPPED_PREFIXES):
            files[relative.as_posix()] = file
    return files


def is_validation(path: str) -> bool:
    """Return whether the file at this relative path is held out; the same on every machine."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_FRACTION * 2**64
