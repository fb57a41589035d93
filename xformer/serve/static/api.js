// Requests to the server, and its answers in the form that the page draws.

import { pathTo } from "./beam_tree.js";
import { described } from "./model.js";

/** Keep the token of an address such as /#token=..., and take it out of the address. */
export function readToken() {
  const values = new URLSearchParams(location.hash.slice(1));
  if (!values.has("token")) return;
  sessionStorage.setItem("token", values.get("token"));
  values.delete("token");
  history.replaceState(null, "", values.size ? `#${values}` : location.pathname);
}

async function request(path, body = null, signal = null) {
  const headers = {};
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const error = new Error(answer?.error?.message ?? `${path}: status ${response.status}`);
  throw Object.assign(error, { status: response.status });
}

const get = async (path) => (await request(path)).json();
const post = async (path, body, signal) => (await request(path, body, signal)).json();

export async function models() {
  const { data } = await get("v1/models");
  return data.filter(({ task }) => task !== "transcription").map(({ id, num_parameters, defaults, has_log, ...model }) =>
    described({ ...model, name: id, parameters: num_parameters, defaults: defaults ?? {}, hasTraining: has_log }));
}

/** Yield `[name, data]` of each server-sent event of a response. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value.replaceAll("\r", "");
      for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
        const lines = buffer.slice(0, end).split("\n");
        buffer = buffer.slice(end + 2);
        const field = (name) => lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trimStart());
        const data = field("data").join("\n");
        if (data) yield [field("event")[0] ?? "message", JSON.parse(data)];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The fields of a request that have the text: a message for chat models. */
export const inputOf = (text, { prompt }) => (prompt === "chat" ? { messages: [{ role: "user", content: text }] } : { text });

/**
 * Generate from a text, or encode it. The output begins with the tokens of `forced`. The listeners are called while
 * tokens arrive: `onsource(tokens)`, `ontoken(token)`, and `onreplace(tokens)` for the best hypothesis of a beam search.
 */
export async function generate(model, text, options, { signal, forced = [], onsource, ontoken, onreplace }) {
  if (!model.generates) return encode(model, text, signal);
  const input = inputOf(text, options);
  const { prompt, ...settings } = options;
  const body = { model: model.name, ...input, ...settings, num_alternatives: 50, stream: true };
  if (forced.length) body.prefix_ids = forced.map(({ id }) => id);
  const steps = [];
  for await (const [name, data] of events(await request("explore", body, signal))) {
    if (name === "error") throw new Error(data.error.message);
    if (name === "source") onsource(withText(data.source.tokens));
    if (name === "token") ontoken(withText([data])[0]);
    if (name === "step") {
      steps.push(data.candidates);
      const best = data.candidates.filter(({ status }) => status !== "pruned").sort((a, b) => b.score - a.score)[0];
      if (best) onreplace([...forced, ...withText(pathTo(steps, steps.length - 1, best)).filter(({ status }) => status !== "finished")]);
    }
    if (name === "result") {
      const outputs = data.outputs.map((output, index) => ({
        ...output,
        tokens: output.tokens.map((token, position) => forced[position] ?? { ...withText([token])[0], alternatives: withText(token.alternatives) }),
        numForced: output.tokens.filter((token) => !token.alternatives.length).length,
        alignment: index === 0 ? data.alignment : null,
      }));
      return { input, source: withText(data.source.tokens), outputs, beam: data.beam && beamSteps(data.beam), seconds: data.seconds };
    }
  }
  throw new Error("The server ended the stream without a result.");
}

/** Tokens whose text on the page, if they have none (parts of characters, ends), is their name in the vocabulary. */
const withText = (tokens) => tokens.map((token) => ({ ...token, plain: token.text, text: token.text || token.token }));

function beamSteps({ groups, steps }) {
  return steps.map((candidates) =>
    withText(candidates).map(({ status, group, ...candidate }) => ({
      ...candidate, group: groups > 1 ? group : null, kept: status !== "pruned", finished: status === "finished",
    })));
}

async function encode(model, text, signal) {
  const answer = await post("attention", { model: model.name, text }, signal);
  const summary = [], lines = text.split("\n").filter((line) => line.trim());
  if (model.task === "classification") {
    const { data } = await post("classify", { model: model.name, input: text }, signal);
    const bars = Object.entries(data[0].probabilities).sort((a, b) => b[1] - a[1]);
    summary.push({ title: "Classes", bars: bars.map(([label, value]) => ({ label, value, marked: label === data[0].label })) });
  } else if (model.task === "reranking") {
    const [query, ...documents] = lines;
    const { results } = await post("rerank", { model: model.name, query, documents: documents.length ? documents : [query] }, signal);
    const bars = results.map(({ index, relevance_score: value }) => ({ label: documents[index] ?? query, value, marked: false }));
    summary.push({ title: "Relevance of the lines to the first one", bars });
  } else {
    const { data } = await post("v1/embeddings", { model: model.name, input: lines }, signal);
    summary.push({ title: "Similarity of the lines", lines, weights: cosines(data.map(({ embedding }) => embedding)), size: data[0].embedding.length });
  }
  return { input: { text }, source: [], outputs: [{ text, tokens: withText(answer.source.tokens) }], beam: null, summary };
}

