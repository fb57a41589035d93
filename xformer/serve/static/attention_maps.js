// Attention weights as data: rows of one head or of the mean of several, shading, and how focused a head is.
//
// A map is `{weights, queries, keys, isCausal, only}`, the weights by layer, head, query and key. A selection has `layer`
// and `head` (null: the mean), `leaveOutFirst` and `scaleRows` (true, false, or null: as it suits the map).

/** Heads that a selection of layer and head names. */
function headsOf(map, { layer, head }) {
  const layers = layer == null || map.only != null ? map.weights : [map.weights[layer]];
  return layers.flatMap((heads) => (head == null ? heads : [heads[head]]));
}

/** Whether the first token is left out: many heads of language models give it the weight that they do not need. */
export function leavesOutFirst(map, { leaveOutFirst }) {
  return Boolean(map.isCausal) && (leaveOutFirst ?? firstShare(map) > 0.4);
}

export const scalesRows = (map, selection) => selection.scaleRows ?? leavesOutFirst(map, selection);

/** Mean weight of the first key, for queries that see at least four keys. */
function firstShare(map) {
  const rows = headsOf(map, {}).flatMap((head) => head.slice(3));
  return (map.firstShare ??= rows.reduce((sum, row) => sum + row[0], 0) / (rows.length || 1));
}

const withoutFirst = (row) => row.map((weight, key) => (key ? weight : 0));

/** Weights of the keys for one query: of the selected head, or the mean of heads. */
export function rowOf(map, selection, query) {
  const heads = headsOf(map, selection);
  const row = map.keys.map((_, key) => heads.reduce((sum, head) => sum + head[query][key], 0) / heads.length);
  return leavesOutFirst(map, selection) ? withoutFirst(row) : row;
}

/** Weights of one head as they are shown. */
export const shown = (map, selection, head) => (leavesOutFirst(map, selection) ? head.map(withoutFirst) : head);

/** Weight with full shading in each row; weak attention, such as the mean of many heads, is not exaggerated. */
export function maxima(map, selection, weights) {
  const largest = weights.map((row) => row.reduce((a, b) => Math.max(a, b), 0));
  if (scalesRows(map, selection)) return largest.map((value) => Math.max(value, 0.02));
  const most = largest.reduce((a, b) => Math.max(a, b), 0.2);
  return largest.map(() => most);
}

/** Mean entropy of the rows of a head in bits: 0 if each query attends to one key only; null without any weights. */
export function entropy(rows) {
  const values = rows.flatMap((row) => {
    const sum = row.reduce((a, b) => a + b, 0);
    return sum < 0.02 ? [] : [row.reduce((total, x) => total - (x > 0 ? (x / sum) * Math.log2(x / sum) : 0), 0)];
  });
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}
