// Bars of probabilities: alternatives to a token, and what a change of the model does to them.

import { drawing, html, percent, roving, shorten, svg, visible } from "./dom.js";
import { figureCard } from "./figure_card.js";

/**
 * Probabilities of tokens at a temperature.
 *
 * At 1 they are those that the model computed. Otherwise they are those of sampling among `alternatives` (top-k), all of
 * which have a `log_probability`.
 */
export function tempered(tokens, alternatives, temperature) {
  if (temperature === 1) return tokens.map(({ probability }) => probability);
  const highest = Math.max(...alternatives.map((each) => each.log_probability));
  const weight = (token) => Math.exp((token.log_probability - highest) / temperature);
  const ids = new Set(alternatives.map(({ id }) => id));
  const sum = alternatives.reduce((total, token) => total + weight(token), 0);
  return tokens.map((token) => (ids.has(token.id) ? weight(token) / sum : 0));
}

/**
 * Horizontal bars `{label, value, marked, before}` of values from 0 to 1; the method `update(values)` of the figure moves them.
 *
 * A line marks the value `before`, if there is one; a value that `isBound` is at most as large. With `onselect(index)` bars are buttons, which do `action`.
 */
export function barChart({ bars, title, width = 620, onselect = null, action = "" }) {
  const [row, right] = [30, 72];
  const left = 20 + 8 * Math.max(...bars.map(({ label }) => Math.min(15, visible(label).length)));
  const height = bars.length * row + 4;
  const scale = width - left - right;
  const rows = bars.map(({ label, marked, before, isBound }, index) => {
    const bar = svg("rect", { class: marked ? "bar marked" : "bar", x: left, y: 5, height: 18, rx: 4 });
    const text = svg("text", { class: "value", x: width - 4, y: 19, "text-anchor": "end" });
    const element = svg("g", {
      role: onselect ? "button" : "listitem", class: onselect ? "bar-row selectable" : "bar-row", transform: `translate(0 ${index * row + 2})`,
      onclick: () => onselect?.(index),
      onkeydown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), onselect?.(index)),
    },
      svg("rect", { class: "hover", x: 0, y: -1, width, height: row, rx: 6 }),
      svg("text", { class: marked ? "label marked" : "label", x: left - 12, y: 19, "text-anchor": "end" }, shorten(visible(label), 15)),
      svg("rect", { class: "track", x: left, y: 5, width: scale, height: 18, rx: 4 }),
      bar,
      before == null ? null : svg("rect", { class: "before", x: left + before * scale - 1, y: 2, width: 2.5, height: 24 }),
      " ", text); // screen readers and voice control compare the text with the name
    const shown = (value) => (isBound ? `< ${percent(value).replace("< ", "")}` : percent(value));
    const update = (value) => {
      bar.setAttribute("width", Math.max(2, value * scale));
      text.textContent = shown(value);
      element.setAttribute("aria-label", `${visible(label)} ${shown(value)}${before == null ? "" : `, before ${percent(before)}`}${marked ? ", chosen" : ""}${onselect ? `. ${action}` : ""}`);
    };
    return { element, update };
  });
  const elements = rows.map(({ element }) => element);
  const figure = drawing("bars", width, height, { role: onselect ? "group" : "list", "aria-label": title }, elements);
  if (onselect) roving(elements);
  figure.update = (values) => rows.forEach(({ update }, index) => update(values[index]));
  figure.update(bars.map(({ value }) => value));
  return figure;
}

/**
 * Bars of the most probable `alternatives` of a token, which a slider shows at another temperature.
 *
 * `state` has the `temperature`, which it keeps. `onselect(alternative)` is called for the one that is clicked.
 */
export function alternativesCard({ token, state, name, width, onselect }) {
  const { alternatives } = token;
  const title = `Alternatives to “${visible(token.text)}”`;
  const shown = alternatives.slice(0, 10);
  if (!shown.some(({ id }) => id === token.id)) shown.push(token);
  const figure = barChart({
    bars: shown.map(({ id, text }) => ({ label: text, value: 0, marked: id === token.id })), title, width,
    action: "Continue the output with this token", onselect: (index) => onselect(shown[index]),
  });
  const covered = alternatives.reduce((sum, { probability }) => sum + probability, 0);
  const [value, note] = [html("output"), html("p", { class: "hint" })];
  const update = () => {
    figure.update(tempered(shown, alternatives, state.temperature));
    value.textContent = state.temperature.toFixed(2);
    note.textContent = state.temperature === 1
      ? "Click another token to continue the output with it."
      : `Computed from the ${alternatives.length} most probable tokens only; at temperature 1 they have ${percent(covered)} of the probability.`;
  };
  const slider = html("input", {
    type: "range", min: 0.1, max: 3, step: 0.05, value: state.temperature,
    oninput: () => {
      state.temperature = Number(slider.value);
      update();
    },
  });
  update();
  return figureCard({ title, name, figure, controls: [html("label", {}, "Temperature", slider, value)], note });
}

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
