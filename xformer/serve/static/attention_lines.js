// Attention as lines from each query to the keys that it attends to.

import { drawing, percent, pointerIn, shorten, svg, visible } from "./dom.js";

const [ROW, GAP, LEVELS, LETTERS] = [24, 170, 8, 13];

/**
 * Draw `rows` (queries) on the left, `columns` (keys) on the right, and a line for each weight (queries, keys).
 *
 * A weight w has a line of opacity w / `maximum`, a number, or one for each row; lines of less than a sixteenth are left
 * out. The method `select(row)` of the figure emphasizes the lines of one query, null of all. `onhover(row)` is called
 * for the query under the pointer.
 */
export function attentionLines({ weights, rows, columns, title, maximum = 1, onhover = () => {} }) {
  const space = (labels) => 20 + 7.5 * Math.max(0, ...labels.map((text) => Math.min(LETTERS, visible(text).length)));
  const [left, right] = [space(rows), space(columns)];
  const [width, height] = [left + GAP + right, Math.max(rows.length, columns.length) * ROW + 8];
  const y = (index) => (index + 0.5) * ROW + 4;
  const label = (text, x, index, anchor) =>
    svg("text", { class: "label", x, y: y(index) + 4, "text-anchor": anchor }, shorten(visible(text), LETTERS));
  const keys = columns.map((text, index) => label(text, left + GAP + 8, index, "start"));
  const shares = keys.map((_, index) => svg("rect", { class: "share", x: left + GAP + 2, y: y(index) - 9, width: right - 6, height: 18, rx: 5, "fill-opacity": 0 }));
  const groups = weights.map((row, query) => {
    const paths = Array.from({ length: LEVELS + 1 }, () => []);
    row.forEach((weight, key) => {
      const level = Math.round(LEVELS * Math.min(1, weight / (maximum[query] ?? maximum)));
      const middle = left + GAP / 2;
      if (level > 0) paths[level].push(`M${left} ${y(query)}C${middle} ${y(query)} ${middle} ${y(key)} ${left + GAP} ${y(key)}`);
    });
    const lines = paths.flatMap((path, level) => (path.length ? [svg("path", { d: path.join(""), "stroke-opacity": level / LEVELS })] : []));
    return svg("g", { class: "lines" }, lines);
  });
  const queries = rows.map((text, index) => label(text, left - 8, index, "end"));
  const attributes = { role: "img", "aria-label": `${title}: lines from each query to its keys.` };
  const figure = drawing("attention-lines", width, height, attributes, shares, groups, queries, keys);
  figure.select = (selected) => {
    const chosen = selected != null && selected >= 0 && selected < rows.length ? selected : null;
    groups.forEach((group, index) => group.classList.toggle("dimmed", chosen != null && index !== chosen));
    queries.forEach((text, index) => text.classList.toggle("selected", index === chosen));
    shares.forEach((rect, key) => rect.setAttribute("fill-opacity", chosen == null ? 0 : 0.6 * Math.min(1, weights[chosen][key] / (maximum[chosen] ?? maximum))));
    figure.setAttribute("aria-label", chosen == null ? `${title}: lines from each query to its keys.` : describe(chosen));
  };
  const describe = (query) => {
    const best = weights[query].map((weight, key) => [weight, key]).sort((a, b) => b[0] - a[0]).slice(0, 3);
    return `${title}: ${visible(rows[query])} attends to ${best.map(([weight, key]) => `${visible(columns[key])} ${percent(weight)}`).join(", ")}.`;
  };
  figure.addEventListener("pointermove", (event) => {
    const [top, side] = pointerIn(figure, width, event);
    const row = Math.floor((top - 4) / ROW);
    if (side < left + 20 && row >= 0 && row < rows.length) {
      figure.select(row);
      onhover(row);
    }
  });
  return figure;
}
