"""The data of a report's page, and the page as a file."""

import fnmatch
import html.parser
import json
import math
import tomllib

import pytest

from tests.runs import ROOT
from tests.train.report.recorded_runs import STEPS, UNITS_PER_STEP, loss_at, write_run
from train.goodput import summarize
from train.report.__main__ import main
from train.report.page import page_data
from train.report.run_records import read_runs
from train.report.series import MAX_POINTS
from train.reporting.metrics import MetricsWriter


def data_of(*workdirs):
    return page_data(read_runs(workdirs), "")


def curve_of(data, metric, run=0):
    (curve,) = [
        curve
        for chart in data["charts"]
        for curve in chart["curves"]
        if curve["metric"] == metric and curve["run"] == run
    ]
    return curve


def points_of(data, metric, run=0):
    """Return step -> value of a curve."""
    curve = curve_of(data, metric, run)
    steps = data["runs"][run]["axis"]["steps"]
    return {steps[at]: value for at, value in zip(curve["at"], curve["values"], strict=True)}


def test_curves_have_the_values_of_the_metrics(tmp_path):
    rates = {"a": 1.0, "b": 2.0}
    data = data_of(*(write_run(tmp_path / name, rate=rate) for name, rate in rates.items()))
    for run, rate in enumerate((1.0, 2.0)):
        assert points_of(data, "loss", run) == {step: loss_at(step, rate) for step in STEPS}
        wiki = points_of(data, "eval_wiki_loss", run)
        assert wiki == {step: loss_at(step, rate) + 0.25 for step in (50, 100)}
    (loss,) = [chart for chart in data["charts"] if chart["title"] == "Loss"]
    assert [curve["label"] for curve in loss["curves"]] == ["training", "evaluation", "wiki"] * 2
    assert "Skipped steps" not in [chart["title"] for chart in data["charts"]]  # nothing but zeros


def test_axes_are_in_tokens_and_hours(tmp_path):
    axis = data_of(write_run(tmp_path / "a", mesh__pipeline=1))["runs"][0]["axis"]
    assert axis["units"] == [UNITS_PER_STEP * step for step in STEPS]
    assert axis["hours"] == pytest.approx([0.5 * step / 3600 for step in STEPS])
    (tmp_path / "a" / "run.json").unlink()  # as of runs of earlier versions
    assert data_of(tmp_path / "a")["runs"][0]["axis"]["units"] == axis["units"]


