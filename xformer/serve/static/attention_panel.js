// The attention of an output: its figures, and an editor of the weights of one token.

import { errorLine, html, visible } from "./dom.js";
import { AttentionView } from "./attention_view.js";
import { rowEditor } from "./row_editor.js";
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
    onchange: async (values) => {
      const signal = column.beginChange();
      if (!values) return content.replaceChildren();
      try {
        const change = await column.changed({ attention_rows: [{ ...part, weights: [...values, ...rest] }] }, signal);
        if (!signal.aborted) content.replaceChildren(column.changeCard(change, token, column.editor));
      } catch (error) {
        if (!signal.aborted) content.replaceChildren(errorLine(error));
      }
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
