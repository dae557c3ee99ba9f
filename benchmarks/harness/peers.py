"""PyTorch contenders for `benchmarks.step`, and the checks that they do the same work as ours.

Speeds are comparable only if the work is equal. Before anything is timed, both sides must have the
same number of parameters, the same FLOPs and, from the same weights, the same first loss.
"""

import shutil
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
import torch

from benchmarks.harness import report, torch_peer
from benchmarks.harness.timing import NUM_WARM_UP_STEPS, Contender
from models.text.common import padded_vocab
from train.run.run import Run


def check(run: Run) -> None:
    """Check that the PyTorch peer can do the same work as a run.

    Args:
        run: run to compare with.

    Raises:
        ValueError: the peer cannot; the message has the reason.
    """
    config = run.config
    platform = run.mesh.devices.flat[0].platform
    if jax.process_count() > 1:
        raise ValueError(
            "--peer=torch runs in a single process; start this benchmark in a single process too"
        )
    if not isinstance(run.model_config, torch_peer.MODELS):
        raise ValueError(
            f"--peer=torch supports GPT-2, the LLaMA family and ViT, not {type(run.model).__name__}"
        )
    if getattr(run.model_config, "sliding_window", None) is not None:
        raise ValueError("--peer=torch does not support model.sliding_window")
    if getattr(run.model_config, "drop_path", 0.0):
        raise ValueError("--peer=torch does not support drop_path; set model.drop_path=0.0")
    if config.data.reads_images and config.images.mixes:
        raise ValueError(
            "--peer=torch does not support mixed images; set images.mixup=0.0 and images.cutmix=0.0"
        )
    if getattr(run.model_config, "loss", "cross_entropy") != "cross_entropy":
        raise ValueError(
            "--peer=torch supports only the loss cross_entropy; set model.loss=cross_entropy"
        )
    if config.precision.compute not in torch_peer.LOSS_TOLERANCE:
        raise ValueError(
            f"--peer=torch does not support precision.compute={config.precision.compute}; "
            f"choose {', '.join(torch_peer.LOSS_TOLERANCE)}"
        )
    if config.train.parsed_remat.layers not in ("none", "full"):
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
    run: Run,
    batch: Mapping[str, np.ndarray],
    first_loss: float | None,
    names: Collection[str],
    *,
    with_compiled: bool,
) -> tuple[dict[str, Any], dict[str, Contender], dict[str, str]]:
    """Build and warm up the PyTorch contenders, after checking that their work equals ours.

    Args:
        run: our run.
        batch: whole global batch, by name.
        first_loss: our loss from the initial weights; None if our step does not run.
        names: "torch_eager", "torch_compiled" or both.
        with_compiled: whether to try torch.compile, if `names` contains it.

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
    on_cpu = run.mesh.devices.flat[0].platform == "cpu"
    equality: dict[str, Any] = {}
    contenders: dict[str, Contender] = {}
    skipped: dict[str, str] = {}
    for name in names:
        compiles = name == "torch_compiled"
        if compiles and not with_compiled:
            skipped[name] = "disabled by --no_compile"
            continue
        if compiles and on_cpu and not (shutil.which("g++") or shutil.which("clang++")):
            skipped[name] = "torch.compile needs a C++ compiler"
            continue
        peer = torch_peer.TorchPeer(run, params, batch, compiled=compiles)
        equality = equality or _equal_work(run, peer)
        try:
            contenders[name] = _warm_up(peer, compiles=compiles)
        except Exception as error:  # inductor's errors depend on the machine
            if not compiles:
                raise
            lines = str(error).splitlines() or [""]
            skipped[name] = f"torch.compile failed: {type(error).__name__}: {lines[0]}"
            continue
        if first_loss is not None:
            losses = _equal_losses(run, first_loss, contenders[name].first_loss)
            equality.setdefault("first_loss", losses)
    return equality, contenders, skipped


def peak_memory() -> dict[str, int]:
    """Return the most GPU memory that PyTorch's arrays have taken in this process, if any."""
    if not torch.cuda.is_initialized():
        return {}
    return {"peak_memory_bytes": torch.cuda.max_memory_allocated()}


def _warm_up(peer: torch_peer.TorchPeer, *, compiles: bool) -> Contender:
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


def _equal_work(run: Run, peer: torch_peer.TorchPeer) -> dict[str, dict[str, float]]:
    """Return the pairs of figures that must be equal; raise ValueError if a pair differs."""
    num_params = run.num_params - _padding(run.model_config)
    pairs = {
        "num_params": (num_params, peer.num_params),
        f"forward_flops_per_{run.unit}": (
            run.flops_per_unit // 3,
            round(peer.forward_flops_per_unit()),
        ),
    }
    for name, (ours, theirs) in pairs.items():
        # Some versions of transformers multiply RoPE's angles by a matrix product.
        if abs(ours - theirs) > 1e-6 * ours:
            raise ValueError(
                f"the peer's work differs: {name} is {ours:,} for ours and {theirs:,} for the peer"
            )
    return {name: {"ours": ours, "peer": theirs} for name, (ours, theirs) in pairs.items()}


def _equal_losses(run: Run, ours: float, theirs: float) -> dict[str, float]:
    if not torch_peer.agree(run, ours, theirs):
        raise ValueError(
            f"from the same weights, our loss is {ours} but the peer's loss is {theirs}"
        )
    return {"ours": ours, "peer": theirs}


def _padding(config: Any) -> int:
    """Return the number of parameters that only pad the vocab, which the peer does not have."""
    if not hasattr(config, "vocab_size"):
        return 0
    rows = padded_vocab(config.vocab_size, config.vocab_multiple) - config.vocab_size
    tables = 1 if getattr(config, "tie_embeddings", True) else 2
    return tables * rows * config.embed_dim
