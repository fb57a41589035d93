// Figures with titles and the buttons that export them as files.

import { html, svg } from "./dom.js";

/** Keep the labels of rows in sight while the figure moves below them. */
function keepLabels({ target }) {
  target.classList.toggle("scrolled", target.scrollLeft > 0);
  const labels = target.querySelector(".row-labels");
  if (labels) labels.style.transform = `translate(${target.scrollLeft}px)`;
}

/** Return a section with a title, controls, a figure that scrolls if it is wide, and export buttons. */
export function figureCard({ title, name, figure, controls = [], note = null }) {
  const file = name.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").replaceAll(/^-|-$/g, "");
  const button = (type) =>
    html("button", {
      type: "button", class: "quiet", "data-export": type, "aria-label": `Save ${title} as ${type.toUpperCase()}`,
      onclick: () => downloadFigure(figure, file, type),
    }, type.toUpperCase());
  return html("section", { class: "figure-card", "aria-label": title },
    html("header", {}, html("h4", {}, title), html("span", { class: "exports" }, button("svg"), button("png"))),
    controls.length ? html("div", { class: "controls" }, controls) : null,
    html("div", { class: "scroll", onscroll: keepLabels }, figure),
    note);
}

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin",
  "stroke-linecap", "opacity", "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "display",
];

/** Return a figure as the text of an SVG file that looks as it does on the page, without its style sheet. */
function standaloneSvg(figure) {
  const copy = figure.cloneNode(true);
  const originals = [figure, ...figure.querySelectorAll("*")];
  const copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((original, index) => {
    const style = getComputedStyle(original);
    for (const name of STYLES) copies[index].setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "style", "tabindex", "role"]) copies[index].removeAttribute(name);
  });
  for (const element of copy.querySelectorAll("[display=none]")) element.remove();
  const [, , width, height] = figure.getAttribute("viewBox").split(" ");
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const { backgroundColor } = getComputedStyle(figure.closest(".column"));
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill: backgroundColor }));
  return new XMLSerializer().serializeToString(copy);
}

/** Draw a figure at twice its size; returns a PNG as a Blob. */
async function png(figure, scale = 2) {
  const url = URL.createObjectURL(new Blob([standaloneSvg(figure)], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = document.createElement("canvas");
    // Browsers limit the size of a canvas.
    const size = Math.min(scale, 8192 / Math.max(image.width, image.height));
    canvas.width = Math.ceil(image.width * size);
    canvas.height = Math.ceil(image.height * size);
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** Download a Blob or text as a file. */
export function download(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function downloadFigure(figure, name, type) {
  if (type === "svg") download(`${name}.svg`, standaloneSvg(figure), "image/svg+xml");
  else download(`${name}.png`, await png(figure));
}
