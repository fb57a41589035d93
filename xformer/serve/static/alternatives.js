// The alternatives to a token, at a temperature.

import { html, percent, visible } from "./dom.js";
import { barChart, tempered } from "./bars.js";
import { figureCard } from "./figure_card.js";

const SHOWN = 10;

/**
 * Bars of the most probable `alternatives` of a token, which a slider shows at another temperature.
 *
 * `state` has the `temperature`, which it keeps. `onselect(alternative)` is called for the one that is clicked.
 */
export function alternativesCard({ token, state, name, width, onselect }) {
  const { alternatives } = token;
  const title = `Alternatives to “${visible(token.text)}”`;
  const shown = alternatives.slice(0, SHOWN);
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
