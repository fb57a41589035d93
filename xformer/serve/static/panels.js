// What the tabs of a column show; the column has the model and its result.

import { checkBox, formatScore, html } from "./dom.js";
import { alternativesCard, barChart } from "./bars.js";
import { beamTree } from "./beam_tree.js";
import { trainingCurves } from "./curves.js";
import { figureCard } from "./figure_card.js";
import { heatMap } from "./heatmap.js";
import { joined } from "./tokens.js";

export function drawTokens(column, show) {
  const token = column.tokens[column.token ?? 0];
  if (!token?.alternatives?.length) return show(html("p", { class: "empty" }, "No probabilities were recorded for this token."));
  const position = column.token ?? 0;
  show(alternativesCard({
    token, state: column.sampling, name: `${column.model.name}-alternatives-${position + 1}`, width: Math.min(620, column.width),
    onselect: (chosen) => column.onforce([...column.tokens.slice(0, position), { ...chosen, alternatives: token.alternatives, isForced: true }]),
  }));
}

export function drawAlignment(column, show) {
  const { alignment } = column.result.outputs[column.output];
  column.figure = heatMap({
    weights: alignment, rows: column.tokens.map(({ text }) => text), columns: column.result.source.map(({ text }) => text),
    title: "Alignment", ringed: true, onhover: (row) => column.select(row, true),
  });
  show(figureCard({
    title: "Alignment", name: `${column.model.name}-alignment`, figure: column.figure,
    note: html("p", { class: "hint" }, "Rows: output. Columns: source. A circle marks the most likely source token."),
  }));
}

export function drawBeam(column, show) {
  const detail = html("p", { class: "path", "aria-live": "polite" }, "Select a candidate to see its hypothesis.");
  const figure = beamTree({
    steps: column.result.beam, output: column.result.outputs[column.output], showPruned: column.showPruned,
    onselect: (path) => {
      const last = path.at(-1);
      detail.replaceChildren(html("strong", {}, joined(path)),
        ` score ${formatScore(last.score)}${last.finished ? ", finished" : last.kept ? ", kept" : ", pruned"}${last.group == null ? "" : `, group ${last.group + 1}`}`);
    },
  });
  const toggle = checkBox("Show pruned candidates", column.showPruned, (checked) => {
    column.showPruned = checked;
    column.drawPanel().then(() => column.panel.querySelector("input[type=checkbox]").focus());
  });
  const legend = html("p", { class: "hint" }, "Numbers: scores. Filled: the output that is shown above. Dashed: pruned. ■: finished.");
  show(figureCard({ title: "Beam search", name: `${column.model.name}-beam`, figure, controls: [toggle], note: html("div", {}, detail, legend) }));
}

export function drawResult(column, show) {
  show(...column.result.summary.map(({ title, bars, lines, weights, size }) => {
    const name = `${column.model.name}-${title}`;
    if (bars) return figureCard({ title, name, figure: barChart({ bars, title, width: Math.min(620, column.width) }) });
    const note = html("p", { class: "hint" }, "The cosine of the vectors of two lines: 1 (the strongest color) if they point in the same direction, 0 if they have nothing in common.");
    if (lines.length > 1) return figureCard({ title, name, figure: heatMap({ weights, rows: lines, columns: lines, title, letters: 28 }), note });
    return html("p", {}, `The vector of the text has ${size} numbers. Enter several lines to compare them.`);
  }));
}

export async function drawTraining(column, show) {
  const log = await column.api.log(column.model);
  show(html("div", { class: "charts" }, trainingCurves(log, column.model.name, column.width)));
}
