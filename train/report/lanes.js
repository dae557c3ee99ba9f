// Bars that are divided into boxes: the memory of a device, and the time of a run.
"use strict";

/** Return a card with a bar per lane, a scale below them, and a legend. */
function lanes({ kinds, lanes }, view, { format, unitFor, markName }) {
  const used = kinds.filter((kind) => lanes.some((lane) => lane.boxes.some((box) => box.kind === kind)));
  const others = lanes.flatMap((lane) => lane.boxes.map((box) => box.kind)).filter((kind) => !kinds.includes(kind));
  const all = [...used, ...new Set(others)];
  const colors = new Map(all.map((kind, i) => [kind, `var(--kind-${i % 10})`]));
  const end = Math.max(...lanes.map(endOf)) || 1;
  const rows = lanes.map((lane) => {
    const row = element(
      "div",
      { class: "lane", "data-run": lane.run },
      element("div", { class: "label" }, [view.runs[lane.run].name, lane.label].filter(Boolean).join(": ")),
      element("div", { class: "bar" }, ...lane.boxes.map(boxOf), markOf(lane)),
    );
    view.listeners.push(() => (row.hidden = view.hidden.has(lane.run)));
    return row;
  });

  function boxOf(box) {
    const text = [`${box.kind}: ${format(box.length)}`, box.text].filter(Boolean).join(", ");
    return element(
      "div",
      {
        class: box.kind === "down" ? "box down" : "box",
        role: "img",
        title: text,
        "aria-label": text,
        style: {
          left: `${(100 * box.start) / end}%`,
          width: `${(100 * box.length) / end}%`,
          backgroundColor: colors.get(box.kind),
        },
      },
      box.kind.replace(/ /g, "\u00a0"), // the style sheet hides it if it does not fit
    );
  }

  function markOf(lane) {
    // A budget far beyond the bars would make them too small to read.
    if (lane.mark === null || lane.mark > end) return null;
    const text = `${markName}: ${format(lane.mark)}`;
    return element("div", {
      class: "mark",
      role: "img",
      title: text,
      "aria-label": text,
      style: { left: `${(100 * lane.mark) / end}%` },
    });
  }

  const unit = unitFor(end);
  const scale = ticks(0, end / unit, 4).map((count) =>
    element(
      "span",
      { style: { left: `${(100 * count * unit) / end}%` } },
      count ? format(count * unit, end) : "0",
    ),
  );
  return element(
    "div",
    { class: "card" },
    ...rows,
    element("div", { class: "lane" }, element("div"), element("div", { class: "scale" }, ...scale)),
    element(
      "ul",
      { class: "kinds" },
      ...all.map((kind) =>
        element("li", {}, element("span", { class: "swatch", style: { background: colors.get(kind) } }), kind),
      ),
    ),
  );
}

/** Return where a lane ends: its mark counts if it is less than twice as far as its boxes. */
function endOf({ boxes, mark }) {
  const last = boxes[boxes.length - 1];
  const end = last ? last.start + last.length : 0;
  return mark !== null && mark < 2 * end ? Math.max(end, mark) : end;
}

function unitOfBytes(largest) {
  return largest >= 2 ** 30 ? 2 ** 30 : 2 ** 20;
}

function formatBytes(bytes, largest = bytes) {
  const unit = unitOfBytes(largest);
  return `${Number((bytes / unit).toPrecision(4))} ${unit === 2 ** 30 ? "GiB" : "MiB"}`;
}

function unitOfTime(longest) {
  if (longest < 120) return 1;
  return longest < 7200 ? 60 : 3600;
}

/** Return a time: "45.3 s", "12.5 min", "3.25 h". */
function formatTime(seconds, longest = seconds) {
  const unit = unitOfTime(longest);
  return `${Number((seconds / unit).toPrecision(3))} ${{ 1: "s", 60: "min", 3600: "h" }[unit]}`;
}
