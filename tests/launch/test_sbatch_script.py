"""What `launch/train.sbatch` does with the output of the programs that it starts."""

import os
import re
import subprocess

from tests.runs import ROOT

#: A site's wrapper around srun may print anything; here it does so instead of training.
SRUN = """#!/bin/bash
echo 'touch printed'
echo 'export LD_PRELOAD=evil.so; touch printed'
echo '$(touch printed)' '`touch printed`'
echo 'TAIBAI_SECRET=$(touch printed)' >&2
env > environment
printf '%s\\n' "$@" > arguments
"""


def test_output_of_srun_is_not_executed(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (tmp_path / "bin" / name).write_text(SRUN)
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "host"}
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "train.sbatch"), "--config=$(touch printed)"],
        env=os.environ | variables | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "$(touch printed) `touch printed`" in done.stdout  # It was passed on, to the log.
    assert "--config=$(touch printed)" in (tmp_path / "arguments").read_text().splitlines()
    environment = (tmp_path / "environment").read_text()
    assert "LD_PRELOAD=evil.so" not in environment
    # 64 hexadecimal digits, of 32 random bytes.
    assert re.search(r"^TAIBAI_SECRET=[0-9a-f]{64}$", environment, re.MULTILINE)
    assert not (tmp_path / "printed").exists()


def test_script_evaluates_no_text():
    lines = (ROOT / "launch" / "train.sbatch").read_text().splitlines()
    code = [line for line in lines if not line.lstrip().startswith("#")]
    assert not [line for line in code if "eval" in line.split() or "source" in line.split()]
    captured = [line for line in code if "$(" in line and ("srun" in line or "{run[" in line)]
    assert not captured
