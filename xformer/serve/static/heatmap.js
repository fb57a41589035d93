// Heat maps of attention and alignment.

import { cellFigure, format, rowLabels, shorten, svg, visible } from "./dom.js";

/**
 * Cells as one path per level of shading: few elements, however many cells.
 *
 * A weight w is drawn with opacity w / `maximum`, a number, or one for each row.
 */
function cells(weights, size, maximum = 1, levels = 16) {
  const paths = Array.from({ length: levels + 1 }, () => []);
  weights.forEach((row, y) =>
    row.forEach((weight, x) => {
      const level = Math.round(levels * Math.min(1, weight / (maximum[y] ?? maximum)));
      if (level > 0) paths[level].push(`M${x * size} ${y * size}h${size}v${size}h${-size}z`);
    }),
  );
  return paths.flatMap((path, level) =>
    path.length ? [svg("path", { class: "cell", d: path.join(""), "fill-opacity": level / levels })] : [],
  );
}

/** A heat map without labels. */
export function thumbnail(weights, maximum) {
  const [height, width] = [weights.length, weights[0]?.length ?? 0];
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "thumbnail", "aria-hidden": "true" },
    svg("rect", { class: "cells", width, height }),
    cells(weights, 1, maximum, 6));
}

/**
 * A heat map of `rows` (queries) by `columns` (keys), which arrow keys read cell by cell.
 *
 * Labels are cut to `letters`. Its method `select(row)` marks a row. `onhover(row, column)` is called for the cell under the pointer,
 * `onpick(row)` for the row that is clicked.
 */
export function heatMap({ weights, rows, columns, title, maximum = 1, ringed = false, letters = 13, onhover = () => {}, onpick = () => {} }) {
  const texts = (labels) => labels.map((text) => shorten(visible(text), letters));
  const space = (labels) => 20 + 7 * Math.max(...texts(labels).map((text) => text.length));
  const [left, top] = [Math.max(60, space(rows)), Math.max(60, 0.92 * space(columns))];
  const size = Math.max(14, Math.min(30, Math.floor(560 / Math.max(rows.length, columns.length))));
  // The slanted label of the last column extends to the right.
  const [width, height] = [left + columns.length * size + Math.ceil(0.5 * space(columns)), top + rows.length * size + 22];
  const label = (text, x, y, attributes) =>
    svg("text", { class: "label", x, y, ...attributes }, text);
  const rings = ringed
    ? weights.map((row, y) => {
        const x = row.indexOf(Math.max(...row));
        return svg("circle", { class: "ring", cx: (x + 0.5) * size, cy: (y + 0.5) * size, r: size * 0.2 });
      })
    : [];
  const figure = cellFigure(
    {
      kind: "heat-map", role: "heat map", label: `${title}: ${rows.length} rows, ${columns.length} columns`, width, height,
      origin: [top, left], size: [size, size], counts: [rows.length, columns.length], cell: [0, 0], hides: true,
      axis: 0, mark: { class: "row-mark", x: 4, width: left + columns.length * size - 4, height: size, rx: 4 }, onread: onhover,
      describe: (row, column) => `${visible(rows[row])} → ${visible(columns[column])}: ${format(weights[row][column])}`,
    },
    texts(columns).map((text, x) => {
      const [cx, cy] = [left + (x + 0.5) * size, top - 8];
      return label(text, cx, cy, { transform: `rotate(-65 ${cx} ${cy})`, "data-column": x });
    }),
    svg("g", { transform: `translate(${left} ${top})` },
      svg("rect", { class: "cells", width: columns.length * size, height: rows.length * size, rx: 3 }), cells(weights, size, maximum), rings),
    rowLabels(left, top + rows.length * size, texts(rows).map((text, y) =>
      label(text, left - 8, top + (y + 0.5) * size + 4, { "text-anchor": "end", "data-row": y }))),
  );
  figure.addEventListener("click", () => onpick(figure.cell[0]));
  return figure;
}
