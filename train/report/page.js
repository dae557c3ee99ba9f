// Builds the page from its data.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const view = new View(data);
/** A longer table of differences is closed at first. */
const MAX_OPEN_ROWS = 30;

/** Return the sections of the page that have something to show, as [title, elements]. */
function sections() {
  const result = [["Runs", [element("div", { class: "card" }, table(data.summary))]]];
  for (const name of new Set(data.charts.map((chart) => chart.section))) {
    const charts = data.charts.filter((chart) => chart.section === name);
    const figures = charts.map((chart) => new Chart(chart, view).figure);
    result.push([name, [element("div", { class: "charts" }, ...figures)]]);
  }
  result.push(
    ["Samples", data.samples.map(sample)],
    ["Memory", memory()],
    ["Time", time()],
    ["Schedule", data.schedules.map(schedule)],
    ["Configs", configs()],
    ["Environment", hasRows(data.environment) ? [card(table(data.environment))] : []],
  );
  return result.filter(([, contents]) => contents.length);
}

function sample({ run, prompt, table: texts }) {
  const title = data.runs.length > 1 ? `${prompt} (${run})` : prompt;
  return element("div", { class: "card samples" }, element("h3", {}, title), table(texts));
}

function memory() {
  if (!data.memory.lanes.length) return [];
  const formats = { format: formatBytes, unitFor: unitOfBytes, markName: "budget" };
  return [
    lanes(data.memory, view, formats),
    hint("Memory of a step on one device. “Planned” is estimated from shapes before the step is compiled."),
  ];
}

function time() {
  if (!data.time.lanes.length) return [];
  const formats = { format: formatTime, unitFor: unitOfTime, markName: "" };
  return [
    lanes(data.time, view, formats),
    hint(
      "Time since the first start. A start shows its phases one after another, with the sum of each; " +
        "“step” is the productive part.",
    ),
    card(table(data.time.table)),
  ];
}

function schedule({ caption, source, runs }) {
  return element(
    "figure",
    { class: "card" },
    element("figcaption", {}, element("h3", {}, `${caption} (${runs.join(", ")})`)),
    element(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      element("img", { class: "paper", src: source, alt: `Operations of every stage over time. ${caption}` }),
    ),
  );
}

function configs() {
  const contents = [];
  if (hasRows(data.differences)) {
    const title = `Differences between the runs (${data.differences.rows.length} keys)`;
    const isOpen = data.differences.rows.length <= MAX_OPEN_ROWS;
    contents.push(
      card(element("details", { open: isOpen }, element("summary", {}, title), table(data.differences))),
    );
  }
  for (const { run, table: changes } of data.changes) {
    if (hasRows(changes)) {
      contents.push(card(element("h3", {}, `Changes between the starts of ${run}`), table(changes)));
    }
  }
  const whole = data.configs.filter(({ table: keys }) => hasRows(keys));
  const details = whole.map(({ run, table: keys }) =>
    element("details", {}, element("summary", {}, `All keys of ${run}`), table(keys)),
  );
  if (details.length) contents.push(card(...details));
  return contents;
}

function hasRows({ rows }) {
  return rows.length > 0;
}

function card(...children) {
  return element("div", { class: "card" }, ...children);
}

function hint(text) {
  return element("p", { class: "hint" }, text);
}

/** Return the settings of all charts: runs, x axis, smoothing, zoom. */
function tools() {
  const runs = data.runs.map((run, index) =>
    element(
      "label",
      { title: run.workdir },
      element("input", {
        type: "checkbox",
        checked: true,
        change: (event) => {
          if (event.target.checked) view.hidden.delete(index);
          else view.hidden.add(index);
          view.set({});
        },
      }),
      element("span", { class: "swatch", style: { background: colorOf(index) } }),
      run.name,
    ),
  );
  const axes = { steps: "steps", units: data.unit, hours: "hours in steps" };
  const known = Object.entries(axes).filter(([name]) => data.runs.some((run) => run.axis[name]));
  const axis = element(
    "select",
    { change: (event) => view.set({ axis: event.target.value, range: null }) },
    ...known.map(([name, title]) => element("option", { value: name }, title)),
  );
  const smoothing = element("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: 0,
    input: (event) => view.set({ smoothing: Number(event.target.value) }),
  });
  const reset = element(
    "button",
    { type: "button", disabled: true, click: () => view.set({ range: null }) },
    "Reset zoom",
  );
  view.listeners.push(() => (reset.disabled = view.range === null));
  return [
    data.runs.length > 1
      ? element("div", { class: "runs", role: "group", "aria-label": "Runs" }, ...runs)
      : null,
    element("label", {}, "x axis", axis),
    element("label", {}, "smoothing", smoothing),
    reset,
  ];
}

/** Return a choice between the system's colours, light and dark. */
function theme() {
  const choose = (event) => {
    document.documentElement.style.colorScheme = event.target.value;
  };
  const options = { "light dark": "system colours", light: "light", dark: "dark" };
  return element(
    "select",
    { "aria-label": "Colours", change: choose },
    ...Object.entries(options).map(([value, title]) => element("option", { value }, title)),
  );
}

function build() {
  const contents = sections();
  const links = contents.map(([title]) => element("a", { href: `#${title.toLowerCase()}` }, title));
  document
    .getElementById("head")
    .append(element("h1", {}, data.title), element("nav", { "aria-label": "Sections" }, ...links), theme());
  document.getElementById("tools").append(...tools().filter((tool) => tool !== null));
  const main = document.getElementById("main");
  if (data.problems.length) {
    main.append(element("ul", { class: "notes" }, ...data.problems.map((text) => element("li", {}, text))));
  }
  for (const [title, elements] of contents) {
    main.append(
      element(
        "section",
        { "aria-labelledby": title.toLowerCase() },
        element("h2", { id: title.toLowerCase() }, title),
        ...elements,
      ),
    );
  }
  main.append(hint("Drag across a chart to zoom all of them; double-click to see everything again."));
}

build();
