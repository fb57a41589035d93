// Attention by layer and head: one heat map, and all heads as small multiples.

import { html, roving } from "./dom.js";
import { figureCard } from "./figure_card.js";
import { heatMap, thumbnail } from "./heatmap.js";

const NAMES = { cross: "Cross-attention", decoder: "Self-attention of the decoder", encoder: "Self-attention of the encoder", self: "Self-attention" };

/**
 * Selectors and figures. `maps` is an object by kind of `{weights, queries, keys}`, the weights by layer, head, query
 * and key. `selection` has `kind`, `layer` and `head`, null for the mean; `onchange` is called when it changes, and
 * `onload(layer)` for a layer that `maps` does not have.
 */
export class AttentionView {
  constructor({ maps, selection, name, onhover, onchange, onload }) {
    Object.assign(this, { maps, selection, name, onhover, onchange, onload });
    this.element = html("div");
    if (!maps[selection.kind]) selection.kind = Object.keys(maps)[0];
    this.draw();
  }

  get map() {
    return this.maps[this.selection.kind];
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
    const choose = (field, label, options) =>
      html("label", {}, label,
        html("select", {
          "data-field": field,
          onchange: (event) => this.change({ [field]: event.target.value === "" ? null : field === "kind" ? event.target.value : Number(event.target.value) }),
        }, options.map(([value, text]) => html("option", { value: value ?? "", selected: value === selection[field] }, text))));
    const numbered = (count) => [[null, "mean"], ...Array.from({ length: count }, (_, index) => [index, String(index + 1)])];
    const controls = [
      Object.keys(this.maps).length < 2 ? null : choose("kind", "Attention", Object.keys(this.maps).map((kind) => [kind, NAMES[kind] ?? kind])),
      choose("layer", "Layer", numbered(map.numLayers).slice(map.only == null ? 0 : 1)),
      choose("head", "Head", numbered(numHeads)),
    ];
    const weights = this.weights;
    this.figure = heatMap({
      weights, rows: map.queries, columns: map.keys, title: this.title, onhover: this.onhover,
      maximum: largest(weights),
    });
    this.element.replaceChildren(
      figureCard({ title: this.title, name: `${this.name}-${this.title}`, figure: this.figure, controls }),
      this.overview(numHeads),
    );
  }

  get title() {
    const { kind, layer, head } = this.selection;
    const part = (name, value) => (value == null ? null : `${name} ${value + 1}`);
    return [NAMES[kind], part("layer", layer), part("head", head)].filter(Boolean).join(", ");
  }

  /** Pairs of a layer and its heads. */
  get layers() {
    return this.map.weights.map((heads, index) => [this.map.only ?? index, heads]);
  }

  overview(numHeads) {
    const buttons = this.layers.flatMap(([layer, heads]) =>
      heads.map((weights, head) =>
        html("button", {
          type: "button", class: "head", "data-layer": layer, "data-head": head,
          "aria-label": `Layer ${layer + 1}, head ${head + 1}`, title: `Layer ${layer + 1}, head ${head + 1}`,
          "aria-pressed": String(layer === this.selection.layer && head === this.selection.head),
          onclick: () => {
            this.change({ layer, head });
            this.element.querySelector(`.head[data-layer="${layer}"][data-head="${head}"]`).focus();
          },
        }, thumbnail(weights, largest(weights)))));
    const row = Math.max(0, this.layers.findIndex(([layer]) => layer === this.selection.layer));
    const current = row * numHeads + (this.selection.head ?? 0);
    roving(buttons, numHeads, current);
    const rows = this.layers.map(([layer], row) =>
      html("div", { class: "layer" }, html("span", { class: "layer-name", "aria-hidden": "true" }, String(layer + 1)), buttons.slice(row * numHeads, (row + 1) * numHeads)));
    return html("section", { class: "figure-card", "aria-label": "All heads" },
      html("header", {}, html("h4", {}, "All heads"), html("p", { class: "hint" }, "rows: layers, columns: heads")),
      html("div", { class: "scroll" }, html("div", { class: "heads" }, rows)));
  }

  change(values) {
    Object.assign(this.selection, values);
    if (this.map.only != null && this.selection.layer !== this.map.only) return this.onload(this.selection.layer);
    const field = document.activeElement?.dataset?.field;
    this.draw();
    if (field) this.element.querySelector(`[data-field=${field}]`).focus();
    this.onchange();
  }
}

/** Weight with full shading: weak attention, such as the mean of many heads, is not exaggerated. */
const largest = (weights) => weights.reduce((most, row) => row.reduce((a, b) => Math.max(a, b), most), 0.2);

/** Heads that a selection of layer and head (null: all) names. */
function headsOf(map, { layer, head }) {
  const layers = layer == null || map.only != null ? map.weights : [map.weights[layer]];
  return layers.flatMap((heads) => (head == null ? heads : [heads[head]]));
}

/** Weights of the keys for one query: of the selected head, or the mean of heads. */
export function rowOf(map, selection, query) {
  const heads = headsOf(map, selection);
  return map.keys.map((_, key) => heads.reduce((sum, head) => sum + head[query][key], 0) / heads.length);
}