function cosines(vectors) {
  const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
  return vectors.map((a) => vectors.map((b) => dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b))));
}

/**
 * Attention of an output by kind: numLayers, weights by layer, head, query and key, and labels of queries and keys.
 *
 * Output token i was predicted by query i + firstQuery and is key i + firstKey; source tokens begin at key firstSource.
 * isCausal: no query sees a later key.
 * If the server has too much to send, the weights are those of one layer, `only`: the given one, or the last.
 */
export async function attention(model, result, index, layer = null) {
  const output = result.outputs[index];
  const body = { model: model.name, ...result.input };
  if (model.generates) body.output_ids = output.tokens.map(({ id }) => id);
  let only = layer;
  const answer = await post("attention", only == null ? body : { ...body, layer: only }).catch((error) => {
    if (error.status !== 400 || only != null) throw error;
    only = model.numLayers - 1;
    return post("attention", { ...body, layer: only });
  });
  const source = withText(answer.source.tokens).map(({ text }) => text);
  const tokens = withText(answer.output?.tokens ?? []).map(({ text }) => text);
  const all = [...source, ...tokens];
  const described = {
    encoder: { queries: source, keys: source, firstQuery: null, firstKey: null, firstSource: 0 },
    decoder: { queries: tokens, keys: [null, ...tokens], firstQuery: 0, firstKey: 1, firstSource: null, isCausal: true },
    cross: { queries: tokens, keys: source, firstQuery: 0, firstKey: null, firstSource: 0 },
    self: { queries: all, keys: all, firstQuery: model.generates ? source.length - 1 : 0, firstKey: model.generates ? source.length : 0, firstSource: 0, isCausal: model.generates },
  };
  const order = ["cross", "decoder", "encoder"].filter((kind) => answer.attention[kind]);
  return Object.fromEntries(order.map((kind) => {
    const name = model.isEncoderDecoder ? kind : "self";
    const { shape, data, queries, keys } = answer.attention[kind];
    const { queries: queryTexts, keys: keyTexts, ...positions } = described[name];
    const named = (labels, texts) => labels.map((label, position) => texts[position] ?? label);
    return [name, { ...positions, only, numLayers: only == null ? shape[0] : model.numLayers, weights: unpack(data, shape), queries: named(queries, queryTexts), keys: named(keys, keyTexts) }];
  }));
}

/**
 * The output with its probabilities after `changes`, `{ablations, attention_rows}` of the request, and with `lens` the
 * layers: `{name, norms, parts, cells}` for each of the `columns`, the tokens from position `first` on.
 */
export async function layers(model, result, index, { lens = false, signal = null, ...changes } = {}) {
  const { tokens } = result.outputs[index];
  const body = { model: model.name, ...result.input, output_ids: tokens.map(({ id }) => id), num_alternatives: 50, lens, ...changes };
  const answer = await post("layers", body, signal);
  const texts = tokens.map(({ text }) => text);
  const columns = model.isEncoderDecoder ? ["start", ...texts.slice(0, -1)] : [...result.source.map(({ text }) => text), ...texts];
  return {
    tokens: answer.output.map((token) => ({ ...withText([token])[0], alternatives: withText(token.alternatives) })),
    first: answer.first,
    columns: columns.slice(answer.first),
    layers: answer.layers.map(({ tokens: predicted, ...layer }) => ({ ...layer, cells: withText(predicted) })),
  };
}

/** Where the pages of the tutorial are; null if they are not installed. */
export const tutorial = (await fetch("pages/tutorial/index.md", { method: "HEAD" })).ok ? "pages/tutorial/" : null;

/** Whether requests may have `attention_rows`. */
export const changesAttention = true;

/** The output that the model generates with some parts switched off; it begins with the tokens of `forced`. */
export async function generateWithout(model, text, options, { ablations, forced, signal }) {
  const { prompt, ...settings } = options;
  const body = { model: model.name, ...inputOf(text, options), ...settings, num_alternatives: 1, ablations, prefix_ids: forced.map(({ id }) => id) };
  const { outputs } = await post("explore", body, signal);
  return { ...outputs[0], tokens: withText(outputs[0].tokens) };
}

/** Nested arrays of base64 float32 values. */
function unpack(data, shape) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const values = new Float32Array(bytes.buffer);
  let position = 0;
  const nest = ([size, ...rest]) => Array.from({ length: size }, () => (rest.length ? nest(rest) : values[position++]));
  return nest(shape);
}

/** The log of the run: columns of its steps, and its validations. */
export const log = (model) => get(`runs/${encodeURIComponent(model.name)}`);
