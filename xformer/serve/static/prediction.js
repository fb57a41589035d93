// The probabilities of the next token before and after a change of the model.

import { html, visible } from "./dom.js";
import { barChart } from "./bars.js";
import { figureCard } from "./figure_card.js";

/** The most probable tokens of either, as bars with a mark where they were before. */
export function predictionCard({ before, after, name, width }) {
  const known = new Map([...before.alternatives, before].map((token) => [token.id, token]));
  const shown = new Map([...before.alternatives.slice(0, 5), before, ...after.alternatives.slice(0, 4)].map((token) => [token.id, token]));
  const changed = new Map([...after.alternatives, after].map((token) => [token.id, token]));
  const least = after.alternatives.at(-1).probability;
  const bars = [...shown.values()]
    .map(({ id, text }) => ({
      label: text, value: changed.get(id)?.probability ?? least, isBound: !changed.has(id), before: known.get(id)?.probability, marked: id === before.id,
    }))
    .sort((a, b) => Math.max(b.value, b.before ?? 0) - Math.max(a.value, a.before ?? 0));
  const title = `“${visible(before.text)}” and its alternatives`;
  return figureCard({
    title, name: `${name}-change`, figure: barChart({ bars, title, width }),
    note: html("p", { class: "hint" }, "Bars: probabilities with the change. Vertical lines: without it."),
  });
}
