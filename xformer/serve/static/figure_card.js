// A figure with its title and the buttons that export it.

import { html } from "./dom.js";
import { downloadFigure } from "./export.js";

/** Return a section with a title, controls, a figure that scrolls if it is wide, and export buttons. */
export function figureCard({ title, name, figure, controls = [], note = null }) {
  const file = name.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "");
  const button = (type) =>
    html(
      "button",
      {
        type: "button", class: "quiet", "data-export": type, "aria-label": `Save ${title} as ${type.toUpperCase()}`,
        onclick: () => downloadFigure(figure, file, type),
      },
      type.toUpperCase(),
    );
  return html(
    "section",
    { class: "figure-card", "aria-label": title },
    html("header", {}, html("h4", {}, title), html("span", { class: "exports" }, button("svg"), button("png"))),
    controls.length ? html("div", { class: "controls" }, controls) : null,
    html("div", { class: "scroll" }, figure),
    note,
  );
}
