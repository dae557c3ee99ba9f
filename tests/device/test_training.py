"""Compares training on a real GPU with training on a CPU, and a restarted run with a whole one."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.runs import ROOT, arguments
from tests.train.meshes.models_on_meshes import MODELS, first_losses

pytestmark = pytest.mark.gpu_device

#: compute dtype -> largest relative difference of a loss from the CPU's in float32. A GPU rounds
#: the factors of float32 products to TF32's 10 bits.
TOLERANCE = {"float32": 2e-3, "bfloat16": 2e-2}
#: Losses that amplify rounding: on a CPU, bfloat16 changes the contrastive loss by 9e-2, and all
#: other losses by less than 1e-2.
BFLOAT16_TOLERANCE = {"MoCo v3": 0.2}


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_a_cpu(model):
    reference = first_losses(model, ("precision.compute=float32",), "cpu")
    for compute, tolerance in TOLERANCE.items():
        if compute == "bfloat16":
            tolerance = BFLOAT16_TOLERANCE.get(model, tolerance)
        losses = first_losses(model, (f"precision.compute={compute}",), "gpu")
        difference = np.max(np.abs(np.array(losses) / reference - 1))
        assert difference < tolerance, compute


def test_restarted_run_has_the_same_losses_to_the_bit(tmp_path, corpus_overrides):
    overrides = [
        *corpus_overrides,
        "data.name=text",
        "data.tokenizer=bytes",
        "data.sequence_length=128",
        "precision.compute=bfloat16",
        "log.every_steps=1",
        "checkpoint.every_steps=10",
        "optimizer.schedule=constant",  # others depend on the number of steps
        "eval.every_steps=0",
    ]

    def losses(name: str, *steps: int) -> list[float]:
        for num_steps in steps:
            command = [sys.executable, "-m", "train.main"]
            command += arguments(tmp_path / name, [*overrides, f"train.num_steps={num_steps}"])
            subprocess.run(command, cwd=ROOT, check=True)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found = {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}
        return [found[step] for step in sorted(found)]

    whole = losses("whole", 30)
    assert len(whole) == 30
    assert losses("restarted", 20, 30) == whole
