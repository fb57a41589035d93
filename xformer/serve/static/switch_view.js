// The panel that switches parts of a model off: the switches, and what changes.

import { choice, html } from "./dom.js";
import { isSame, partName, switches } from "./switches.js";

const KINDS = { cross: "Cross-attention", decoder: "Decoder", encoder: "Encoder" };

/**
 * Switches of a model, `{isEncoderDecoder, numLayers, encoderLayers, heads}`.
 *
 * `state` is `{off, kind}`: the parts that are off, and the kind whose switches are shown. `onchange()` is called after
 * `off` has changed. `prediction` and `output` are the places of what a change does.
 */
export class SwitchView {
  constructor({ model, state, onchange }) {
    Object.assign(this, { model, state, onchange });
    [this.prediction, this.output, this.grid] = [html("div"), html("div"), html("div", { class: "scroll" })];
    this.status = html("p", { class: "hint", role: "status" });
    this.restore = html("button", { type: "button", onclick: () => this.set([]) }, "Switch everything on");
    const kinds = choice("switches", "Part", Object.entries(KINDS), state.kind, (value) => ((state.kind = value), this.draw()));
    this.element = html("div", {},
      html("section", { class: "figure-card switch-card", "aria-label": "Switches" },
        html("header", {}, html("h4", {}, "Switches"), html("p", { class: "hint" }, "rows: layers; numbers: heads")),
        html("div", { class: "controls" }, model.isEncoderDecoder ? kinds : null, this.restore), this.grid),
      html("section", { class: "change", "aria-label": "What changes" }, this.status, this.output, this.prediction));
    this.draw();
  }

  set(off) {
    this.state.off = off;
    this.draw();
    this.onchange();
  }

  draw() {
    const { model, state } = this;
    const focused = [...this.grid.querySelectorAll("button")].indexOf(document.activeElement);
    this.grid.replaceChildren(switches({
      kind: state.kind, off: state.off, hasFeedForward: state.kind !== "cross", numHeads: model.heads,
      numLayers: state.kind === "encoder" ? model.encoderLayers : model.numLayers,
      ontoggle: (part) => {
        const others = state.off.filter((other) => !isSame(part, other));
        this.set(others.length < state.off.length ? others : [...others, part]);
      },
    }));
    this.grid.querySelectorAll("button")[focused]?.focus();
    this.restore.hidden = !state.off.length;
    const names = state.off.map((part) => (model.isEncoderDecoder ? `${KINDS[part.kind].toLowerCase()}, ` : "") + partName(part));
    this.status.textContent = state.off.length
      ? `Off: ${names.join("; ")}`
      : "Click a head, “attention” or “feed-forward” to switch it off and see what changes.";
    if (!state.off.length) for (const place of [this.output, this.prediction]) place.replaceChildren();
  }
}
