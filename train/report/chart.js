// Line charts. All charts of the page share a view: the x axis, the zoom, the smoothing, the runs.
"use strict";

const DASHES = ["", "7 4", "2 4", "10 3 2 3"];
const HEIGHT = 250;
/** How far from the pointer, in pixels, the tooltip shows points. */
const REACH = 14;
/** Up to this many points, each evaluation has a dot. */
const MAX_DOTS = 40;
/** Properties that a saved picture needs, because it has no style sheet. */
const SAVED = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size"];

class View {
  constructor(data) {
    this.runs = data.runs;
    this.unit = data.unit;
    this.axis = "steps";
    this.smoothing = 0;
    this.hidden = new Set(); // indices of runs
    this.range = null; // [from, to] on the x axis; null: everything
    this.charts = [];
    this.listeners = [];
  }

  /** Return the x coordinates of a run's logged steps; null if they are unknown on this axis. */
  coordinates(run) {
    return this.runs[run].axis[this.axis];
  }

  get axisTitle() {
    return this.axis === "units" ? this.unit : this.axis;
  }

  get fullRange() {
    const ends = this.runs
      .map((run, index) => (this.hidden.has(index) ? null : run.axis[this.axis]))
      .filter((values) => values && values.length)
      .map((values) => values[values.length - 1]);
    return [0, Math.max(...ends, 0) || 1];
  }

  /** Change some properties, and draw all charts again. */
  set(changes) {
    Object.assign(this, changes);
    for (const chart of this.charts) chart.draw();
    for (const listener of this.listeners) listener();
  }
}

class Chart {
  constructor(contents, view) {
    this.contents = contents;
    this.view = view;
    this.isLog = false;
    this.hidden = new Set(); // labels of curves
    this.labels = [...new Set(contents.curves.map((curve) => curve.label))];
    this.cursor = null; // x coordinate
    this.plot = element("div", { class: "plot" });
    this.tip = element("div", { class: "tip", role: "status", hidden: true });
    this.figure = this.makeFigure();
    new ResizeObserver(() => this.draw()).observe(this.plot);
    view.charts.push(this);
  }

  makeFigure() {
    const { title, unit } = this.contents;
    const logButton = element(
      "button",
      {
        type: "button",
        "aria-pressed": "false",
        "aria-label": `Logarithmic scale: ${title}`,
        click: () => {
          this.isLog = !this.isLog;
          logButton.setAttribute("aria-pressed", String(this.isLog));
          this.draw();
        },
      },
      "log",
    );
    const saveButton = element(
      "button",
      { type: "button", "aria-label": `Save as SVG: ${title}`, click: () => this.save() },
      "SVG",
    );
    return element(
      "figure",
      { class: "card" },
      element(
        "figcaption",
        {},
        element("h3", {}, title, unit ? element("span", { class: "unit" }, `  ${unit}`) : null),
        logButton,
        saveButton,
      ),
      this.labels.length > 1 ? this.makeLegend() : null,
      this.plot,
    );
  }

  makeLegend() {
    const gray = this.view.runs.length > 1 ? { style: { stroke: "var(--text)" } } : {};
    const buttons = this.labels.map((label) => {
      const button = element(
        "button",
        {
          type: "button",
          "aria-pressed": "true",
          click: () => {
            if (!this.hidden.delete(label)) this.hidden.add(label);
            button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
            this.draw();
          },
        },
        shape(
          "svg",
          { width: 24, height: 10, "aria-hidden": "true" },
          shape("path", { d: "M1,5H23", class: "curve", ...this.lineOf(0, label), ...gray }),
        ),
        label,
      );
      return button;
    });
    return element("div", { class: "curves", role: "group", "aria-label": "Curves" }, ...buttons);
  }

  /** Return how a curve is drawn: runs differ in colour, and curves of a run in dashes. */
  lineOf(run, label) {
    const number = this.labels.indexOf(label);
    if (this.view.runs.length === 1) return { style: { stroke: colorOf(number) } };
    return { style: { stroke: colorOf(run) }, "stroke-dasharray": DASHES[number % DASHES.length] };
  }

