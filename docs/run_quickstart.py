"""Runs docs/examples/quickstart.ipynb and stores its outputs: `python -m docs.run_quickstart`.

The site shows the notebook with these outputs. A test runs the notebook without storing them.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "examples" / "quickstart.ipynb"
_CELL_S = 300  # longest time of a cell


def run(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Execute a notebook in a folder, with this project's packages and commands.

    Raises:
        CellExecutionError: a cell has failed.
        CellTimeoutError: a cell took too long.
    """
    scripts = Path(sys.executable).parent
    variables = {"PYTHONPATH": str(ROOT), "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    client = NotebookClient(
        notebook,
        timeout=_CELL_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(env={**os.environ, **variables})


def printed(cell: nbformat.NotebookNode) -> str:
    """Return the text that a cell has printed."""
    return "".join(output["text"] for output in cell.get("outputs", ()) if "text" in output)


def without_warnings(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a notebook without the standard error of its cells."""
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        executed = run(nbformat.read(NOTEBOOK, as_version=4), Path(directory))
    nbformat.write(without_warnings(executed), NOTEBOOK)
