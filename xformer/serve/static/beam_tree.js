// Beam search as a tree: one column per step, the path of the output in the first row.

import { drawing, formatScore, roving, shorten, svg, visible } from "./dom.js";

const [WIDTH, HEIGHT, COLUMN, ROW, TOP] = [92, 36, 120, 46, 30];

/** The candidates from the root to one of a step, by their `parent`. */
export function pathTo(steps, step, candidate) {
  const path = [];
  for (let current = candidate; current; current = steps[step - path.length]?.[current.parent]) path.unshift(current);
  return path;
}

/**
 * The candidates of an output, from the first step to the last: those with all its ids and its log-probability.
 *
 * The first `numForced` tokens of the output are before the first step.
 */
export function pathOf(steps, { tokens, log_probability, numForced }) {
  const ids = tokens.slice(numForced).map(({ id }) => id);
  const paths = steps.flatMap((candidates, step) => candidates
    .filter(({ kept, finished }) => kept && step + 1 === ids.length + finished)
    .map((candidate) => pathTo(steps, step, candidate)));
  const difference = (path) => Math.abs(path.at(-1).log_probability - log_probability);
  const matches = paths.filter((path) => ids.every((id, index) => path[index].id === id) && difference(path) < 1e-3);
  return matches.sort((a, b) => difference(a) - difference(b))[0] ?? [];
}

/**
 * Draw the candidates of each step, and mark those of an output.
 *
 * A candidate has `id`, `text`, `parent` (its index in the step before, null for the root), `log_probability`, `score`,
 * `kept`, `finished` and `group`. `onselect(path)` is called with the candidates from the root to the one in focus.
 */
export function beamTree({ steps, output, showPruned, onselect }) {
  const placed = [];
  const best = new Set(pathOf(steps, output));
  for (const [index, step] of steps.entries()) {
    const parents = placed[index - 1];
    const parentOf = (candidate) => (candidate.parent == null ? null : parents?.get(candidate.parent));
    const order = (candidate) => [
      candidate.kept ? 0 : 1, candidate.best ? 0 : 1, parentOf(candidate)?.row ?? 0, -candidate.score,
    ];
    const nodes = step
      .map((candidate, position) => ({ ...candidate, position, step: index, parentNode: parentOf(candidate), best: best.has(candidate) }))
      .filter((candidate) => candidate.kept || showPruned)
      .sort((a, b) => compare(order(a), order(b)));
    placed.push(new Map(nodes.map((node, row) => [node.position, Object.assign(node, { row })])));
  }
  const nodes = placed.flatMap((column) => [...column.values()]);
  const rows = Math.max(1, ...placed.map((column) => column.size));
  const [width, height] = [steps.length * COLUMN + 8, TOP + rows * ROW];
  const x = (node) => node.step * COLUMN + 8;
  const y = (node) => TOP + node.row * ROW;

  const edges = nodes
    .filter((node) => node.parentNode)
    .map((node) => {
      const [x0, y0] = [x(node.parentNode) + WIDTH, y(node.parentNode) + HEIGHT / 2];
      const [x1, y1] = [x(node), y(node) + HEIGHT / 2];
      const middle = (x0 + x1) / 2;
      node.edge = svg("path", { class: `edge ${kind(node)}`, d: `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}` });
      return node.edge;
    });
  const boxes = nodes.map((node) => {
    const score = formatScore(node.score);
    const state = node.finished ? ", finished" : node.kept ? "" : ", pruned";
    node.box = svg("g", {
      class: `node ${kind(node)}`, transform: `translate(${x(node)} ${y(node)})`, role: "img",
      "aria-label": `Step ${node.step + 1}: ${visible(node.text)}, score ${score}${state}`,
    },
      svg("rect", { width: WIDTH, height: HEIGHT, rx: 8 }),
      svg("text", { class: "token-text", x: WIDTH / 2, y: 15, "text-anchor": "middle" }, shorten(visible(node.text), 11)),
      svg("text", { class: "score", x: WIDTH / 2, y: 29, "text-anchor": "middle" }, node.finished ? `${score} ■` : score));
    return node.box;
  });
  const select = (node) => {
    const path = [];
    for (let current = node; current; current = current.parentNode) path.unshift(current);
    for (const other of nodes) {
      const selected = path.includes(other);
      other.box.classList.toggle("selected", selected);
      other.edge?.classList.toggle("selected", selected);
    }
    onselect(path);
  };
  for (const node of nodes) for (const name of ["pointerenter", "focus"]) node.box.addEventListener(name, () => select(node));
  roving(boxes);
  const pruned = steps.flat().filter((candidate) => !candidate.kept).length;
  const label = `Beam search: ${steps.length} steps, ${pruned} pruned candidates. Arrow keys move between candidates.`;
  const titles = steps.map((_, step) => svg("text", { class: "label", x: step * COLUMN + 8, y: 14 }, `Step ${step + 1}`));
  return drawing("beam-tree", width, height, { role: "group", "aria-label": label }, titles, edges, boxes);
}

function kind(node) {
  return [node.kept ? "kept" : "pruned", node.best && "best", node.finished && "finished"].filter(Boolean).join(" ");
}

function compare(a, b) {
  const index = a.findIndex((value, position) => value !== b[position]);
  return index < 0 ? 0 : a[index] - b[index];
}
