// The layers of a model for one output: the logit lens, and the way of one token.

import { cellFigure, drawing, format, html, percent, rowLabels, shorten, svg, visible } from "./dom.js";
import { figureCard } from "./figure_card.js";

const [WIDTH, HEIGHT, LEFT, LETTERS] = [78, 26, 84, 9]; // of the lens
const ROW = 34; // of the way

export async function drawLayers(column, show) {
  const result = column.result;
  column.layersView = null;
  if (!column.lens) show(html("p", { class: "empty" }, "Running …"));
  const { layers, columns, first } = await column.keep("lens", () => column.api.layers(column.model, result, column.output, { lens: true }));
  if (result !== column.result) return;
  column.firstColumn = first;
  column.layersView = new LayersView({
    layers, columns, name: column.model.name, width: column.width,
    onselect: (position) => {
      column.layersView.select(position);
      column.select(column.token + position - column.columnOf(column.token));
    },
  });
  show(column.layersView.element);
}

/**
 * Figures of `layers` (see `lensTable`, `flowChart`), which have `norms`, `parts` and `cells` by position.
 *
 * `columns` are the tokens at the positions; `onselect(column)` is called for the position under the pointer.
 */
class LayersView {
  constructor({ layers, columns, name, width, onselect }) {
    Object.assign(this, { layers, columns, name, width });
    this.lens = lensTable({ layers, columns, title: "What each layer would predict", onselect });
    this.flow = html("div", { class: "flow-slot" });
    const hint = "Rows: layers. Columns: the tokens so far. Each cell shows the most probable next token if the model ended after this layer (logit lens); a stronger color means a higher probability. The marked column predicts the selected token.";
    this.element = html("div", {},
      figureCard({ title: "What each layer would predict", name: `${name}-lens`, figure: this.lens, note: html("p", { class: "hint" }, hint) }),
      this.flow);
  }

  /** Show the way of the token at a position. */
  select(column) {
    this.lens.select(column);
    const [box, start] = [this.lens.parentElement, LEFT + column * WIDTH];
    if (start < box.scrollLeft + LEFT || start > box.scrollLeft + box.clientWidth) box.scrollLeft = start - box.clientWidth / 2;
    if (column === this.column) return;
    this.column = column;
    if (this.columns[column] == null) return this.flow.replaceChildren(html("p", { class: "hint" }, `Only the last ${this.columns.length} tokens are shown.`));
    const layers = this.layers.map(({ name, norms, parts, cells }) => ({
      name, norm: norms[column], ...cells[column],
      parts: Object.entries(parts).map(([part, values]) => ({ name: part, norm: values[column] })),
    }));
    const title = `“${visible(this.columns[column])}” through the layers`;
    const figure = flowChart({ layers, title, width: Math.min(560, this.width) });
    const parts = Object.keys(this.layers.at(-1).parts);
    const note = html("div", {},
      html("p", { class: "legend" }, parts.map((part, index) => html("span", { class: `key part-key-${index}` }, part))),
      html("p", { class: "hint" }, "From bottom to top, for each layer: the length of the token's vector, the lengths of the vectors that the parts add to it, and the most probable next token."));
    this.flow.replaceChildren(figureCard({ title, name: `${this.name}-way`, figure, note }));
  }
}

/**
 * Draw the most probable token of each layer (rows) at each position (columns), shaded by its probability.
 *
 * `layers` are `{name, cells}` with `{text, probability}` for each position, the last layer first in the picture;
 * `columns` are the tokens at the positions. Arrow keys read the cells. The method `select(column)` marks a position;
 * `onselect(column)` is called for the position under the pointer.
 */
