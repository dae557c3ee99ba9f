"""Predicts the steps of published training jobs, and compares their speed with the published one.

    python -m benchmarks.published --out=benchmarks/published/published.json
    python -m benchmarks.published --docs

The second command writes the tables and the plot of docs/published.md from the results. Each row is
one call of `train.compile`, which takes less than a minute, or a few for models with experts. Our
figures are predictions for GPUs that are only described; the published ones were measured. This
needs `jax[cuda12]`, but no GPU.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import jax
import matplotlib

from fields.paths import local_path
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.harness import docs_page, report
from benchmarks.published.jobs import GROUPS, SCALING, Job
from predict.machines.targets import parse_target
from train.compile import compile_step

_ROOT = Path(__file__).parents[2]
_RESULTS = Path(__file__).parent / "published.json"
_DOCS = _ROOT / "docs" / "published.md"
_PLOT = _ROOT / "docs" / "scaling.svg"


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Write the figures, or the tables and the plot of the docs; return the exit code."""
    parser = command_parser("benchmarks.published")
    parser.add_argument(
        "--out", type=local_path, default=_RESULTS, help="write the figures to this file"
    )
    parser.add_argument(
        "--docs", action="store_true", help="write docs/published.md from the results"
    )
    parser.add_argument(
        "--only", choices=GROUPS, help="compile these jobs only, and keep the figures of others"
    )
    args = parser.parse_args(argv)
    if args.docs:
        results = report.read_json(_RESULTS)
        docs_page.write_tables(_DOCS, tables(results))
        _draw(_by_model(results["scaling"]), _PLOT)
        return 0
    jax.config.update("jax_platforms", "cpu")  # only the compiler of CUDA's plugin is needed
    groups = [args.only] if args.only else list(GROUPS)
    whole = report.read_json(args.out) if args.only else {}
    whole["command"] = command_line("benchmarks.published", [])
    whole["versions"] = report.versions()
    for name in groups:
        whole[name] = [_measured(job) for job in GROUPS[name]]
    report.write_json(args.out, whole)
    return 0


def command_of(job: Job) -> str:
    """Return the command that compiles a job."""
    overrides = [f"--config.{override}" for override in job.all_overrides]
    words = [f"--config=configs/{job.config}", f"--target={job.target}", *overrides]
    return shlex.join(["python", "-m", "train.compile", *words])


def _measured(job: Job) -> dict[str, Any]:
    path = str(_ROOT / "configs" / job.config)
    step = compile_step(path, parse_target(job.target), job.all_overrides)
    step_figures = step.to_json()
    predicted = step_figures["predicted"]
    figures = {
        "name": job.name,
        "command": command_of(job),
        "gpus": step_figures["num_devices"],
        "mesh": step_figures["mesh"],
        "seconds": round(step.trace_s + step.compile_s, 1),
        "compiled_bytes": step_figures["memory"]["compiled_bytes"],
        "num_params": step_figures["num_params"],
        "budget_bytes": step_figures["memory"]["budget_bytes"],
        "host_bytes": step_figures["memory"]["host_bytes"],
        "fits": step_figures["memory"]["fits"],
        "step_time_s": predicted["step_time_s"],
        "tokens_per_s_per_gpu": predicted["tokens_per_s"] / step_figures["num_devices"],
        "exposed": predicted["exposed_communication_s"] / predicted["step_time_s"],
        "mfu": predicted["mfu"],
        "published": job.published,
        "source": job.source,
    }
    jax.clear_caches()
    print(json.dumps(figures), flush=True)
    return figures


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the docs page, from figures as this command writes them."""
    return {
        "jobs": table(results["jobs"]),
        "commands": _commands(results["jobs"]),
        "experts": table(results["experts"]),
        "experts commands": _commands(results["experts"]),
        "scaling": table(results["scaling"]),
        "host memory": memory_table(results["host_memory"]),
        "host memory commands": _commands(results["host_memory"]),
    }


def _commands(jobs: list[dict[str, Any]]) -> str:
    return "\n".join(f"- {job['name']}\n\n  ```\n  {job['command']}\n  ```" for job in jobs)


def table(jobs: list[dict[str, Any]]) -> str:
    """Return a Markdown table of jobs, with the published speed where there is one."""
    heads = ["job", "mesh", "memory, GiB", "predicted step, ms", "predicted tokens/s per GPU"]
    heads += ["exposed communication", "predicted MFU"]
    has_published = any(job["published"] for job in jobs)
    heads += ["published tokens/s per GPU", "predicted ÷ published"] if has_published else []
    rows = [heads]
    for job in jobs:
        speed = job["tokens_per_s_per_gpu"]
        row = [
            job["name"],
            " × ".join(f"{axis}={n}" for axis, n in job["mesh"].items()),
            f"{job['compiled_bytes'] / 2**30:.1f}",
            f"{1e3 * job['step_time_s']:,.0f}",
            f"{speed:,.0f}",
            f"{job['exposed']:.1%}",
            f"{job['mfu']:.1%}",
        ]
        if has_published:
            is_known = job["published"] is not None
            row.append(f"{job['published']:,.0f} ({job['source']})" if is_known else "–")
            row.append(f"{speed / job['published']:.2f}" if is_known else "–")
        rows.append(row)
    return docs_page.markdown(rows)


def memory_table(jobs: list[dict[str, Any]]) -> str:
    """Return a Markdown table of jobs on one GPU with host memory."""
    heads = ["model", "parameters", "published on a GPU with", "ours: memory of the GPU, GiB"]
    heads += ["fits into nine tenths", "ours: host memory, GiB", "predicted tokens/s on an A100"]
    rows = [heads]
    for job in jobs:
        rows.append(
            [
                job["name"],
                f"{job['num_params'] / 1e9:.1f} B",
                f"{job['published']:g} GB ({job['source']})",
                f"{job['compiled_bytes'] / 2**30:.1f}",
                "yes" if job["fits"] else "no",
                f"{job['host_bytes'] / 2**30:.0f}",
                f"{job['tokens_per_s_per_gpu']:,.0f}",
            ]
        )
    return docs_page.markdown(rows)


def _by_model(scaling: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of weak scaling, model -> jobs."""
    by_name = {job["name"]: job for job in scaling}
    return {model: [by_name[job.name] for job in jobs] for model, jobs in SCALING.items()}


def _draw(scaling: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot the predicted speed per GPU over the number of GPUs."""
    matplotlib.rcParams["svg.hashsalt"] = "taibai"  # the same file for the same figures
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for model, jobs in scaling.items():
        speeds = [job["tokens_per_s_per_gpu"] for job in jobs]
        shares = [100 * speed / speeds[0] for speed in speeds]
        axes.plot([job["gpus"] for job in jobs], shares, marker="o", label=model)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 110)
    axes.set_xlabel("H100 GPUs")
    axes.set_ylabel("predicted speed per GPU, %\nof the smallest mesh")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    run_command(main)
