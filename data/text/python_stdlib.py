"""The TFDS set `python_stdlib`: the sources of this machine's own Python standard library.

Real text on every machine, without a download: about 11 MB in 700 files. Importing this module
imports tensorflow_datasets (slow), so the project imports it only where the set is asked for.
"""

import hashlib
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

VALIDATION_FRACTION = 0.05
# Raise this when the choice of files or the split changes: it makes TFDS build the set anew.
_REVISION = 1
# Tests repeat boilerplate, pydoc_data is generated, installed packages differ from machine to
# machine, and so does the build's own configuration (config-*, _sysconfigdata*).
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """Builds {'text', 'path'} examples, one a source file, without TensorFlow."""

    # Python 3.11.7 gives 1.311.7, so another Python gets a set of its own beside this one.
    VERSION = tfds.core.Version(
        f"{_REVISION}.{sys.version_info.major * 100 + sys.version_info.minor}"
        f".{sys.version_info.micro}"
    )
    RELEASE_NOTES = {str(VERSION): f"The standard library of Python {sys.version.split()[0]}."}
    # TFDS otherwise asks the optional library importlib_resources where this file is.
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
            # tokenize.open honours a source's own coding cookie; a few are not UTF-8.
            with tokenize.open(file) as source:
                text = source.read()
            if text:
                yield path, {"text": text, "path": path}


def stdlib_files(root: Path) -> dict[str, Path]:
    """Returns the library's source files by their path below `root`, written with '/'."""
    files = {}
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        skipped = _SKIPPED_DIRECTORIES.intersection(relative.parts[:-1])
        if not skipped and not relative.parts[0].startswith(_SKIPPED_PREFIXES):
            files[relative.as_posix()] = file
    return files


def is_validation(path: str) -> bool:
    """Returns whether the file at this relative path is held out; the same on every machine."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_FRACTION * 2**64
