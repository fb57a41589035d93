// Attention by layer and head: one heat map, and all heads as small multiples.

import { attentionLines } from "./attention_lines.js";
import { entropy, leavesOutFirst, maxima, rowOf, scalesRows, shown } from "./attention_maps.js";
import { checkBox, choice, html, layerRow, roving } from "./dom.js";
import { figureCard } from "./figure_card.js";
import { heatMap, thumbnail } from "./heatmap.js";

const NAMES = { cross: "Cross-attention", decoder: "Self-attention of the decoder", encoder: "Self-attention of the encoder", self: "Self-attention" };

/**
 * Selectors and figures. `maps` is an object by kind of `{weights, queries, keys}`, the weights by layer, head, query
 * and key. `selection` has `kind`, `layer` and `head`, null for the mean; `onchange` is called when it changes, and
 * `onload(layer)` for a layer that `maps` does not have. `onhover(query)` and `onpick(query)` are called for the query
 * under the pointer and for the one that is clicked. `editor` is an element that changes weights, or null.
 */
export class AttentionView {
  constructor({ maps, selection, name, editor = null, onhover, onpick, onchange, onload }) {
    Object.assign(this, { maps, selection, name, editor, onhover, onpick, onchange, onload });
    this.element = html("div");
    if (!maps[selection.kind]) selection.kind = Object.keys(maps)[0];
    this.draw();
  }

  get map() {
    return this.maps[this.selection.kind];
  }

  /** Change what is shown of the same weights. */
  set(values) {
    Object.assign(this.selection, values);
    const field = document.activeElement?.dataset?.field;
    this.draw();
    if (field) this.element.querySelector(`[data-field=${field}]`).focus();
    this.onchange();
  }

  /** Weights (queries, keys) of the selected layer and head, or their mean. */
  get weights() {
    return this.map.queries.map((_, query) => rowOf(this.map, this.selection, query));
  }

  draw() {
    const { selection, map } = this;
    selection.layer = selection.layer >= map.numLayers ? null : selection.layer;
    if (map.only != null) selection.layer = map.only;
    const numHeads = map.weights[0].length;
    selection.head = selection.head >= numHeads ? null : selection.head;
    const choose = (field, label, options) => choice(field, label, options, selection[field], (value) =>
      this.change({ [field]: value === "" ? null : field === "kind" ? value : Number(value) }));
    const numbered = (count) => [[null, "mean"], ...Array.from({ length: count }, (_, index) => [index, String(index + 1)])];
    const controls = [
      Object.keys(this.maps).length < 2 ? null : choose("kind", "Attention", Object.keys(this.maps).map((kind) => [kind, NAMES[kind] ?? kind])),
      choose("layer", "Layer", numbered(map.numLayers).slice(map.only == null ? 0 : 1)),
      choose("head", "Head", numbered(numHeads)),
    ];
    const check = (field, label, checked) =>
      checkBox(label, checked, (value) => this.set({ [field]: value }), { "data-field": field });
    if (map.isCausal) controls.push(check("leaveOutFirst", "Leave out the first token", leavesOutFirst(map, selection)));
    controls.push(check("scaleRows", "Scale each row", scalesRows(map, selection)));
    const weights = this.weights;
    const options = {
      weights, rows: map.queries, columns: map.keys, title: this.title, onhover: this.onhover, onpick: this.onpick,
      maximum: maxima(map, selection, weights),
    };
    this.figures = [heatMap(options), attentionLines(options)];
    const name = `${this.name}-${this.title}`;
    this.element.replaceChildren(
      html("div", { class: "controls" }, controls),
      figureCard({ title: this.title, name, figure: this.figures[0], note: html("p", { class: "hint" }, "Each row is a token that attends to the columns.") }),
      figureCard({ title: "The same weights as lines", name: `${name}-lines`, figure: this.figures[1], note: html("p", { class: "hint" }, "Left: tokens that attend. Right: tokens that they attend to.") }),
      this.overview(numHeads),
      ...(this.editor ? [this.editor] : []),
    );
  }

  /** Mark a query in the figures. */
  select(query) {
    for (const figure of this.figures) figure.select(query);
  }

  get title() {
    const { kind, layer, head } = this.selection;
    const part = (name, value) => (value == null ? null : `${name} ${value + 1}`);
    return [NAMES[kind], part("layer", layer), part("head", head)].filter(Boolean).join(", ");
  }

  /** The heads that are loaded as `{layer, head, weights, entropy}`, in the order of their layers or of their entropy. */
  get heads() {
    const { map, selection } = this;
    const heads = map.weights.flatMap((layer, index) => layer.map((all, head) => {
      const weights = shown(map, selection, all);
      return { layer: map.only ?? index, head, weights, entropy: entropy(weights) };
    }));
    const sign = { focused: 1, spread: -1 }[selection.order];
    // Those that have no weight but that of the first token are last.
    return sign ? heads.sort((a, b) => (a.entropy == null) - (b.entropy == null) || sign * (a.entropy - b.entropy)) : heads;
  }

  overview(numHeads) {
    const { map, selection, heads } = this;
    const buttons = heads.map(({ layer, head, weights, entropy }) => {
      const label = `Layer ${layer + 1}, head ${head + 1}${entropy == null ? "" : `, entropy ${entropy.toFixed(2)} bits`}`;
      return html("button", {
        type: "button", class: "head", "data-layer": layer, "data-head": head, "aria-label": label, title: label,
        "aria-pressed": String(layer === selection.layer && head === selection.head),
        onclick: () => {
          this.change({ layer, head });
          this.element.querySelector(`.head[data-layer="${layer}"][data-head="${head}"]`).focus();
        },
      }, thumbnail(weights, maxima(map, selection, weights)));
    });
    const isSorted = selection.order !== "layer";
    const current = heads.findIndex(({ layer, head }) => layer === (selection.layer ?? 0) && head === (selection.head ?? 0));
    roving(buttons, isSorted ? 0 : numHeads, Math.max(0, current));
    const named = (button, { layer, head }) =>
      html("div", { class: "named-head" }, button, html("span", { class: "layer-name", "aria-hidden": "true" }, `${layer + 1}.${head + 1}`));
    const content = isSorted
      ? buttons.map((button, index) => named(button, heads[index]))
      : map.weights.map((_, row) => layerRow(map.only ?? row, buttons.slice(row * numHeads, (row + 1) * numHeads)));
    const orders = [["layer", "by layer"], ["focused", "most focused first"], ["spread", "most spread out first"]];
    const order = choice("order", "Order", orders, selection.order, (value) => this.set({ order: value }));
    const hint = isSorted ? "labels: layer.head; focused: low entropy of the weights" : "rows: layers, columns: heads";
    return html("section", { class: "figure-card", "aria-label": "All heads" },
      html("header", {}, html("h4", {}, "All heads"), html("p", { class: "hint" }, hint)),
      html("div", { class: "controls" }, order),
      html("div", { class: "scroll" }, html("div", { class: isSorted ? "heads sorted" : "heads" }, content)));
  }

  change(values) {
    Object.assign(this.selection, values);
    if (this.map.only != null && this.selection.layer !== this.map.only) return this.onload(this.selection.layer);
    this.set({});
  }
}
