// Elements of HTML and SVG, messages for screen readers, and movement with arrow keys.

const SVG = "http://www.w3.org/2000/svg";

/** Create an HTML element; attributes named on... are listeners, false and null ones are left out. */
export function html(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Create an SVG element. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Create a figure of a size; `kind` is its class. */
export const drawing = (kind, width, height, attributes, ...children) =>
  svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: `figure ${kind}`, ...attributes }, ...children);

/** Labels of the rows of a figure, in `width` units at its left, which stay there when it scrolls. */
export const rowLabels = (width, height, texts) =>
  svg("g", { class: "row-labels" }, svg("rect", { class: "ground", x: -4, width: width + 4, height }), texts);

/** A list `[value, text]` to choose from; `onchange` is called with the value, a string. */
export const choice = (field, label, options, selected, onchange) =>
  html("label", {}, label,
    html("select", { "data-field": field, onchange: (event) => onchange(event.target.value) },
      options.map(([value, text]) => html("option", { value: value ?? "", selected: value === selected }, text))));

/** A box to check; `onchange` is called with true or false. */
export const checkBox = (label, checked, onchange, attributes = {}) =>
  html("label", { class: "check" },
    html("input", { type: "checkbox", checked, onchange: (event) => onchange(event.target.checked), ...attributes }), label);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** Elements of a layer, with its number before them. */
export const layerRow = (layer, elements) =>
  html("div", { class: "layer" }, html("span", { class: "layer-name", "aria-hidden": "true" }, String(layer + 1)), elements);

export const errorLine = (error) => html("p", { class: "error", role: "alert" }, error.message);

/** Say a message in the live region of the page. */
export function announce(message) {
  document.getElementById("announcer").textContent = message;
}

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/**
 * Let arrow keys, Home and End move the focus among elements, of which one is in the tab order.
 *
 * `columns` is the width of a grid; 0 is one line, in which all arrows move by one.
 */
export function roving(elements, columns = 0, current = 0) {
  elements.forEach((element, index) => {
    element.tabIndex = index === current ? 0 : -1;
    element.addEventListener("focus", () => {
      for (const other of elements) other.tabIndex = other === element ? 0 : -1;
    });
    element.addEventListener("keydown", (event) => {
      const step = STEPS[event.key];
      let target = null;
      if (step) target = index + (columns ? step[0] + step[1] * columns : step[0] + step[1]);
      else if (event.key === "Home") target = 0;
      else if (event.key === "End") target = elements.length - 1;
      if (target == null || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      elements[target]?.focus();
    });
  });
}

/**
 * A figure with cells that the pointer and the arrow keys read, and the methods `select(index)`, which marks a row (axis 0)
 * or a column (axis 1), and the property `cell`, which was read last.
 *
 * Pairs are of the vertical and the horizontal axis: `origin` of the first cell, its `size`, and `counts` of rows and
 * columns. `describe(row, column)` returns the caption of a cell, `onread(row, column)` is called for it, `mark` has the
 * attributes of the mark, and `gap` is the space between cells. With `hides`, nothing is read after the pointer has left.
 */
export function cellFigure(
  { kind, width, height, origin, size, counts, cell, axis, mark, gap = 0, hides = false, role, label, describe, onread }, ...children) {
  const marked = svg("rect", { ...mark, display: "none" });
  const cursor = svg("rect", { class: "cursor", width: size[1] - gap, height: size[0] - gap, rx: 2 + gap, display: "none" });
  const caption = svg("text", { class: "caption", x: origin[1], y: height - 6 });
  const attributes = { tabindex: 0, role: "application", "aria-roledescription": role, "aria-label": `${label}. Arrow keys read the cells.` };
  const figure = drawing(kind, width, height, attributes, marked, ...children, cursor, caption);
  const place = (element, index, axis) => {
    element.setAttribute(["y", "x"][axis], origin[axis] + index * size[axis]);
    element.removeAttribute("display");
  };
  const show = (...read) => {
    figure.cell = read;
    read.forEach((index, axis) => place(cursor, index, axis));
    caption.textContent = describe(...read);
    onread(...read);
    return caption.textContent;
  };
  const hide = () => {
    if (!hides) return;
    cursor.setAttribute("display", "none");
    caption.textContent = "";
  };
  figure.addEventListener("pointermove", (event) => {
    const read = pointerIn(figure, width, event).map((value, axis) => Math.floor((value - origin[axis]) / size[axis]));
    if (read.every((value, axis) => value >= 0 && value < counts[axis])) show(...read);
    else hide();
  });
  figure.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    announce(show(...figure.cell.map((value, axis) => Math.max(0, Math.min(counts[axis] - 1, value + step[1 - axis])))));
  });
  for (const name of ["pointerleave", "blur"]) figure.addEventListener(name, hide);
  figure.select = (index) => {
    if (index == null || index < 0 || index >= counts[axis]) return marked.setAttribute("display", "none");
    place(marked, index, axis);
    figure.cell = figure.cell.map((value, other) => (other === axis ? index : value));
  };
  return Object.assign(figure, { cell });
}

/** The place of the pointer, vertical and horizontal, in units of a figure that is `width` units wide. */
export function pointerIn(figure, width, event) {
  const box = figure.getBoundingClientRect();
  return [event.clientY - box.top, event.clientX - box.left].map((value) => (value * width) / box.width);
}

/** Text of a token in which white space can be seen. */
export function visible(text) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^▁+$/, " ").trim();
  return shown || (text ? "␣" : "∅");
}

export const shorten = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

/** A number for people: 12,345; 0.1234; 1.2e-5. */
export function format(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("-", "−");
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : digits).replace("-", "−");
}

/** A score with two decimals, so that scores can be compared. */
export const formatScore = (value) => (value == null ? "–" : value.toFixed(2).replace("-", "−"));

export function percent(value) {
  if (value > 0 && value < 0.0005) return "< 0.1 %";
  return `${(100 * value).toFixed(value >= 0.0995 ? 0 : 1)} %`;
}
