// Parts of the model that are switched off: heads, attention and feed-forward networks, and what that changes.

import { announce, choice, html, layerRow, roving } from "./dom.js";
import { TokenRow } from "./tokens.js";

const KINDS = { cross: "Cross-attention", decoder: "Decoder", encoder: "Encoder" };

/** The name of a part, for people. */
export function partName({ layer, part, head }) {
  const names = { attention: "attention", feed_forward: "feed-forward" };
  return `layer ${layer + 1}, ${head == null ? names[part] : `head ${head + 1}`}`;
}

const isSame = (a, b) => a.kind === b.kind && a.layer === b.layer && a.part === b.part && (a.head ?? null) === (b.head ?? null);

/**
 * A button for each head, and for the whole attention and the feed-forward network, of each layer.
 *
 * `off` are the parts that are switched off, `{kind, layer, part, head}`; `ontoggle(part)` is called for a click.
 */
function switches({ kind, numLayers, numHeads, hasFeedForward, off, ontoggle }) {
  const columns = numHeads + 1 + Number(hasFeedForward);
  const buttons = Array.from({ length: numLayers }, (_, layer) => [
    ...Array.from({ length: numHeads }, (_, head) => ({ kind, layer, part: "attention", head })),
    { kind, layer, part: "attention", head: null },
    ...(hasFeedForward ? [{ kind, layer, part: "feed_forward", head: null }] : []),
  ]).flat().map((part) => {
    const isOff = off.some((other) => isSame(part, other));
    const text = part.head == null ? (part.part === "attention" ? "attention" : "feed-forward") : String(part.head + 1);
    const label = `Switch ${isOff ? "on" : "off"}: ${partName(part)}`;
    return html("button", {
      type: "button", class: part.head == null ? "switch wide" : "switch", "aria-pressed": String(isOff), "aria-label": label, title: label,
      onclick: () => ontoggle(part),
    }, text);
  });
  roving(buttons, columns);
  const rows = Array.from({ length: numLayers }, (_, layer) =>
    layerRow(layer, buttons.slice(layer * columns, (layer + 1) * columns)));
  return html("div", { class: "heads switches", role: "group", "aria-label": "Parts of the model" }, rows);
}

/**
 * Switches of a model, `{isEncoderDecoder, numLayers, encoderLayers, heads}`.
 *
 * `state` is `{off, kind}`: the parts that are off, and the kind whose switches are shown. `onchange()` is called after
 * `off` has changed. `prediction` and `output` are the places of what a change does.
 */
class SwitchView {
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

export function drawSwitches(column, show) {
  column.switchView = new SwitchView({ model: column.model, state: column.switches, onchange: () => switched(column) });
  show(column.switchView.element);
  switched(column);
}

/** Show what the parts that are off change: the probabilities of the selected token, and the output. */
async function switched(column) {
  const { switchView, switches, request: [text, options, forced] } = column;
  const ablations = switches.off;
  column.shownChange = null;
  const signal = column.beginChange();
  if (!ablations.length) return;
  await column.showChange(switchView.prediction, signal, async () => {
    const change = await column.changed({ ablations }, signal);
    if (!signal.aborted) column.shownChange = change;
    return column.changeCard(change, column.token ?? 0, switchView.prediction);
  });
  await column.showChange(switchView.output, signal, async () => {
    const generated = await column.api.generateWithout(column.model, text, options, { ablations, forced, signal });
    const row = new TokenRow("Output with these parts off");
    row.set(generated.tokens);
    if (!signal.aborted) announce(`Output with these parts off: ${generated.text}`);
    return row.element;
  });
}