  /** Return the curves that are shown, each with its points [x, y, raw value, step]. */
  visibleCurves() {
    return this.contents.curves
      .filter((curve) => !this.view.hidden.has(curve.run) && !this.hidden.has(curve.label))
      .map((curve) => {
        const xs = this.view.coordinates(curve.run);
        const steps = this.view.runs[curve.run].axis.steps;
        const smooth = smoothed(curve.values, this.view.smoothing);
        const points = xs
          ? curve.at.map((at, i) => ({ x: xs[at], y: smooth[i], raw: curve.values[i], step: steps[at] }))
          : [];
        return { curve, points };
      });
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    this.curves = this.visibleCurves();
    this.scales = this.makeScales(width);
    const { left, right, top, bottom } = this.scales;
    const clip = `clip-${this.view.charts.indexOf(this)}`;
    const lines = shape("g", { "clip-path": `url(#${clip})` });
    for (const line of this.curves) this.drawCurve(lines, line);
    const label = `${this.contents.title}. Arrow keys read values, plus and minus zoom.`;
    this.svg = shape(
      "svg",
      {
        viewBox: `0 0 ${width} ${HEIGHT}`,
        height: HEIGHT,
        tabindex: 0,
        role: "application",
        "aria-label": label,
        pointermove: (event) => this.move(event),
        pointerdown: (event) => this.press(event),
        pointerup: (event) => this.release(event),
        pointerleave: () => this.hideTip(),
        blur: () => this.hideTip(),
        dblclick: () => this.view.set({ range: null }),
        keydown: (event) => this.key(event),
      },
      shape(
        "clipPath",
        { id: clip },
        shape("rect", { x: left - 3, y: top - 3, width: right - left + 6, height: bottom - top + 6 }),
      ),
      this.drawAxes(),
      lines,
    );
    this.cursorLine = shape("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    this.selection = shape("rect", { class: "selection", y: top, height: bottom - top, width: 0 });
    this.svg.append(this.cursorLine, this.selection);
    const hadFocus = this.plot.contains(document.activeElement);
    this.hideTip();
    this.plot.replaceChildren(this.svg, this.tip);
    if (hadFocus) this.svg.focus();
  }

  makeScales(width) {
    const [from, to] = this.view.range || this.view.fullRange;
    const values = [];
    for (const { points } of this.curves) {
      for (const { x, y, raw } of points) {
        if (x < from || x > to) continue;
        for (const value of [y, raw]) if (value !== null && (!this.isLog || value > 0)) values.push(value);
      }
    }
    // A log scale without positive values is a linear one.
    const isLog = this.isLog && values.length > 0;
    const [low, high] = valueRange(values, isLog, this.contents);
    const yTicks = isLog ? logTicks(low, high, 5) : ticks(low, high, 5);
    const yTexts = yTicks.map((value) => formatTick(value, this.contents.percent));
    const left = 14 + 7.2 * Math.max(...yTexts.map((text) => text.length), 2);
    const right = width - 14;
    const top = 10;
    const bottom = HEIGHT - 38;
    const place = isLog
      ? (y) => (y > 0 ? Math.log(y / low) / Math.log(high / low) : NaN)
      : (y) => (y - low) / (high - low);
    return {
      left,
      right,
      top,
      bottom,
      from,
      to,
      yTicks,
      yTexts,
      x: (value) => left + ((value - from) / (to - from)) * (right - left),
      y: (value) => bottom - place(value) * (bottom - top),
      xOf: (pixel) => from + ((pixel - left) / (right - left)) * (to - from),
    };
  }

  drawAxes() {
    const { left, right, top, bottom, from, to, x, y, yTicks, yTexts } = this.scales;
    const group = shape("g", { "aria-hidden": "true" });
    yTicks.forEach((value, i) => {
      const height = y(value);
      group.append(
        shape("line", { class: "grid", x1: left, x2: right, y1: height, y2: height }),
        shape("text", { x: left - 6, y: height + 4, "text-anchor": "end" }, yTexts[i]),
      );
    });
    for (const value of ticks(from, to, Math.max(2, Math.floor((right - left) / 90)))) {
      const isLast = x(value) > right - 12;
      group.append(
        shape("line", { class: "grid", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4 }),
        shape(
          "text",
          { x: x(value), y: bottom + 17, "text-anchor": isLast ? "end" : "middle" },
          formatTick(value),
        ),
      );
    }
    group.append(
      shape("text", { x: right, y: HEIGHT - 5, "text-anchor": "end" }, this.view.axisTitle),
    );
    const reference = this.contents.reference;
    if (reference !== null && y(reference) >= top && y(reference) <= bottom) {
      group.append(
        shape("line", { class: "reference", x1: left, x2: right, y1: y(reference), y2: y(reference) }),
      );
    }
    return group;
  }

  drawCurve(group, { curve, points }) {
    const line = this.lineOf(curve.run, curve.label);
    const { x, y, from, to } = this.scales;
    if (this.view.smoothing) {
      const d = pathOf(points.map((p) => [x(p.x), p.raw === null ? NaN : y(p.raw)]));
      group.append(shape("path", { class: "raw", d, ...line }));
    }
    const d = pathOf(points.map((p) => [x(p.x), p.y === null ? NaN : y(p.y)]));
    group.append(
      shape("path", { class: "curve", d, "data-run": curve.run, "data-metric": curve.metric, ...line }),
    );
    const inside = points.filter((p) => p.y !== null && p.x >= from && p.x <= to);
    if (inside.length > MAX_DOTS || !curve.metric.startsWith("eval_")) return;
    for (const p of inside) {
      const height = y(p.y);
      if (Number.isFinite(height)) {
        group.append(shape("circle", { cx: x(p.x), cy: height, r: 2.6, style: { fill: line.style.stroke } }));
      }
    }
  }

  /** Show the values near an x coordinate in pixels. */
  showTip(pixel) {
    const rows = [];
    let nearest = null;
    for (const { curve, points } of this.curves) {
      const point = nearestPoint(points, this.scales.xOf(pixel));
      if (point === null) continue;
      const distance = Math.abs(this.scales.x(point.x) - pixel);
      rows.push({ curve, point, distance });
      if (nearest === null || distance < nearest.distance) nearest = rows[rows.length - 1];
    }
    if (nearest === null) return;
    this.cursor = nearest.point.x;
    const place = this.scales.x(this.cursor);
    const shown = rows.filter((row) => row === nearest || row.distance <= REACH);
    this.tip.replaceChildren(
      element("strong", {}, this.describePlace(nearest.point)),
      ...shown.map((row) => this.tipRow(row, nearest)),
    );
    this.tip.hidden = false;
    this.cursorLine.setAttribute("visibility", "visible");
    this.cursorLine.setAttribute("x1", place);
    this.cursorLine.setAttribute("x2", place);
    // Next to the cursor if there is room on either side, otherwise below the chart.
    const width = this.tip.offsetWidth;
    const fitsRight = place + 12 + width <= this.plot.clientWidth;
    const fitsLeft = place - 12 - width >= 0;
    let left = fitsRight ? place + 12 : place - 12 - width;
    if (!fitsRight && !fitsLeft) left = (this.plot.clientWidth - width) / 2;
    const top = fitsRight || fitsLeft ? 12 : HEIGHT;
    Object.assign(this.tip.style, { top: `${top}px`, left: `${left}px` });
  }

  describePlace({ x, step }) {
    const where = [`step ${step.toLocaleString("en")}`];
    if (this.view.axis !== "steps") where.push(`${formatValue(x)} ${this.view.axisTitle}`);
    if (this.view.smoothing) where.push("value (smoothed)");
    return where.join(", ");
  }

  tipRow({ curve, point }, nearest) {
    const run = this.view.runs.length > 1 ? this.view.runs[curve.run].name : "";
    const label = this.labels.length > 1 || !run ? curve.label : "";
    const other = point.step === nearest.point.step ? "" : `step ${point.step.toLocaleString("en")}`;
    const { percent } = this.contents;
    const smooth = this.view.smoothing ? ` (${formatValue(point.y, percent)})` : "";
    return element(
      "div",
      {},
      element("span", {
        class: "swatch",
        style: { background: this.lineOf(curve.run, curve.label).style.stroke },
      }),
      element("span", { class: "name" }, [run, label, other].filter(Boolean).join(", ")),
      element("span", { class: "value" }, formatValue(point.raw, percent) + smooth),
    );
  }

  hideTip() {
    this.tip.hidden = true;
    if (this.cursorLine) this.cursorLine.setAttribute("visibility", "hidden");
  }

  pixelOf(event) {
    const pixel = event.clientX - this.svg.getBoundingClientRect().left;
    return Math.min(Math.max(pixel, this.scales.left), this.scales.right);
  }

  press(event) {
    if (event.button !== 0) return;
    this.pressed = this.pixelOf(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  move(event) {
    const pixel = this.pixelOf(event);
    if (this.pressed === undefined) {
      this.showTip(pixel);
      return;
    }
    this.hideTip();
    this.selection.setAttribute("x", Math.min(this.pressed, pixel));
    this.selection.setAttribute("width", Math.abs(this.pressed - pixel));
  }

  release(event) {
    const pixel = this.pixelOf(event);
    const [from, to] = [this.pressed ?? pixel, pixel].sort((a, b) => a - b);
    this.pressed = undefined;
    const range = [this.scales.xOf(from), this.scales.xOf(to)];
    if (to - from > 6 && isWide(...range)) this.view.set({ range });
    else this.showTip(pixel);
  }

  key(event) {
    const xs = [...new Set(this.curves.flatMap(({ points }) => points.map((p) => p.x)))]
      .filter((x) => x >= this.scales.from && x <= this.scales.to)
      .sort((a, b) => a - b);
    const here = this.cursor === null || this.tip.hidden ? -1 : xs.indexOf(this.cursor);
    const goals = {
      ArrowRight: Math.min(here + 1, xs.length - 1),
      ArrowLeft: here < 0 ? xs.length - 1 : Math.max(here - 1, 0),
      Home: 0,
      End: xs.length - 1,
    };
    if (event.key in goals && xs.length) this.showTip(this.scales.x(xs[goals[event.key]]));
    else if (event.key === "+" || event.key === "-") this.zoom(event.key === "+" ? 0.5 : 2);
    else if (event.key === "Escape") this.view.set({ range: null });
    else return;
    event.preventDefault();
  }

  /** Zoom around the cursor, or around the middle. */
  zoom(factor) {
    const { from, to } = this.scales;
    const [first, last] = this.view.fullRange;
    const middle = this.cursor !== null && !this.tip.hidden ? this.cursor : (from + to) / 2;
    const half = (factor * (to - from)) / 2;
    const range = [Math.max(first, middle - half), Math.min(last, middle + half)];
    if (!isWide(...range)) return;
    this.view.set({ range: range[0] <= first && range[1] >= last ? null : range });
  }

  /** Save the picture as an SVG file, with its colours as they are now. */
  save() {
    const copy = this.svg.cloneNode(true);
    const originals = [this.svg, ...this.svg.querySelectorAll("*")];
    [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
      const style = getComputedStyle(originals[i]);
      for (const name of SAVED) node.style.setProperty(name, style.getPropertyValue(name));
    });
    copy.setAttribute("xmlns", SVG);
    copy.setAttribute("width", this.plot.clientWidth);
    const blob = new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
    const link = element("a", {
      href: URL.createObjectURL(blob),
      download: `${this.contents.title.replace(/\W+/g, "_")}.svg`,
    });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

function colorOf(number) {
  return `var(--run-${number % 8})`;
}

/** Return an exponential moving average, corrected for its start as in Adam. */
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let count = 0;
  return values.map((value) => {
    if (value === null) return null;
    count += 1;
    mean = weight * mean + (1 - weight) * value;
    return mean / (1 - weight ** count);
  });
}

/** Return the ends of the y axis. */
function valueRange(values, isLog, { from_zero: fromZero, reference }) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!values.length) return [0, 1];
  if (reference !== null && !isLog) {
    low = Math.min(low, reference);
    high = Math.max(high, reference);
  }
  if (isLog) return isWide(low, high) ? [low / 1.05, high * 1.05] : [low / 2, high * 2];
  if (fromZero && low >= 0) return [0, high > 0 ? high * 1.05 : 1];
  const margin = isWide(low, high) ? 0.05 * (high - low) : 0.05 * Math.abs(high) || 1;
  return [low - margin, high + margin];
}

/** Return a path through points; it is interrupted where a coordinate is no number. */
function pathOf(points) {
  let path = "";
  let isDown = false;
  points.forEach(([x, y], i) => {
    if (Number.isFinite(y)) {
      path += `${isDown ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`;
      const next = points[i + 1];
      if (!isDown && !(next && Number.isFinite(next[1]))) path += "h0"; // a single point is a dot
      isDown = true;
    } else {
      isDown = false;
    }
  });
  return path;
}

function nearestPoint(points, x) {
  let nearest = null;
  for (const point of points) {
    if (point.raw === null) continue;
    if (nearest === null || Math.abs(point.x - x) < Math.abs(nearest.x - x)) nearest = point;
  }
  return nearest;
}
