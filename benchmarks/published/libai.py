"""Predicts the jobs of LiBai's published benchmark, and compares how both rank them.

    python -m benchmarks.published.libai --out=benchmarks/published/libai.json
    python -m benchmarks.published.libai --docs

The first command compiles every job for the GPUs of its row, in about 15 minutes, and fits three
constants. If it is interrupted, the same command continues. The second command writes the tables
of docs/published.md from the results. Published speeds were measured; ours are predictions for GPUs
that are only described. This needs `jax[cuda12]`, but no GPU.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import docs_page, ranks, report
from benchmarks.published import libai_fit
from benchmarks.published.libai_fit import Constants, StepParts
from benchmarks.published.libai_rows import MODELS, NETWORK_GBIT_PER_S, Row, jobs_of, parse_rows
from fields.paths import local_path
from predict.machines.targets import parse_target
from train.compile import compile_step
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

_ROOT = Path(__file__).parents[2]
_PUBLISHED = Path(__file__).parent / "libai_benchmark.csv"
_RESULTS = Path(__file__).parent / "libai.json"
_DOCS = _ROOT / "docs" / "published.md"

#: `Row.key` -> predicted sequences per second.
Speeds = Mapping[tuple[str, str], float]


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Write the figures, or the tables of the docs; return the exit code."""
    parser = command_parser("benchmarks.published.libai")
    parser.add_argument(
        "--out", type=local_path, default=_RESULTS, help="write the figures to this file"
    )
    parser.add_argument(
        "--docs", action="store_true", help="write docs/published.md from the results"
    )
    args = parser.parse_args(argv)
    rows = parse_rows(_PUBLISHED.read_text(encoding="utf-8"))
    if args.docs:
        docs_page.write_tables(_DOCS, tables(rows, report.read_json(_RESULTS)))
        return 0
    jax.config.update("jax_platforms", "cpu")  # only the compiler of CUDA's plugin is needed
    whole: dict[str, Any] = {
        "command": command_line("benchmarks.published.libai", argv),
        "versions": report.versions("scipy"),
        "jobs": {},
    }
    if args.out.exists():
        stored = report.read_json(args.out)
        if "constants" not in stored and stored["versions"] == whole["versions"]:
            whole["jobs"] = stored["jobs"]
    for row in jobs_of(rows):
        if _name(row) not in whole["jobs"]:
            whole["jobs"][_name(row)] = _predicted(row)
            report.write_json(args.out, whole)
    fitted = [_name(row) for row in jobs_of(rows) if row.is_fitted]
    whole["constants"] = dataclasses.asdict(libai_fit.fit(rows, parts_of(whole, rows)))
    whole["constants_are"] = f"fitted on {len(fitted)} jobs: one GPU, or data parallelism alone"
    whole["fitted_on"] = fitted
    report.write_json(args.out, whole)
    return 0


def _name(row: Row) -> str:
    return f"{row.model} {row.name}"


def command_of(row: Row) -> str:
    """Return the command that compiles a job, without constants."""
    words = [f"--config=configs/{MODELS[row.model]}", f"--target={row.target}"]
    words.append(f"--network={NETWORK_GBIT_PER_S}")
    words += [f"--config.{override}" for override in row.overrides]
    return shlex.join(["python", "-m", "train.compile", *words])


def _predicted(row: Row) -> dict[str, Any]:
    """Compile a job and return its figures."""
    target = parse_target(row.target, NETWORK_GBIT_PER_S)
    step = compile_step(str(_ROOT / "configs" / MODELS[row.model]), target, row.overrides)
    mesh_shape = dict(step.run.mesh.shape)
    parts = StepParts.of_prediction(step.prediction, mesh_shape, target.gpus_per_host)
    figures = {
        "command": command_of(row),
        "seconds": round(step.trace_s + step.compile_s, 1),
        "compiled_bytes": step.to_json()["memory"]["compiled_bytes"],
        "step_time_s": step.prediction.step_s,
        "parts": dataclasses.asdict(parts),
    }
    jax.clear_caches()
    print(_name(row), json.dumps(figures), flush=True)
    return figures


def parts_of(results: dict[str, Any], rows: Sequence[Row]) -> dict[tuple[str, str], StepParts]:
    """Return the stored parts of all jobs, by `Row.key`."""
    return {row.key: StepParts(**results["jobs"][_name(row)]["parts"]) for row in jobs_of(rows)}


