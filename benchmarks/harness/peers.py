"""PyTorch contenders for `benchmarks.step`, and the checks that they do the same work as ours.

Speeds are comparable only if the work is equal. Before anything is timed, both sides must have the
same number of parameters, the same FLOPs and, from the same weights, the same first loss.
"""

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
from train.run.run import Run


def check(run: Run) -> None:
    """Check that the PyTorch peer can do the same work as a run.

    Args:
        run: the run to compare with.

    Raises:
        ValueError: the peer cannot; the message has the reason.
    """
    config = run.config
    platform = run.mesh.devices.flat[0].platform
    if jax.process_count() > 1:
        raise ValueError(
            "--peer=torch runs in a single process; start this benchmark in a single process too"
        )
    if not isinstance(run.model_config, GPT2Config):
        raise ValueError(
            f"--peer=torch supports only GPT-2, not {type(run.model).__name__}; set model.name=gpt2"
        )
    if run.model_config.loss != "cross_entropy":
        raise ValueError(
            "--peer=torch supports only the loss cross_entropy; set model.loss=cross_entropy"
        )
    if config.precision.compute not in torch_gpt2.LOSS_TOLERANCE:
        raise ValueError(
            f"--peer=torch does not support precision.compute={config.precision.compute}; "
            f"choose {', '.join(torch_gpt2.LOSS_TOLERANCE)}"
        )
    if config.train.remat not in ("none", "full"):
        raise ValueError(
            f"--peer=torch does not support train.remat={config.train.remat}; choose none or full"
        )
    if config.optimizer.name != "adamw":
        raise ValueError(
            f"--peer=torch does not support optimizer.name={config.optimizer.name}; choose adamw"
        )
    if platform != "cpu" and run.mesh.size > 1:
        raise ValueError(
            f"--peer=torch uses one accelerator, but the mesh has {run.mesh.size}; "
            "set every mesh axis to 1"
        )


def torch_contenders(
    run: Run, batch: Mapping[str, np.ndarray], first_loss: float, *, with_compiled: bool
) -> tuple[dict[str, Any], dict[str, Contender], dict[str, str]]:
    """Build and warm up the PyTorch contenders, after checking that their work equals ours.

    Args:
        run: our run.
        batch: the whole global batch, by name.
        first_loss: our loss from the initial weights.
        with_compiled: whether to try torch.compile too.

    Returns:
        The figures that were found equal, the contenders by name, and for each contender that
        cannot run, by name, the reason.

    Raises:
        ValueError: the peer's work differs from ours.
    """
    params = jax.tree.map(np.asarray, run.state_layout.initial().params)
    # Use as many threads as XLA does on a CPU.
    torch.set_num_threads(report.num_cores())
    torch.manual_seed(run.config.train.seed)
    eager = torch_gpt2.TorchGPT2(run, params, batch, compiled=False)
    contenders = {"torch_eager": _warm_up(eager, compiles=False)}
    equality = _equality(run, eager, first_loss, contenders["torch_eager"].first_loss)
    if not with_compiled:
        return equality, contenders, {"torch_compiled": "disabled by --no_compile"}
    if eager.device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return equality, contenders, {"torch_compiled": "torch.compile needs a C++ compiler"}
    try:
        compiled = torch_gpt2.TorchGPT2(run, params, batch, compiled=True)
        contenders["torch_compiled"] = _warm_up(compiled, compiles=True)
    except Exception as error:  # inductor's errors depend on the machine
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
    """Return the pairs of figures that must be equal; raise ValueError if a pair differs."""
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
                f"the peer's work differs: {name} is {left:,} for ours and {right:,} for the peer"
            )
    if not torch_gpt2.agree(run, ours, theirs):
        raise ValueError(
            f"from the same weights, our loss is {ours} but the peer's loss is {theirs}"
        )
    pairs["first_loss"] = (ours, theirs)
    return {name: {"ours": left, "peer": right} for name, (left, right) in pairs.items()}
