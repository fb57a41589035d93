// One token through the layers: the lengths of the vectors that the parts add to it, and the next token it predicts.

import { drawing, format, percent, shorten, svg, visible } from "./dom.js";

const ROW = 34;

/**
 * Draw the layers from the bottom up, for one position.
 *
 * `layers` are `{name, norm, parts, text, probability}`: the length of the vector after the layer, the lengths of the
 * vectors that its parts `{name, norm}` add, and the most probable token of the logit lens.
 */
export function flowChart({ layers, title, width = 560 }) {
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
    return [svg(
      "g",
      { role: "listitem", "aria-label": description },
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
      svg("text", { class: "token-text", x: width - right + 16, y: y + 21 }, `${shorten(visible(text), width < 450 ? 7 : 11)} ${percent(probability)}`),
    )];
  });
  const stream = svg("line", { class: "stream", x1: middle - 22, x2: middle - 22, y1: 8, y2: height - 8 });
  return drawing("flow", width, height, { role: "list", "aria-label": title }, stream, elements);
}
