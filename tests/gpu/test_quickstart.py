"""The notebook docs/examples/quickstart.ipynb runs in the time that it promises."""

import re
import resource
import subprocess
import sys

import nbformat
import pytest

from docs import run_quickstart
from tests.runs import ROOT

pytestmark = pytest.mark.gpu_compiler  # for its plan

#: CPU time of the notebook, in units of the CPU time that the check of a small run takes, because
#: seconds depend on the machine and on the other tests. 33 were measured: 199 s and 6.1 s.
_MOST_CHECKS = 50


def test_quickstart_trains_plans_generates_and_exports_in_a_short_time(tmp_path):
    notebook = nbformat.read(run_quickstart.NOTEBOOK, as_version=4)
    before_s = _cpu_s_of_children()
    executed = run_quickstart.run(notebook, tmp_path)
    notebook_s = _cpu_s_of_children() - before_s
    cells = {cell["id"]: run_quickstart.printed(cell) for cell in executed.cells}
    pairs = re.findall(r"loss (\S+) on 1 device, (\S+) on 8", cells["mesh-code"])
    assert len(pairs) == 5
    for one, eight in pairs:
        assert float(eight) == pytest.approx(float(one), abs=2e-4)  # printed with 4 digits
    assert re.search(r"^data=.* best$", cells["plan-code"], re.MULTILINE)
    assert cells["generate-code"].strip()
    assert "model.safetensors" in cells["export-code"]
    before_s = _cpu_s_of_children()
    command = [sys.executable, "-m", "train.main", "--config=configs/gpt2.py", "--check"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert 0 < notebook_s < _MOST_CHECKS * (_cpu_s_of_children() - before_s)


def _cpu_s_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