def tables(rows: Sequence[Row], results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the docs page, from figures as this command writes them."""
    parts = parts_of(results, rows)
    constants = Constants(**results["constants"])
    fitted = {row.key: constants.samples_per_s(row, parts[row.key]) for row in rows}
    unfitted = {row.key: libai_fit.UNFITTED.samples_per_s(row, parts[row.key]) for row in rows}
    bytes_of = {row.key: results["jobs"][_name(row)]["compiled_bytes"] for row in rows}
    return {
        "libai constants": constants_table(constants),
        "libai ranks": ranks_table(rows, fitted, unfitted),
        "libai choices": choices_table(rows, fitted, unfitted),
        "libai rows": rows_table(rows, fitted, unfitted, bytes_of),
    }


def constants_table(constants: Constants) -> str:
    """Return a Markdown table of the fitted constants."""
    rows = [
        ["time of", "LiBai's ÷ ours"],
        ["matrix products", f"{constants.matmul:.2f}"],
        ["other kernels", f"{constants.other:.2f}"],
        ["exposed communication across hosts", f"{constants.network:.2f}"],
    ]
    return docs_page.markdown(rows)


def ranks_table(rows: Sequence[Row], fitted: Speeds, unfitted: Speeds) -> str:
    """Return a Markdown table of Kendall's τ for each model, over all jobs and over the test."""
    lines = [["model", "jobs", "τ with LiBai", "τ with Megatron", "τ with LiBai, without the fit"]]
    lines[0].append("predicted ÷ LiBai")
    for model in MODELS:
        jobs = [row for row in jobs_of(rows) if row.model == model]
        test = [row for row in jobs if not row.is_fitted]
        for label, chosen in (("all", jobs), ("test only", test)):
            libai = [row.libai_samples_per_s for row in chosen]
            megatron = [row.megatron_samples_per_s for row in chosen]
            predicted = [fitted[row.key] for row in chosen]
            plain = [unfitted[row.key] for row in chosen]
            ratios = [ours / theirs for ours, theirs in zip(predicted, libai, strict=True)]
            lines.append(
                [
                    model,
                    f"{label}, {len(chosen)}",
                    f"{ranks.kendall_tau(predicted, libai):.2f}",
                    f"{ranks.kendall_tau(predicted, megatron):.2f}",
                    f"{ranks.kendall_tau(plain, libai):.2f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                ]
            )
    return docs_page.markdown(lines)


def choices_table(rows: Sequence[Row], fitted: Speeds, unfitted: Speeds) -> str:
    """Return a Markdown table of the jobs that are predicted to be the fastest."""
    heads = ["model", "layers", "GPUs", "jobs", "predicted to be the fastest", "fastest of LiBai's"]
    lines = [[*heads, "regret", "regret without the fit"]]
    plain = libai_fit.choices(rows, unfitted)
    for choice, plain_choice in zip(libai_fit.choices(rows, fitted), plain, strict=True):
        lines.append(
            [
                choice.model,
                f"{choice.num_layers}",
                f"{choice.num_gpus}",
                f"{choice.num_jobs}",
                choice.chosen,
                choice.best,
                f"{choice.regret:.1%}",
                f"{plain_choice.regret:.1%}",
            ]
        )
    return docs_page.markdown(lines)


def rows_table(
    rows: Sequence[Row],
    fitted: Speeds,
    unfitted: Speeds,
    bytes_of: Mapping[tuple[str, str], int],
) -> str:
    """Return a Markdown table of all rows.

    Args:
        rows: published rows.
        fitted: predicted sequences per second, with the constants that were fitted to LiBai.
        unfitted: the same without them: our own step.
        bytes_of: `Row.key` -> compiled memory of one GPU.
    """
    heads = ["section", "model", "job", "LiBai", "Megatron", "predicted", "predicted ÷ LiBai"]
    lines = [[*heads, "used for", "ours", "ours ÷ the faster one", "memory, GiB"]]
    for row in rows:
        speed = fitted[row.key]
        ours = unfitted[row.key]
        lines.append(
            [
                row.section,
                row.model,
                row.name,
                f"{row.libai_samples_per_s:,.1f}",
                f"{row.megatron_samples_per_s:,.1f}",
                f"{speed:,.1f}",
                f"{speed / row.libai_samples_per_s:.2f}",
                "fit" if row.is_fitted else "test",
                f"{ours:,.1f}",
                f"{ours / max(row.libai_samples_per_s, row.megatron_samples_per_s):.2f}",
                f"{bytes_of[row.key] / 2**30:.1f}",
            ]
        )
    return docs_page.markdown(lines)


if __name__ == "__main__":
    run_command(main)
