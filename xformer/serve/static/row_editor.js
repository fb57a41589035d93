// Attention weights of one token, which sliders and numbers change.

import { html, visible } from "./dom.js";

/** Weights with another one for `index`; the others keep their proportions, and all have the sum 1. */
export function withWeight(weights, index, value) {
  const rest = weights.reduce((sum, weight, other) => (other === index ? sum : sum + weight), 0);
  if (weights.length === 1) return [1];
  return weights.map((weight, other) =>
    other === index ? value : rest > 1e-9 ? (weight / rest) * (1 - value) : (1 - value) / (weights.length - 1));
}

/**
 * A slider and a number in percent for each of the `keys`, and a button that restores the `weights`.
 *
 * `onchange(weights)` is called with weights of sum 1, or null for those of the model.
 */
export function rowEditor({ keys, weights, onchange }) {
  let current = weights;
  const change = (index, value) => {
    if (!Number.isFinite(value)) return;
    current = withWeight(current, index, Math.max(0, Math.min(1, value)));
    update();
    onchange(current);
  };
  const rows = keys.map((key, index) => {
    const label = `Weight of ${visible(key)}`;
    const slider = html("input", {
      type: "range", min: 0, max: 1, step: 0.01, "aria-label": label, oninput: () => change(index, Number(slider.value)),
    });
    const number = html("input", {
      type: "number", min: 0, max: 100, step: 1, "aria-label": `${label} in percent`,
      oninput: () => number.value !== "" && change(index, Number(number.value) / 100),
    });
    return { slider, number, element: html("div", { class: "weight" }, html("span", {}, visible(key)), slider, number, "%") };
  });
  /** Show the weights; the number that somebody types stays as it is. */
  const update = () => rows.forEach(({ slider, number }, index) => {
    slider.value = current[index];
    if (number !== document.activeElement) number.value = Number((100 * current[index]).toFixed(1));
  });
  const reset = html("button", {
    type: "button",
    onclick: () => {
      current = weights;
      update();
      onchange(null);
    },
  }, "Restore");
  update();
  return html("div", { class: "row-editor" }, html("div", { class: "weights" }, rows.map(({ element }) => element)), reset);
}
