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

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

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
 * Let the pointer and the arrow keys read the cells of a picture.
 *
 * Pairs are of the vertical and the horizontal axis, in units of the picture, which is `picture` units wide: `origin` of
 * the first cell, `size` of a cell, and `counts` of rows and columns. `current()` is the selected cell, `show(row, column)`
 * selects one and returns its description, and `hide()` is called for the pointer beside all cells.
 */
export function readCells(figure, { picture, origin, size, counts, current, show, hide = () => {} }) {
  figure.addEventListener("pointermove", (event) => {
    const box = figure.getBoundingClientRect();
    const scale = picture / box.width;
    const pointer = [event.clientY - box.top, event.clientX - box.left];
    const cell = pointer.map((value, axis) => Math.floor((value * scale - origin[axis]) / size[axis]));
    if (cell.every((value, axis) => value >= 0 && value < counts[axis])) show(...cell);
    else hide();
  });
  figure.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    announce(show(...current().map((value, axis) => Math.max(0, Math.min(counts[axis] - 1, value + step[1 - axis])))));
  });
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
