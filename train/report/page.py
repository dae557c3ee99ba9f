"""Makes the page of a report: one HTML file with its data, scripts and styles.

Its Content-Security-Policy allows only the scripts that are written into it, named by their hashes,
and no network.
"""

import base64
import dataclasses
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.report import sections, series
from train.report.run_records import RunRecord
from untrusted.messages import without_surrogates

_FOLDER = Path(__file__).parent
#: In the order in which they use each other.
_SCRIPTS = ("elements.js", "chart.js", "lanes.js", "page.js")


def render(runs: Sequence[RunRecord], title: str = "") -> str:
    """Return the page of some runs as HTML.

    Args:
        title: title of the page; by default the names of the runs.
    """
    title = without_surrogates(title or ", ".join(run.name for run in runs))
    scripts = [_read(name) for name in _SCRIPTS]
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    parts = {
        "title": html.escape(title),
        "policy": f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src {allowed}",
        "styles": _read("page.css"),
        "data": _json_in_html(page_data(runs, title)),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    # In one pass, so that a text of a run that looks like a placeholder stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))


def page_data(runs: Sequence[RunRecord], title: str) -> dict[str, Any]:
    """Return the data that the scripts show, as values for JSON."""
    axes = [series.axis_of(run) for run in runs]
    charts = series.charts_of(runs, axes)
    pictures = sections.schedule_pictures(runs)
    units = sorted({series.unit_of(run) for run in runs})
    return {
        "title": title,
        "runs": [
            {"name": run.name, "workdir": str(run.workdir), "axis": dataclasses.asdict(axis)}
            for run, axis in zip(runs, axes, strict=True)
        ],
        "unit": " or ".join(units),
        "charts": [
            dataclasses.asdict(chart.kind) | {"curves": [vars(curve) for curve in chart.curves]}
            for chart in charts
        ],
        "summary": vars(sections.summary(runs, axes)),
        "samples": [vars(each) for each in sections.samples(runs)],
        "memory": {
            "kinds": sections.MEMORY_KINDS,
            "lanes": [dataclasses.asdict(lane) for lane in sections.memory_lanes(runs)],
        },
        "time": {
            "kinds": sections.TIME_KINDS,
            "lanes": [dataclasses.asdict(lane) for lane in sections.time_lanes(runs)],
            "table": vars(sections.goodput_table(runs)),
        },
        "schedules": [vars(picture) for picture in pictures],
        "differences": vars(sections.config_differences(runs)),
        "changes": [{"run": run.name, "table": vars(sections.config_changes(run))} for run in runs],
        "configs": [{"run": run.name, "table": vars(sections.whole_config(run))} for run in runs],
        "environment": vars(sections.environment(runs)),
        "problems": [problem for run in runs for problem in run.problems],
    }


def _json_in_html(value: Any) -> str:
    """Return JSON that no HTML parser takes for the end of the script element around it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
