"""Writes a page with the curves of one or several runs, their memory, time and configs.

python -m train.report runs/a [runs/b ...] --out=report.html
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from checkpoint.run_copies import records_path
from fields.paths import local_path
from train.report.page import render
from train.report.run_records import read_runs
from untrusted.commands import command_parser, refuses_bad_input, run_command
from untrusted.files import write_text
from untrusted.outputs import check_file


@refuses_bad_input()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; return the exit code, which is 2 if there is no run to report on."""
    parser = command_parser("train.report", description=__doc__)
    parser.add_argument("workdirs", nargs="+", type=records_path, help="directories of runs")
    parser.add_argument(
        "--out", type=local_path, default=Path("report.html"), help="HTML file to write"
    )
    parser.add_argument(
        "--title", default="", help="title of the page; default: the names of the runs"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", force=True)
    check_file("--out", args.out)
    runs = read_runs(args.workdirs)
    for run in runs:
        for problem in run.problems:
            print(f"note: {problem}")
    write_text(args.out, render(runs, args.title))
    print(f"wrote {args.out}; open it in a browser")


if __name__ == "__main__":
    run_command(main)
