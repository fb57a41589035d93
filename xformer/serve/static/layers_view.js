// The layers of a model for one output: the logit lens, and the way of one token.

import { html, visible } from "./dom.js";
import { figureCard } from "./figure_card.js";
import { flowChart } from "./flow.js";
import { lensTable } from "./lens.js";

/**
 * Figures of `layers` (see `lensTable`, `flowChart`), which have `norms`, `parts` and `cells` by position.
 *
 * `columns` are the tokens at the positions; `onselect(column)` is called for the position under the pointer.
 */
export class LayersView {
  constructor({ layers, columns, name, width, onselect }) {
    Object.assign(this, { layers, columns, name, width });
    this.lens = lensTable({ layers, columns, title: "What each layer would predict", onselect });
    this.flow = html("div", { class: "flow-slot" });
    const hint = "Rows: layers. Columns: the tokens so far. Each cell shows the most probable next token if the model ended after this layer (logit lens); a stronger color means a higher probability.";
    this.element = html("div", {},
      figureCard({ title: "What each layer would predict", name: `${name}-lens`, figure: this.lens, note: html("p", { class: "hint" }, hint) }),
      this.flow);
  }

  /** Show the way of the token at a position. */
  select(column) {
    this.lens.select(column);
    if (column === this.column) return;
    this.column = column;
    if (this.columns[column] == null) return this.flow.replaceChildren(html("p", { class: "hint" }, `Only the last ${this.columns.length} tokens are shown.`));
    const layers = this.layers.map(({ name, norms, parts, cells }) => ({
      name, norm: norms[column], ...cells[column],
      parts: Object.entries(parts).map(([part, values]) => ({ name: part, norm: values[column] })),
    }));
    const title = `“${visible(this.columns[column])}” through the layers`;
    const figure = flowChart({ layers, title, width: Math.min(560, this.width) });
    const parts = Object.keys(this.layers.at(-1).parts);
    const note = html("div", {},
      html("p", { class: "legend" }, parts.map((part, index) => html("span", { class: `key part-key-${index}` }, part))),
      html("p", { class: "hint" }, "From bottom to top, for each layer: the length of the token's vector, the lengths of the vectors that the parts add to it, and the most probable next token."));
    this.flow.replaceChildren(figureCard({ title, name: `${this.name}-way`, figure, note }));
  }
}