function lensTable({ layers, columns, title, onselect = () => {} }) {
  const rows = [...layers].reverse();
  const [width, height] = [LEFT + columns.length * WIDTH + 4, (rows.length + 1) * HEIGHT + 26];
  const y = (row) => HEIGHT + row * HEIGHT;
  const x = (column) => LEFT + column * WIDTH;
  const cells = rows.flatMap((layer, row) => layer.cells.map(({ text, probability }, column) => svg("g",
    { transform: `translate(${x(column)} ${y(row)})` },
    svg("rect", { class: "cells", width: WIDTH - 2, height: HEIGHT - 2, rx: 4 }),
    svg("rect", { class: "cell", width: WIDTH - 2, height: HEIGHT - 2, rx: 4, "fill-opacity": (0.5 * probability).toFixed(3) }),
    svg("text", { class: "token-text", x: WIDTH / 2 - 1, y: 17, "text-anchor": "middle" }, shorten(visible(text), LETTERS)))));
  return cellFigure(
    {
      kind: "lens", role: "table", label: `${title}: ${rows.length} layers, ${columns.length} positions`, width, height,
      origin: [HEIGHT, LEFT], size: [HEIGHT, WIDTH], counts: [rows.length, columns.length], cell: [rows.length - 1, 0], gap: 2,
      axis: 1, mark: { class: "column-mark", y: 2, width: WIDTH - 2, height: height - 26, rx: 5 },
      onread: (row, column) => onselect(column),
      describe: (row, column) => {
        const { text, probability } = rows[row].cells[column];
        return `${rows[row].name}, after “${visible(columns[column])}”: ${visible(text)} ${percent(probability)}`;
      },
    },
    columns.map((text, column) => svg("text", { class: "label", x: x(column) + WIDTH / 2 - 1, y: 16, "text-anchor": "middle" }, shorten(visible(text), LETTERS))),
    cells,
    rowLabels(LEFT - 2, y(rows.length), rows.map(({ name }, row) =>
      svg("text", { class: "label", x: LEFT - 10, y: y(row) + 17, "text-anchor": "end" }, name))),
  );
}

/**
 * Draw the layers from the bottom up, for one position.
 *
 * `layers` are `{name, norm, parts, text, probability}`: the length of the vector after the layer, the lengths of the
 * vectors that its parts `{name, norm}` add, and the most probable token of the logit lens.
 */
function flowChart({ layers, title, width = 560 }) {
  const rows = [...layers].reverse();
  const [left, gap, right] = width < 450 ? [84, 58, 104] : [84, 96, 150];
  const scale = width - left - gap - right;
  const largest = Math.max(1e-9, ...layers.flatMap(({ parts }) => parts.map(({ norm }) => norm)));
  const height = rows.length * ROW + 8;
  const middle = left + 24;
  const elements = rows.flatMap(({ name, norm, parts, text, probability }, row) => {
    const y = row * ROW + 4;
    const share = (ROW - 10) / Math.max(1, parts.length);
    const description = [`${name}: vector of length ${format(norm, 2)}`, ...parts.map((part) => `${part.name} adds ${format(part.norm, 2)}`), `predicts ${visible(text)} ${percent(probability)}`].join(", ");
    return [svg("g", { role: "listitem", "aria-label": description },
      svg("title", {}, description),
      svg("rect", { class: "hover", x: 0, y, width, height: ROW }),
      svg("text", { class: "label", x: left - 10, y: y + 20, "text-anchor": "end" }, name),
      svg("text", { class: "value", x: middle, y: y + 20, "text-anchor": "middle" }, format(norm, 1)),
      parts.map((part, index) => svg("rect", {
        class: `part part-${index}`, x: left + gap - 12, y: y + 5 + index * share, rx: 2,
        width: Math.max(1, (part.norm / largest) * scale), height: Math.max(2, share - 2),
      })),
      svg("rect", { class: "track", x: width - right + 8, y: y + 4, width: right - 12, height: ROW - 8, rx: 5 }),
      svg("rect", { class: "bar", x: width - right + 8, y: y + 4, width: Math.max(2, probability * (right - 12)), height: ROW - 8, rx: 5 }),
      svg("text", { class: "token-text", x: width - right + 16, y: y + 21 }, `${shorten(visible(text), width < 450 ? 6 : 11)} ${percent(probability)}`))];
  });
  const stream = svg("line", { class: "stream", x1: middle - 22, x2: middle - 22, y1: 8, y2: height - 8 });
  return drawing("flow", width, height, { role: "list", "aria-label": title }, stream, elements);
}
