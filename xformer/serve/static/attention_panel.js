// The attention of an output: its figures, and an editor of the weights of one token.

import { html, visible } from "./dom.js";
import { AttentionView } from "./attention_view.js";
import { partName } from "./switches.js";

export async function drawAttention(column, show) {
  const result = column.result;
  const maps = await column.maps();
  if (result !== column.result) return;
  column.editor = column.changes && column.api.changesAttention ? html("section", { class: "figure-card editor" }) : null;
  column.edited = null;
  column.view = new AttentionView({
    maps, selection: column.selection, name: column.model.name, editor: column.editor,
    onhover: (row) => column.select(tokenOf(column, row), true),
    onpick: (row) => pick(column, tokenOf(column, row)),
    onchange: () => column.mark(),
    onload: (layer) => loadLayer(column, layer),
  });
  show(column.view.element);
}

/** Show the weights of a token in the editor, which does not follow the pointer on its way over the map. */
function pick(column, token) {
  if (token == null || token < 0 || token >= column.tokens.length) return;
  column.picked = token;
  drawEditor(column);
}

/** Sliders of the attention that predicts the token that was picked, and what they change. */
export function drawEditor(column) {
  const { selection, view: { map }, picked: token } = column;
  const query = token + map.firstQuery;
  const shown = `${JSON.stringify(selection)} ${query}`;
  if (!column.editor || column.tab !== "attention" || map.firstQuery == null || column.edited === shown) return;
  column.edited = shown;
  const content = html("div");
  const show = (...children) => column.editor.replaceChildren(html("h4", {}, "Change these weights by hand"), ...children, content);
  if (selection.layer == null || selection.head == null) return show(html("p", { class: "hint" }, "Select a head to change its weights for the selected token."));
  const numKeys = map.isCausal ? query + 1 : map.keys.length;
  const weights = map.weights[map.only == null ? selection.layer : 0][selection.head][query].slice(0, numKeys);
  const part = { kind: selection.kind === "self" ? "decoder" : selection.kind, layer: selection.layer, head: selection.head, query };
  const rest = map.keys.slice(numKeys).map(() => 0);
  const hint = `Attention of “${visible(map.queries[query])}” in ${partName({ ...part, part: "attention" })}. Click a row of the map to choose another token.`;
  show(html("p", { class: "hint" }, hint), rowEditor({
    keys: map.keys.slice(0, numKeys), weights,
    onchange: (values) => {
      const signal = column.beginChange();
      if (!values) return content.replaceChildren();
      const changes = { attention_rows: [{ ...part, weights: [...values, ...rest] }] };
      column.showChange(content, signal, async () => column.changeCard(await column.changed(changes, signal), token, column.editor));
    },
  }));
}

/** Show another layer of attention that is too large to be loaded at once. */
async function loadLayer(column, layer) {
  column.attention = column.api.attention(column.model, column.result, column.output, layer);
  await column.drawPanel();
  column.panel.querySelector("[data-field=layer]")?.focus();
}

/** Index of the output token of a query of the attention that is shown, or null. */
function tokenOf({ view }, query) {
  const { firstQuery } = view.map;
  return firstQuery == null ? null : query - firstQuery;
}

/** Weights with another one for `index`; the others keep their proportions, and all have the sum 1. */
function withWeight(weights, index, value) {
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
function rowEditor({ keys, weights, onchange }) {
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
      type: "number", min: 0, max: 100, step: "any", "aria-label": `${label} in percent`,
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
