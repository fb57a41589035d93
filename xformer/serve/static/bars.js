// Bars of probabilities.

import { percent, shorten, svg, visible } from "./dom.js";

/** Horizontal bars `{label, value, marked}` of values from 0 to 1. */
export function barChart({ bars, title, width = 620 }) {
  const [row, right] = [30, 72];
  const left = 20 + 8 * Math.max(...bars.map(({ label }) => Math.min(15, visible(label).length)));
  const height = bars.length * row + 4;
  const scale = width - left - right;
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, class: "figure bars", role: "list", "aria-label": title },
    bars.map(({ label, value, marked }, index) =>
      svg(
        "g",
        { role: "listitem", "aria-label": `${visible(label)}: ${percent(value)}${marked ? ", chosen" : ""}`, transform: `translate(0 ${index * row + 2})` },
        svg("text", { class: marked ? "label marked" : "label", x: left - 12, y: 19, "text-anchor": "end" }, shorten(visible(label), 15)),
        svg("rect", { class: "track", x: left, y: 5, width: scale, height: 18, rx: 4 }),
        svg("rect", { class: marked ? "bar marked" : "bar", x: left, y: 5, width: Math.max(2, value * scale), height: 18, rx: 4 }),
        svg("text", { class: "value", x: width - 4, y: 19, "text-anchor": "end" }, percent(value)),
      ),
    ),
  );
}
