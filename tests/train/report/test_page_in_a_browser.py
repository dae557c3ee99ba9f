"""The report's page in headless Chromium, on wide and narrow screens."""

import itertools
import json
import math
import re

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.actions.action_builder import ActionBuilder

from tests.train.report.browser import chromium
from tests.train.report.recorded_runs import STEPS, UNITS_PER_STEP, loss_at, write_run
from train.report.__main__ import main

pytestmark = [pytest.mark.thorough, pytest.mark.drawn(5, among="thorough")]

EVIL = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of two runs, one of which has texts that try to become HTML."""
    directory = tmp_path_factory.mktemp("runs")
    workdirs = [
        write_run(directory / "first"),
        write_run(directory / "<i>second", rate=2.0, data__split=EVIL),
    ]
    with open(workdirs[1] / "metrics.jsonl", "a") as file:
        file.write("torn")
    assert main([*map(str, workdirs), f"--out={directory / 'report.html'}"]) == 0
    return directory / "report.html"


def in_plot(browser, title, script):
    """Run a script for the SVG of a chart, which is the variable `svg`; return its result.

    Charts are drawn anew whenever something changes, so no element is kept.
    """
    return browser.run(
        f"""const figure = [...document.querySelectorAll(".charts figure")].find((each) =>
          each.querySelector("h3").firstChild.textContent === arguments[0]);
        const svg = figure.querySelector(".plot svg");
        {script}""",
        title,
    )


def curves(browser, title):
    """Return (run, metric) -> the x and y coordinates of a curve in a chart."""
    paths = in_plot(
        browser,
        title,
        """return [...svg.querySelectorAll("path.curve")].map((path) =>
          [path.dataset.run, path.dataset.metric, path.getAttribute("d")]);""",
    )
    return {
        (int(run), metric): [
            (float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+),([-\d.]+)", path)
        ]
        for run, metric, path in paths
    }


def logged(page, run, metric):
    """Return step -> value, read from metrics.jsonl without the code of the report."""
    lines = (page.parent / run / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    return {entry["step"]: entry[metric] for entry in entries if metric in entry}


def tip(browser):
    """Return the lines of the tooltip that is visible."""
    tips = browser.driver.find_elements("css selector", ".tip")
    (text,) = [each.text for each in tips if each.is_displayed()]
    return text.splitlines()


def hover(browser, title, pixel, *, dragged=0.0):
    """Move the pointer to a place in a chart, and drag it to the right from there.

    Args:
        pixel: distance from the left side of the chart.
        dragged: pixels to drag; 0: the pointer only moves.
    """
    left, top = in_plot(
        browser,
        title,
        """svg.scrollIntoView({block: "center"});
        const box = svg.getBoundingClientRect();
        return [box.left, box.top + box.height / 2];""",
    )
    actions = ActionBuilder(browser.driver, duration=20)
    actions.pointer_action.move_to_location(round(left + pixel), round(top))
    if dragged:
        actions.pointer_action.pointer_down()
        actions.pointer_action.move_to_location(round(left + pixel + dragged), round(top))
        actions.pointer_action.pointer_up()
    actions.perform()


@pytest.mark.parametrize("width", [1400, 400])
def test_page_fits_and_shows_all_points(width, page, browser):
    browser.open(page, width=width)
    assert browser.messages() == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    titles = [each.text for each in browser.driver.find_elements("css selector", "h2")]
    expected = "Runs Quality Optimization Speed Samples Memory Time Schedule Configs Environment"
    assert titles == expected.split()
    note = browser.driver.find_element("css selector", ".notes").text
    assert "damaged lines" in note
    of_loss = curves(browser, "Loss")
    for run, name in enumerate(("first", "<i>second")):
        for metric in ("loss", "eval_loss", "eval_wiki_loss"):
            points = of_loss[run, metric]
            values = logged(page, name, metric)
            assert len(points) == len(values)
            # The picture is a linear map of the values: higher losses are further up.
            order = sorted(range(len(points)), key=lambda i: -points[i][1])
            assert order == sorted(range(len(points)), key=lambda i: [*values.values()][i])


@pytest.mark.parametrize("width", [1400, 400])
def test_no_text_of_a_chart_is_clipped_or_hides_another(width, page, browser):
    browser.open(page, width=width)
    titles = browser.run(
        "return [...document.querySelectorAll('.charts h3')].map((h3) => h3.firstChild.textContent)"
    )
    assert "Loss" in titles
    for title in titles:
        boxes = in_plot(
            browser,
            title,
            """const frame = svg.getBoundingClientRect();
            return [...svg.querySelectorAll("text")].map((text) => {
              const box = text.getBoundingClientRect();
              return [box.left - frame.left, box.top - frame.top, box.right - frame.left,
                      box.bottom - frame.top, frame.width, frame.height, text.textContent];
            });""",
        )
        assert len(boxes) > 5
        for left, top, right, bottom, wide, high, text in boxes:
            assert left >= 0 and top >= 0 and right <= wide and bottom <= high, (title, text)
        for a, b in itertools.combinations(boxes, 2):
            is_apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert is_apart, (title, a[6], b[6])


@pytest.mark.parametrize("width", [1400, 400])
def test_pointer_and_keys_show_the_values_of_the_metrics(width, page, browser):
    browser.open(page, width=width)
    point = curves(browser, "Loss")[0, "loss"][STEPS.index(50)]
    hover(browser, "Loss", point[0])
    first, *rows = tip(browser)
    assert first == "step 50"
    for name, metric, label in (
        ("first", "loss", "training"),
        ("first", "eval_loss", "evaluation"),
        ("<i>second", "eval_wiki_loss", "wiki"),
    ):
        value = f"{logged(page, name, metric)[50]:.6g}"
        assert rows[rows.index(f"{name}, {label}") + 1] == value
    place = browser.driver.find_elements("css selector", ".tip")[0].rect
    assert place["x"] >= 0 and place["x"] + place["width"] <= width

    in_plot(browser, "Loss", "svg.focus();")
    ActionChains(browser.driver, duration=20).send_keys(Keys.HOME, Keys.ARROW_RIGHT).perform()
    first, *rows = tip(browser)
    assert first == f"step {STEPS[1]}"
    assert f"{loss_at(STEPS[1], 1.0):.6g}" in rows


def test_settings_change_all_charts(page, browser):
    browser.open(page)
    whole = curves(browser, "Loss")
    checkbox = browser.driver.find_elements("css selector", ".runs input")[1]
    checkbox.click()
    assert {run for run, _ in curves(browser, "Loss")} == {0}
    assert {run for run, _ in curves(browser, "Throughput")} == {0}
    lanes = browser.driver.find_elements("css selector", ".lane[data-run='1']")
    assert lanes and not any(lane.is_displayed() for lane in lanes)
    checkbox.click()
    assert curves(browser, "Loss") == whole

    browser.run(
        """const slider = document.querySelector("input[type=range]");
        slider.value = 0.9;
        slider.dispatchEvent(new Event("input"));"""
    )
    smooth = curves(browser, "Loss")
    assert smooth[0, "loss"][0] == whole[0, "loss"][0]  # as the average is corrected for its start
    assert smooth[0, "loss"] != whole[0, "loss"]
    hover(browser, "Loss", smooth[0, "loss"][-1][0])
    values = [loss_at(step, 1.0) for step in STEPS]
    weights = [0.9 ** (len(STEPS) - 1 - i) for i in range(len(STEPS))]
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert f"{values[-1]:.6g} ({mean:.6g})" in tip(browser)

    axis = browser.driver.find_element("css selector", "#tools select")
    axis.send_keys("t")
    hover(browser, "Loss", smooth[0, "loss"][-1][0])
    tokens = f"{UNITS_PER_STEP * 100:,} tokens"
    assert tip(browser)[0] == f"step 100, {tokens}, value (smoothed)"


def test_dragging_zooms_all_charts_and_a_log_scale_is_logarithmic(page, browser):
    browser.open(page)
    whole = curves(browser, "Loss")[0, "loss"]
    start, end = (whole[STEPS.index(step)][0] for step in (20, 60))
    hover(browser, "Loss", start, dragged=end - start)
    for title in ("Loss", "Throughput", "Learning rate"):
        texts = in_plot(
            browser,
            title,
            """return [...svg.querySelectorAll("text[text-anchor=middle]")].map(
              (text) => Number(text.textContent));""",
        )
        assert len(texts) >= 2 and all(19 <= step <= 61 for step in texts)
    reset = browser.driver.find_element("xpath", "//button[text()='Reset zoom']")
    reset.click()
    assert curves(browser, "Loss")[0, "loss"] == whole and not reset.is_enabled()

    browser.driver.find_element("css selector", "[aria-label='Logarithmic scale: Loss']").click()
    heights = [y for _, y in curves(browser, "Loss")[0, "loss"]]
    logs = [math.log(loss_at(step, 1.0)) for step in STEPS]
    slope = (heights[-1] - heights[0]) / (logs[-1] - logs[0])
    drawn = [heights[0] + slope * (log - logs[0]) for log in logs]
    assert heights == pytest.approx(drawn, abs=0.2)  # a path has a tenth of a pixel


def test_texts_of_runs_are_shown_and_not_executed(page, browser):
    browser.open(page)
    assert browser.run("return window.hacked") is None
    sources = browser.run("return [...document.images].map((image) => image.src)")
    assert sources and all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "<i>second" in browser.driver.find_element("css selector", ".runs").text
    cells = browser.run("return [...document.querySelectorAll('td')].map((td) => td.textContent)")
    assert EVIL in cells and browser.messages() == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_have_enough_contrast(dark, page, browser):
    """Texts have a contrast of at least 4.5, curves of 3. Source: WCAG 2.2, 1.4.3 and 1.4.11."""
    browser.open(page, dark=dark)
    colors = browser.run(
        """const probe = document.body.appendChild(document.createElement("span"));
        const names = ["page", "card", "text", "muted", "accent", "control",
                       ...[0, 1, 2, 3, 4, 5, 6, 7].map((i) => `run-${i}`)];
        return Object.fromEntries(names.map((name) => {
          probe.style.color = `var(--${name})`;
          return [name, getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number)];
        }));"""
    )
    assert (sum(colors["page"]) < 200) == dark
    for name, color in colors.items():
        least = 4.5 if name in ("text", "muted", "accent") else 3
        for ground in ("page", "card"):
            if name not in ("page", "card"):
                assert contrast(color, colors[ground]) >= least, (name, ground)


def contrast(a, b):
    """Return the contrast of two sRGB colours. Source: WCAG 2.2, "contrast ratio"."""

    def luminance(color):
        parts = [c / 255 for c in color]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((luminance(a), luminance(b)))
    return (bright + 0.05) / (dark + 0.05)
