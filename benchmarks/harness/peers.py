"""Contenders beside ours, and the proof that they do the same work."""

import shutil
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from benchmarks.harness import report, torch_gpt2
from benchmarks.harness.timing import NUM_WARM_UP_STEPS, Contender
from models.text.common import padded_vocab
from models.text.gpt2 import GPT2Config
from train.run.build import Run


def check(run: Run) -> None:
    """Raises ValueError, with the reason, if torch has nothing equal to the run."""
    config, platform = run.config, run.mesh.devices.flat[0].platform
    if jax.process_count() > 1:
        raise ValueError("--peer=torch: it is one process; start this benchmark as one, too")
    if not isinstance(run.model_config, GPT2Config):
        raise ValueError(
            f"--peer=torch: its only model is GPT-2, not {type(run.model).__name__}; "
            "set model.name=gpt2"
        )
    if run.model_config.loss != "cross_entropy":
        raise ValueError("--peer=torch: its only loss is cross_entropy; set model.loss to it")
    if config.precision.compute not in torch_gpt2.LOSS_TOLERANCE:
        raise ValueError(
            f"--peer=torch: precision.compute={config.precision.compute} is none of "
            f"{', '.join(torch_gpt2.LOSS_TOLERANCE)}"
        )
    if config.train.remat not in ("none", "full"):
        raise ValueError(
            f"--peer=torch: it has no train.remat={config.train.remat}; choose none or full"
        )
    if config.optimizer.name != "adamw":
        raise ValueError(f"--peer=torch: optimizer.name={config.optimizer.name} is not adamw")
    if platform != "cpu" and run.mesh.size > 1:
        raise ValueError(
            f"--peer=torch: it uses one accelerator, but the mesh has {run.mesh.size}; "
            "set every mesh axis to 1"
        )


def torch_contenders(
    run: Run, batch: Mapping[str, np.ndarray], first_loss: float, *, with_compiled: bool
) -> tuple[dict[str, Any], dict[str, Contender], dict[str, str]]:
    """Returns (what was found equal, contenders by name, reasons by the name of what cannot run).

    Args:
      batch: the whole global batch.
      first_loss: ours, from the initial weights.
      with_compiled: whether torch.compile is tried, too.

    Raises:
      ValueError: the peer's work differs from ours.
    """
    params = jax.tree.map(np.asarray, run.state.initial().params)
    # As many as XLA uses on a CPU.
    torch.set_num_threads(report.num_cores())
    torch.manual_seed(run.config.train.seed)
    eager = torch_gpt2.TorchGPT2(run, params, batch, compiled=False)
    contenders = {"torch_eager": _warm_up(eager, compiles=False)}
    equality = _equality(run, eager, first_loss, contenders["torch_eager"].first_loss)
    if not with_compiled:
        return equality, contenders, {"torch_compiled": "not asked for"}
    if eager.device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return equality, contenders, {"torch_compiled": "torch.compile needs a C++ compiler"}
    try:
        compiled = torch_gpt2.TorchGPT2(run, params, batch, compiled=True)
        contenders["torch_compiled"] = _warm_up(compiled, compiles=True)
    except Exception as error:  # inductor fails in many ways, by machine
        lines = str(error).splitlines() or [""]
        reason = f"torch.compile failed: {type(error).__name__}: {lines[0]}"
        return equality, contenders, {"torch_compiled": reason}
    return equality, contenders, {}


def _warm_up(peer: torch_gpt2.TorchGPT2, *, compiles: bool) -> Contender:
    start_s = time.perf_counter()
    first_loss = peer.step()
    first_step_time_s = time.perf_counter() - start_s
    for _ in range(NUM_WARM_UP_STEPS):
        peer.step()
    return Contender(
        step=peer.step,
        compile_time_s=first_step_time_s if compiles else None,
        first_loss=first_loss,
    )


def _equality(
    run: Run, peer: torch_gpt2.TorchGPT2, ours: float, theirs: float
) -> dict[str, dict[str, float]]:
    """Returns pairs of figures; raises ValueError where a pair differs."""
    config = run.model_config
    rows = padded_vocab(config.vocab_size, config.vocab_multiple)
    padding = (rows - config.vocab_size) * config.embed_dim
    flops = run.flops_per_unit // 3
    pairs: dict[str, tuple[float, float]] = {
        "num_params": (run.num_params - padding, peer.num_params),
        "forward_flops_per_token": (flops, round(peer.forward_flops_per_token())),
    }
    for name, (left, right) in pairs.items():
        if left != right:
            raise ValueError(
                f"the peer's work is not ours: {name} is {left:,} here, {right:,} there"
            )
    if not torch_gpt2.agree(run, ours, theirs):
        raise ValueError(f"from the same weights the loss is {ours} here and {theirs} there")
    pairs["first_loss"] = (ours, theirs)
    return {name: {"ours": left, "peer": right} for name, (left, right) in pairs.items()}
