// The logit lens: what the model would predict if it ended after each layer.

import { cellFigure, percent, shorten, svg, visible } from "./dom.js";

const [WIDTH, HEIGHT, LEFT, LETTERS] = [78, 26, 84, 9];

/**
 * Draw the most probable token of each layer (rows) at each position (columns), shaded by its probability.
 *
 * `layers` are `{name, cells}` with `{text, probability}` for each position, the last layer first in the picture;
 * `columns` are the tokens at the positions. Arrow keys read the cells. The method `select(column)` marks a position;
 * `onselect(column)` is called for the position under the pointer.
 */
export function lensTable({ layers, columns, title, onselect = () => {} }) {
  const rows = [...layers].reverse();
  const [width, height] = [LEFT + columns.length * WIDTH + 4, (rows.length + 1) * HEIGHT + 26];
  const y = (row) => HEIGHT + row * HEIGHT;
  const x = (column) => LEFT + column * WIDTH;
  const cells = rows.flatMap((layer, row) => layer.cells.map(({ text, probability }, column) => svg(
    "g",
    { transform: `translate(${x(column)} ${y(row)})` },
    svg("rect", { class: "cells", width: WIDTH - 2, height: HEIGHT - 2, rx: 4 }),
    svg("rect", { class: "cell", width: WIDTH - 2, height: HEIGHT - 2, rx: 4, "fill-opacity": (0.5 * probability).toFixed(3) }),
    svg("text", { class: "token-text", x: WIDTH / 2 - 1, y: 17, "text-anchor": "middle" }, shorten(visible(text), LETTERS)),
  )));
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
    rows.map(({ name }, row) => svg("text", { class: "label", x: LEFT - 10, y: y(row) + 17, "text-anchor": "end" }, name)),
    cells,
  );
}