def test_axis_counts_the_tokens_of_smaller_batches_of_a_ramp_up(tmp_path):
    run = write_run(tmp_path / "a", data__rampup_batch_size=[4, 4, 24])  # 4, 4, 8, 12, then 16
    axis = data_of(run)["runs"][0]["axis"]
    examples = [4, *(28 + 16 * (step - 4) for step in STEPS[1:])]
    assert axis["units"] == [UNITS_PER_STEP // 16 * count for count in examples]
    damaged = write_run(tmp_path / "b", data__rampup_batch_size=[0, "a", -1])
    assert data_of(damaged)["runs"][0]["axis"]["units"][0] == UNITS_PER_STEP


def test_metrics_without_a_chart_get_one_and_numbers_that_are_not_finite_are_gaps(tmp_path):
    writer = MetricsWriter(tmp_path / "a", resume_step=0)
    for step, value in enumerate((1.5, math.nan, math.inf, 2.5)):
        writer.write(step, {"my_score": value, "note": "text"})
    writer.close()
    data = data_of(tmp_path / "a")
    assert [chart["title"] for chart in data["charts"]] == ["my_score"]
    assert points_of(data, "my_score") == {0: 1.5, 1: None, 2: None, 3: 2.5}


def test_long_curves_are_thinned_out_without_losing_extremes(tmp_path):
    writer = MetricsWriter(tmp_path / "a", resume_step=0)
    values = [math.sin(step / 100) for step in range(3 * MAX_POINTS)]
    values[3777] = 9.0
    values[4888] = -9.0
    for step, value in enumerate(values):
        writer.write(step, {"loss": value})
    writer.close()
    points = points_of(data_of(tmp_path / "a"), "loss")
    assert MAX_POINTS / 2 < len(points) <= MAX_POINTS
    assert (points[3777], points[4888]) == (9.0, -9.0)
    assert all(values[step] == value for step, value in points.items())


def test_bars_show_all_time_of_a_run_and_the_planned_memory(tmp_path):
    data = data_of(write_run(tmp_path / "a"))
    (lane,) = data["time"]["lanes"]
    goodput = summarize(tmp_path / "a")
    assert sum(box["length"] for box in lane["boxes"]) == pytest.approx(goodput.total_s) == 230
    assert [box["length"] for box in lane["boxes"] if box["kind"] == "down"] == [50.0]
    ends = [box["start"] + box["length"] for box in lane["boxes"]]
    assert [box["start"] for box in lane["boxes"]] == pytest.approx([0, *ends[:-1]])
    planned, compiled = data["memory"]["lanes"]
    assert [box["kind"] for box in planned["boxes"]] == ["parameters", "activations"]
    assert compiled["boxes"][0]["length"] == 7 * 2**30 and compiled["mark"] == 9 * 2**30


def test_samples_are_shown_by_prompt_and_step(tmp_path):
    workdir = write_run(tmp_path / "a")
    with open(workdir / "samples.jsonl", "a") as file:
        for step in range(150, 5000, 50):
            for prompt in ("def f(", "import "):
                file.write(
                    json.dumps({"step": step, "prompt": prompt, "text": f"of {step}"}) + "\n"
                )
        # A run that is killed and resumed repeats an evaluation.
        file.write(json.dumps({"step": 50, "prompt": "def f(", "text": "again"}) + "\n")
    first, second = data_of(workdir)["samples"]
    assert (first["prompt"], second["prompt"]) == ("def f(", "import ")
    rows = first["table"]["rows"]
    assert rows[0] == ["50", "again"] and rows[-1] == ["4,950", "of 4950"] and len(rows) == 24
    assert second["table"]["rows"][0] == ["150", "of 150"]


def test_configs_are_compared_between_runs_and_between_starts(tmp_path):
    first = write_run(tmp_path / "a", optimizer__learning_rate=0.1)
    (first / "configs").mkdir()
    (first / "config.yaml").rename(first / "configs" / "0001.yaml")
    write_run(first, optimizer__learning_rate=0.2)
    second = write_run(tmp_path / "b", optimizer__learning_rate=0.3, train__seed=7)
    data = data_of(first, second)
    assert data["differences"]["columns"] == ["key", "a", "b"]
    assert data["differences"]["rows"] == [
        ["optimizer.learning_rate", "0.2", "0.3"],
        ["train.seed", "0", "7"],
    ]
    changes = data["changes"][0]["table"]
    assert changes["columns"] == ["key", "configs/0001.yaml", "config.yaml"]
    assert changes["rows"] == [["optimizer.learning_rate", "0.1", "0.2"]]
    (schedule,) = data["schedules"]
    assert schedule["runs"] == ["a/configs/0001.yaml", "a", "b"]


def test_parts_that_are_missing_are_left_out(tmp_path, capsys):
    for name in ("metrics.jsonl", "config.yaml"):
        workdir = write_run(tmp_path / name, mesh__pipeline=1)
        for path in workdir.iterdir():
            if path.name != name and path.is_file():
                path.unlink()
        assert main([str(workdir), f"--out={tmp_path / 'report.html'}"]) == 0
    assert "note:" not in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2
    assert "has neither metrics.jsonl nor config.yaml; give" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file, text, sentence",
    [
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "lo', "damaged lines, which are"),
        ("metrics.jsonl", '{"step": 1e0}\n[]\n', "left out: 1, 2"),
        ("metrics.jsonl", f'{{"step": {10**40}}}\n', "an impossible step"),
        ("config.yaml", "model: [", "config.yaml is left out: "),
        ("goodput/0001.json", '{"started_at": 1}', "is not a record of a start"),
        ("run.json", '{"software": {}}', "run.json is left out: "),
        ("samples.jsonl", '{"step": 1, "prompt": "a"}\n{"step": "x"}\n3\n', "left out: 1, 2, 3"),
    ],
    ids=["torn", "no-steps", "huge-step", "yaml", "goodput", "run", "samples"],
)
def test_damaged_files_are_named_in_a_sentence(file, text, sentence, tmp_path, capsys):
    workdir = write_run(tmp_path / "a", mesh__pipeline=1)
    (workdir / file).write_text(text)
    assert main([str(workdir), f"--out={tmp_path / 'report.html'}"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert sentence in line
    (problem,) = data_of(workdir)["problems"]
    assert f"note: {problem}" == line


def test_schedules_that_cannot_be_drawn_are_named(tmp_path):
    workdirs = [
        write_run(tmp_path / "large", train__num_microbatches=1000),
        write_run(tmp_path / "unknown", pipeline__schedule="no-such.csv"),
    ]
    data = data_of(*workdirs)
    assert data["schedules"] == []
    large, unknown = data["problems"]
    assert "the schedule of large is not drawn: it has about 4,000 operations" in large
    assert "no-such.csv" in unknown


class Scripts(html.parser.HTMLParser):
    """Collects the contents of all script elements."""

    def __init__(self):
        super().__init__()
        self.scripts: list[str] = []
        self.tags = [""]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags[-1] == "script":
            self.scripts[-1] += data


def test_texts_of_runs_do_not_become_html(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{scripts}}&amp;"
    workdir = write_run(tmp_path / "<b>run", data__split=evil)
    out = tmp_path / "report.html"
    assert main([str(workdir), f"--out={out}", f"--title={evil}"]) == 0
    page = Scripts()
    page.feed(out.read_text(encoding="utf-8"))
    assert len(page.scripts) == 5 and "img" not in page.tags and "b" not in page.tags
    data = json.loads(page.scripts[0])
    assert data["title"] == evil and data["runs"][0]["name"] == "<b>run"
    assert ["data.split", evil] in data["configs"][0]["table"]["rows"]


def test_names_of_runs_differ_and_a_run_is_named_once(tmp_path, capsys):
    workdirs = [write_run(tmp_path / name / "run") for name in ("a", "b")]
    assert [run.name for run in read_runs(workdirs)] == ["a/run", "b/run"]
    assert main([str(workdirs[0]), str(workdirs[0] / ".." / "run")]) == 2
    assert "is named twice" in capsys.readouterr().err


def test_installation_includes_the_files_of_the_page():
    with open(ROOT / "pyproject.toml", "rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["train.report"]
    files = [path for path in (ROOT / "train" / "report").iterdir() if path.is_file()]
    others = {path.name for path in files if path.suffix != ".py"}
    assert {"page.html", "page.css", "page.js"} <= others
    assert others == {name for pattern in patterns for name in fnmatch.filter(others, pattern)}
