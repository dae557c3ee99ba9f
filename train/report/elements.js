// Elements and numbers. Text from runs is only ever set as text, never as HTML.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

/** Length from which a text in a table, such as a path, is broken. */
const LONG_TEXT = 24;

/** Create an HTML element; children are elements or texts, and may be null. */
function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Return a table whose first column names the rows; a wide one scrolls in its own frame. */
function table(contents) {
  const head = contents.columns.map((name) => element("th", { scope: "col" }, name));
  const rows = contents.rows.map(([first, ...others]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, ...breakable(first, /(?<=[._/])/)),
      ...others.map((text) =>
        element("td", {}, ...(text.length > LONG_TEXT ? breakable(text, /(?<=[_/])/) : [text])),
      ),
    ),
  );
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...rows),
    ),
  );
}

/** Return the parts of a text, and between them places where a line may end. */
function breakable(text, places) {
  return text.split(places).flatMap((part) => [element("wbr"), part]).slice(1);
}

/** Return a value with six digits, such as 5.55692, 8,174.31 or 3.000e-5. */
function formatValue(value, isPercent = false) {
  if (isPercent) return `${Number((100 * value).toPrecision(4))} %`;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(4);
  return Number(value.toPrecision(size >= 1e6 ? 15 : 6)).toLocaleString("en", {
    maximumFractionDigits: 8,
  });
}

/** Return the short text of a tick. */
function formatTick(value, isPercent = false) {
  if (isPercent) return `${Number((100 * value).toPrecision(4))} %`;
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-4) return value.toExponential().replace(/(\.\d\d)\d+/, "$1");
  if (size >= 1e15) return value.toExponential(1);
  if (size >= 1e4) {
    return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
  }
  return String(Number(value.toPrecision(6)));
}

/** Return whether a range is wide enough for ticks, which rounding would make equal otherwise. */
function isWide(low, high) {
  return high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high));
}

/** Return round numbers from `low` to `high`, about `count`. */
function ticks(low, high, count) {
  const span = high - low;
  if (!isWide(low, high) || !Number.isFinite(span)) return [low];
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].find((factor) => factor * power * count >= span) * power;
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) {
    result.push(Number((i * step).toPrecision(12)));
  }
  return result;
}

/** Return powers of ten from `low` to `high`; between few of them, other round numbers too. */
function logTicks(low, high, count) {
  const result = [];
  const decades = Math.log10(high / low);
  const every = Math.max(1, Math.ceil(decades / count));
  const factors = decades < 2 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % every) continue;
    result.push(...factors.map((factor) => Number(`${factor}e${power}`)));
  }
  const inside = result.filter((value) => value >= low && value <= high);
  return inside.length < 3 ? ticks(low, high, count) : inside;
}
