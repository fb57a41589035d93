// Training curves.

import { announce, drawing, format, html, pointerIn, svg } from "./dom.js";
import { figureCard } from "./figure_card.js";

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [230, 52, 12, 12, 30];
const [WIDTH, GAP] = [380, 32]; // the least width of a chart, and the space between two, as in the style sheet

/** Round numbers that divide an interval into about `count` parts. */
function ticks(low, high, count = 5) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].findLast((factor) => factor * power <= 1.4 * raw);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, index) => (first + index) * step);
}

/** Mean of each point and its neighbors, a 25th of all points, so that a long curve of noisy losses can be read. */
export function smooth(points) {
  const reach = Math.floor(points.length / 50);
  return points.map(([x], index) => {
    const near = Math.min(reach, index, points.length - 1 - index);  // as many before as after, so that nothing lags
    const window = points.slice(index - near, index + near + 1);
    return [x, window.reduce((sum, [, y]) => sum + y, 0) / window.length];
  });
}

/** A chart of lines `{name, points: [[x, y], ...], faint}` with a cursor that the pointer and arrow keys move. */
function lineChart({ lines, title, xLabel, width }) {
  const points = lines.flatMap((line) => line.points);
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const range = (values) => [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const [x0, x1] = range(xs);
  let [y0, y1] = range(ys);
  const margin = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
  [y0, y1] = [y0 >= 0 ? Math.max(0, y0 - margin) : y0 - margin, y1 + margin];
  const x = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const path = (line) => line.points.map(([a, b], index) => `${index ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const cursor = svg("line", { class: "cursor-line", y1: TOP, y2: HEIGHT - BOTTOM, display: "none" });
  const readout = svg("text", { class: "caption", x: width - RIGHT, y: TOP + 10, "text-anchor": "end" });
  const figure = drawing("chart", width, HEIGHT,
    {
      width: null, height: null, tabindex: 0, role: "application",
      "aria-roledescription": "line chart", "aria-label": `${title} by ${xLabel}. Arrow keys read the values.`,
    },
    ticks(y0, y1, 4).map((value) => [
      svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "label", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, axisText(value)),
    ]).flat(),
    ticks(x0, x1).map((value) =>
      svg("text", { class: "label", x: x(value), y: HEIGHT - 10, "text-anchor": "middle" }, axisText(value)),
    ),
    svg("text", { class: "label", x: LEFT - 18, y: HEIGHT - 10, "text-anchor": "end" }, xLabel),
    lines.map((line, index) =>
      svg("path", { class: `line line-${line.color ?? index}${line.faint ? " faint" : ""}`, d: path(line) }),
    ),
    // A single measurement has no line.
    lines.flatMap((line, index) =>
      line.dots || line.points.length === 1
        ? line.points.map(([a, b]) => svg("circle", { class: `dot line-${line.color ?? index}`, cx: x(a), cy: y(b), r: 3 }))
        : [],
    ),
    cursor,
    readout,
  );
  const read = [...new Set(xs)].sort((a, b) => a - b);
  let index = read.length - 1;
  const show = (value) => {
    const values = lines
      .filter((line) => !line.faint)
      .map((line) => {
        const nearest = line.points.reduce((best, point) => (Math.abs(point[0] - value) < Math.abs(best[0] - value) ? point : best));
        return `${line.name} ${format(nearest[1])}`;
      });
    cursor.setAttribute("x1", x(value));
    cursor.setAttribute("x2", x(value));
    cursor.removeAttribute("display");
    readout.textContent = `${xLabel} ${format(value)}: ${values.join(", ")}`;
    return readout.textContent;
  };
  const hide = () => {
    cursor.setAttribute("display", "none");
    readout.textContent = "";
  };
  figure.addEventListener("pointermove", (event) => {
    const value = x0 + ((pointerIn(figure, width, event)[1] - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
    show(read.reduce((best, candidate) => (Math.abs(candidate - value) < Math.abs(best - value) ? candidate : best)));
  });
  figure.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!step) return;
    event.preventDefault();
    index = Math.max(0, Math.min(read.length - 1, index + step));
    announce(show(read[index]));
  });
  return figure;
}

function axisText(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return `${format(value / 1000, 0)}k`;
  if (size && size < 0.001) return value.toExponential(0).replace("-", "−");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** Cards with the curves of a run, given its log: columns of steps, and rows of validations. */
export function trainingCurves({ steps, validations, metric, label_smoothing }, name, available) {
  const columns = Math.max(1, Math.floor((available + GAP) / (WIDTH + GAP)));
  const width = (available - GAP * (columns - 1)) / columns;
  const measured = (points) => points.filter(([, value]) => Number.isFinite(value));
  const select = (field) => measured((steps[field] ?? []).map((value, index) => [steps.step[index], value]));
  const validated = (field) => measured(validations.map((row) => [row.step, row[field]]));
  const loss = select("loss");
  const training = label_smoothing ? "training (with label smoothing)" : "training";
  const score = metric ?? "Score";
  const charts = [
    {
      title: "Loss",
      lines: [
        { name: "each step", points: loss, faint: true, color: 0 },
        { name: training, points: smooth(loss), color: 0 },
        { name: "validation", points: validated("loss"), color: 1, dots: true },
      ],
    },
    { title: score, lines: [{ name: score, points: validated("score"), color: 1, dots: true }] },
    { title: "Learning rate", lines: [{ name: "learning rate", points: select("learning_rate"), color: 0 }] },
    { title: "Gradient norm", lines: [{ name: "gradient norm", points: select("grad_norm"), color: 0 }] },
    { title: "Tokens per second", lines: [{ name: "tokens per second", points: select("tokens_per_second"), color: 0 }] },
  ];
  return charts
    .map(({ title, lines }) => ({ title, lines: lines.filter((line) => line.points.length) }))
    .filter(({ lines }) => lines.length)
    .map(({ title, lines }) => {
      const legend = lines.filter((line) => !line.faint);
      const note = legend.length > 1
        ? html("p", { class: "legend" }, legend.map((line) => html("span", { class: `key key-${line.color}` }, line.name)))
        : null;
      return figureCard({ title, name: `${name}-${title}`, figure: lineChart({ lines, title, xLabel: "step", width }), note });
    });
}
