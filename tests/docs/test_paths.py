"""The docs name only files that exist."""

import re

from tests.runs import ROOT

_PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    # Pages for users of other trainers name the files of these, too.
    *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "coming_from"),
)
_FOLDERS = (path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
_FILES = {"/taibai.py"} | {
    f"/{path.relative_to(ROOT)}" for folder in _FOLDERS for path in folder.rglob("*.*")
}


def test_code_files_named_in_the_docs_exist():
    named = {
        (page.name, span)
        for page in _PAGES
        for span in re.findall(r"`([\w./-]+\.(?:py|sh|sbatch))`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    lost = [each for each in named if not any(file.endswith(f"/{each[1]}") for file in _FILES)]
    assert not lost
