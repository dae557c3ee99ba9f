"""Compares the losses of optimizers, each with the best of the same rates.

    python -m benchmarks.optimizers --names=adamw,muon --rates=0.001,0.002,0.004

Every run trains a config for `--steps` steps from the same parameters on the same batches; its
result is the mean training loss of the last 20 steps. The losses do not depend on the mesh, so one
device is enough. The results are added to benchmarks/results/optimizers.json.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import jax

from data.batches import train_batches
from data.corpus import load_corpus
from train.config.config_files import load
from train.config.schema import validate_config
from train.run.assemble import assemble_run
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

_RESULTS = Path(__file__).parent / "results" / "optimizers.json"
_NUM_LAST = 20
_ONE_DEVICE = ("mesh.pipeline=1", "mesh.data=1", "mesh.model=1")


@refuses_bad_input(RuntimeError)
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code: 0, or 2 after an error."""
    parser = command_parser("benchmarks.optimizers")
    parser.add_argument("--config", default="configs/gpt2_3d.py", help="config file")
    parser.add_argument("--names", default="adamw,muon", help="values of optimizer.name")
    parser.add_argument("--rates", default="0.001,0.002,0.004", help="learning rates")
    parser.add_argument("--steps", type=int, default=300, help="steps of a run")
    args = parser.parse_args(argv)
    command = command_line("benchmarks.optimizers", argv)
    results: dict[str, Any] = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    for name in args.names.split(","):
        for rate in args.rates.split(","):
            momentum = ("optimizer.momentum=0.95",) if name == "muon" else ()
            overrides = [f"optimizer.name={name}", f"optimizer.learning_rate={rate}", *momentum]
            loss = _final_loss(args.config, overrides, args.steps)
            print(f"{name}, learning rate {rate}: {loss:.4f}", flush=True)
            key = f"{args.config}, {args.steps} steps, {name}, learning rate {rate}"
            results[key] = {"loss": loss, "command": command}
            _RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _final_loss(path: str, overrides: list[str], num_steps: int) -> float:
    """Train from scratch; return the mean loss of the last steps."""
    config = validate_config(load(path, [*_ONE_DEVICE, *overrides, f"train.num_steps={num_steps}"]))
    corpus = load_corpus(config.data, config.images)
    mesh = config.make_mesh(jax.devices())
    run = assemble_run(config, mesh, vocab_size=corpus.vocab_size)
    step = run.compile_train_step()
    state = run.state_layout.initial()
    losses = []
    batches = train_batches(corpus, config.data, run.rows, seed=config.train.seed)
    for _ in range(num_steps):
        state, metrics = step(state, run.place_batch(next(batches)))
        losses.append(float(metrics["loss"]))
    return statistics.fmean(losses[-_NUM_LAST:])


if __name__ == "__main__":
    run_command(main)
