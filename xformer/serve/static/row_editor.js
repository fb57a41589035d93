// Attention weights of one token, which sliders change.

import { html, percent, visible } from "./dom.js";

/**
 * A slider for each of the `keys`, and a button that restores the `weights`.
 *
 * `onchange(weights)` is called with weights of sum 1, or null for those of the model.
 */
export function rowEditor({ keys, weights, onchange }) {
  const current = [...weights];
  const rows = keys.map((key, index) => {
    const output = html("output");
    const slider = html("input", {
      type: "range", min: 0, max: 1, step: 0.01, value: weights[index], "aria-label": `Weight of ${visible(key)}`,
      oninput: (event) => {
        current[index] = Number(event.target.value);
        update();
        if (current.some((weight) => weight > 0)) onchange(normalized());
      },
    });
    return { slider, output, element: html("label", { class: "weight" }, html("span", {}, visible(key)), slider, output) };
  });
  const normalized = () => {
    const sum = current.reduce((a, b) => a + b, 0);
    return current.map((weight) => weight / (sum || 1));
  };
  const update = () => normalized().forEach((weight, index) => (rows[index].output.textContent = percent(weight)));
  const reset = html("button", {
    type: "button",
    onclick: () => {
      weights.forEach((weight, index) => (rows[index].slider.value = current[index] = weight));
      update();
      onchange(null);
    },
  }, "Restore");
  update();
  return html("div", { class: "row-editor" }, html("div", { class: "weights" }, rows.map(({ element }) => element)), reset);
}
