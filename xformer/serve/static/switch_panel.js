// Parts of the model that are switched off, and what that changes.

import { announce, errorLine } from "./dom.js";
import { SwitchView } from "./switch_view.js";
import { TokenRow } from "./tokens.js";

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
  const attempt = async (place, work) => {
    place.setAttribute("aria-busy", "true");
    try {
      const value = await work();
      if (!signal.aborted) place.replaceChildren(value);
    } catch (error) {
      if (!signal.aborted) place.replaceChildren(errorLine(error));
    }
    if (!signal.aborted) place.removeAttribute("aria-busy");
  };
  await attempt(switchView.prediction, async () => {
    const change = await column.changed({ ablations }, signal);
    if (!signal.aborted) column.shownChange = change;
    return column.changeCard(change, column.token ?? 0, switchView.prediction);
  });
  await attempt(switchView.output, async () => {
    const generated = await column.api.generateWithout(column.model, text, options, { ablations, forced, signal });
    const row = new TokenRow("Output with these parts off");
    row.set(generated.tokens);
    if (!signal.aborted) announce(`Output with these parts off: ${generated.text}`);
    return row.element;
  });
}
