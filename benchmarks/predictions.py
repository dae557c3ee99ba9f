"""Compiles published sizes, and every shipped config on 2×2×2, for H100s, and predicts their steps.

    python -m benchmarks.predictions --out=benchmarks/results/h100_predictions.json
    python -m benchmarks.predictions --docs

The second command writes the table of docs/before_you_rent.md from the results. Memory is the
compiler's plan; times are predicted. This needs `jax[cuda12]`, but no GPU.
"""

from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import docs_page, gpu_estimates, report
from fields.paths import local_path
from train.compile import compile_run
from untrusted.commands import command_line, command_parser, refuses_bad_input, run_command

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "h100_predictions.json"
_DOCS = _ROOT / "docs" / "before_you_rent.md"
_MESH = "2×2×2"


@refuses_bad_input()
def main(argv: list[str] | None = None) -> int:
    """Write the figures, or the table of the docs; return the exit code."""
    parser = command_parser("benchmarks.predictions")
    parser.add_argument(
        "--out", type=local_path, default=_RESULTS, help="write the figures to this JSON file"
    )
    parser.add_argument(
        "--docs",
        action="store_true",
        help="write the table of docs/before_you_rent.md from the results",
    )
    args = parser.parse_args(argv)
    if args.docs:
        docs_page.write_tables(_DOCS, tables(report.read_json(_RESULTS)))
        return 0
    jax.config.update("jax_platforms", "cpu")  # only the compiler of CUDA's plugin is needed
    figures_by_case: dict[str, Any] = {}
    for case in gpu_estimates.cases():
        if case.name in gpu_estimates.PUBLISHED or case.name.endswith(f", {_MESH}"):
            figures_by_case[case.name] = _measured(case)
            jax.clear_caches()
            print(case.name, figures_by_case[case.name], flush=True)
    whole = {
        "command": command_line("benchmarks.predictions", argv),
        "versions": report.versions(),
        "machine": {"cpu": report.cpu_name(), "num_cores": report.num_cores()},
        "cases": figures_by_case,
    }
    report.write_json(args.out, whole)
    return 0


def _measured(case: gpu_estimates.Case) -> dict[str, Any]:
    """Return the figures of a case, or "refused" with the reason if it does not fit the mesh."""
    try:
        run = gpu_estimates.make_run(case, "h100")
    except ValueError as error:
        return case.to_json() | {"refused": str(error)}
    step = compile_run(run)
    step_figures = step.to_json()
    return case.to_json() | {
        "attention": sorted({selected.kernel for selected in run.attention_kernels}),
        "seconds": round(step.trace_s + step.compile_s, 1),
        "compiled_bytes": step_figures["memory"]["compiled_bytes"],
        "estimated_bytes": step_figures["memory"]["estimated_bytes"],
        "step_time_s": step.prediction.step_s,
        "exposed_communication_s": step.prediction.exposed_communication_s,
        "mfu": step.mfu,
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the table of the docs; the MFU of tiny configs is omitted as meaningless."""
    heads = ["step", "GPUs", "attention", "seconds to compile", "compiled, GiB", "estimated, GiB"]
    rows = [[*heads, "predicted step, ms", "predicted MFU"]]
    for name, case in results["cases"].items():
        if "refused" in case:
            rows.append([name, f"{case['gpus']:,}", "refused", *["–"] * 5])
            continue
        is_small = name.endswith(_MESH)
        size = "{:.3f}" if is_small else "{:.1f}"
        utilization = case["mfu"]
        rows.append(
            [
                name,
                f"{case['gpus']:,}",
                ", ".join(case["attention"]) or "none",
                f"{case['seconds']:.0f}",
                size.format(case["compiled_bytes"] / 2**30),
                size.format(case["estimated_bytes"] / 2**30),
                f"{1e3 * case['step_time_s']:,.1f}",
                "–" if is_small or utilization is None else f"{utilization:.0%}",
            ]
        )
    return {"predictions": docs_page.markdown(rows)}


if __name__ == "__main__":
    run_command(main)
