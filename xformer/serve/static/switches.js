// Switches of the heads, the attention and the feed-forward network of each layer.

import { html, roving } from "./dom.js";

/** The name of a part, for people. */
export function partName({ layer, part, head }) {
  const names = { attention: "attention", feed_forward: "feed-forward" };
  return `layer ${layer + 1}, ${head == null ? names[part] : `head ${head + 1}`}`;
}

export const isSame = (a, b) => a.kind === b.kind && a.layer === b.layer && a.part === b.part && (a.head ?? null) === (b.head ?? null);

/**
 * A button for each head, and for the whole attention and the feed-forward network, of each layer.
 *
 * `off` are the parts that are switched off, `{kind, layer, part, head}`; `ontoggle(part)` is called for a click.
 */
export function switches({ kind, numLayers, numHeads, hasFeedForward, off, ontoggle }) {
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
    html("div", { class: "layer" }, html("span", { class: "layer-name", "aria-hidden": "true" }, String(layer + 1)), buttons.slice(layer * columns, (layer + 1) * columns)));
  return html("div", { class: "heads switches", role: "group", "aria-label": "Parts of the model" }, rows);
}
