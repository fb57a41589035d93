// Models in the browser, computed by onnxruntime; the functions are those that the explorer calls on a server.

import * as ort from "../runtime/onnxruntime.js";
import { Tokenizer } from "../runtime/tokenizers.js";
import { described } from "./model.js";

const LARGEST_MAPS = 2 ** 21; // attention weights that are shown at once, else one layer at a time
const NUM_ALTERNATIVES = 50;
const MAX_POSITIONS = 32; // of the logit lens

ort.env.wasm.numThreads = 1; // threads need headers that static hosts do not send
let settings, encoder, step, source, target, unknown;

const range = (count) => Array.from({ length: count }, (_, index) => index);
const ids = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
const empty = (...dims) => new ort.Tensor("float32", [], dims);
const run = (session, arrays) => session.run(Object.fromEntries(session.inputNames.map((name) => [name, arrays[name]])));
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function read(name) {
  const response = await fetch(`model/${name}`);
  if (!response.ok) throw new Error(`model/${name}: status ${response.status}`);
  return response;
}

/** Download the ONNX files, which are most of the page, and show how far it is. */
async function load(name, progress) {
  const bytes = new Uint8Array(settings.files[name]);
  const reader = (await read(name)).body.getReader();
  for (let position = 0; ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    bytes.set(value, position);
    position += value.length;
    progress(value.length);
  }
  return ort.InferenceSession.create(bytes);
}

/** Load the model; the list has one entry. */
export async function models() {
  const status = document.getElementById("output");
  const total = () => Object.values(settings.files).reduce((sum, size) => sum + size, 0);
  let loaded = 0;
  const progress = (size) => {
    loaded += size;
    status.textContent = `Loading the model: ${(loaded / 1e6).toFixed(0)} of ${(total() / 1e6).toFixed(0)} MB`;
  };
  settings = await (await read("settings.json")).json();
  const files = await Promise.all(["source.json", "target.json"].map(async (name) => (await read(name)).json()));
  [source, target] = files.map((file) => new Tokenizer(file, {}));
  unknown = source.token_to_id(files[0].model.unk_token ?? "");
  step = await load("step.onnx", progress);
  if (settings.files["encoder.onnx"]) encoder = await load("encoder.onnx", progress);
  const { name, task, parameters, encoder_layers, decoder_layers, heads, example, templates } = settings;
  const supports = { beam: false, chat: "chat" in templates };
  const model = described({ name, task, parameters, encoder_layers, decoder_layers, heads, example, supports, defaults: {}, hasTraining: false });
  return [{ ...model, description: `${model.description}; computed in this browser` }];
}

// The model is that of the page: no requests with a token, no log of a training run.
export const readToken = () => {};
export const log = async () => [];
export const inputOf = (text) => ({ text });

const decode = (tokenizer, tokens) => (tokens.length ? tokenizer.decode(tokens, { skip_special_tokens: true }) : "");

/** The text that a token adds to those before it, and its name if it adds none (parts of characters, ends). */
function describe(tokenizer, before, id, rest = {}) {
  const context = before.slice(-4);
  const plain = decode(tokenizer, [...context, id]).slice(decode(tokenizer, context).length);
  return { id, plain, text: plain && !plain.includes("\ufffd") ? plain : tokenizer.id_to_token(id), ...rest };
}

const describeAll = (tokenizer, tokens) => tokens.map((id, index) => describe(tokenizer, tokens.slice(0, index), id));

function softmax(logits, temperature = 1) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = logits.map((x) => Math.exp((x - most) / temperature));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((x) => x / sum);
}

/** Ids in the order of their values, largest first. */
const sorted = (values) => Uint32Array.from(values.keys()).sort((a, b) => values[b] - values[a] || a - b);

/** Draw from the most probable tokens that together have top_p of the probability. */
function draw(logits, order, { temperature, top_p = 1 }, random) {
  const probabilities = softmax(logits, temperature);
  const kept = [];
  let sum = 0;
  for (const id of order) {
    kept.push(id);
    sum += probabilities[id];
    if (top_p < 1 && sum >= top_p) break;
  }
  let rest = random() * sum;
  return kept.find((id) => (rest -= probabilities[id]) <= 0) ?? kept[0];
}

/** Random numbers from 0 to 1 (mulberry32). */
function generator(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let x = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

const emptyPast = () =>
  Object.fromEntries(step.inputNames.filter((name) => name.startsWith("past_")).map((name) => [name, empty(1, settings.key_value_heads, 0, settings.head_dim)]));

/** Factors of the heads, and after them of the output, of each part by layer: 0 for what is switched off, else 1. */
function switches(ablations, isEncoder = false) {
  const parts = ["attention", ...(encoder && !isEncoder ? ["cross"] : []), "feed_forward"];
  const dims = [settings[isEncoder ? "encoder_layers" : "decoder_layers"], parts.length, settings.heads + 1];
  const values = new Float32Array(dims[0] * dims[1] * dims[2]).fill(1);
  for (const { kind, layer, part, head } of ablations.filter((each) => (each.kind === "encoder") === isEncoder)) {
    const column = parts.indexOf(kind === "cross" ? "cross" : part);
    values[(layer * dims[1] + column) * dims[2] + (head ?? settings.heads)] = 0;
  }
  return new ort.Tensor("float32", values, dims);
}

/**
 * Generate from a text. The output begins with the tokens of `forced`; `ablations` are parts that are switched off.
 * The listeners are called while tokens arrive: `onsource(tokens)`, `ontoken(token)`.
 */
export async function generate(model, text, options, { signal, forced = [], ablations = [], onsource = () => {}, ontoken = () => {} }) {
  const [before, after] = settings.templates[options.prompt ?? "text"];
  const add_special_tokens = settings.adds_special_tokens && options.prompt !== "chat";
  const encoded = source.encode(before + text + after, { add_special_tokens }).ids.map((id) => id ?? unknown);
  const sourceIds = [...encoded, ...settings.suffix];
  const limit = settings.max_length - (encoder ? 0 : sourceIds.length);
  if (!encoded.length || encoded.includes(undefined)) throw new Error("The text has no tokens, or characters that the tokenizer does not know.");
  if (limit < 1 || sourceIds.length > settings.max_length) throw new Error(`The text has ${sourceIds.length} tokens; expected at most ${settings.max_length}.`);
  const sourceTokens = describeAll(source, sourceIds);
  onsource(sourceTokens);
  await pause(0);
  const memory = { switches: switches(ablations) };
  if (encoder) Object.assign(memory, { source: ids(sourceIds) }, await run(encoder, { source: ids(sourceIds), switches: switches(ablations, true) }));
  const numTokens = encoded.filter((id) => !settings.ends.includes(id)).length;
  const maximum = Math.min(limit, options.max_new_tokens ?? settings.max_new_tokens ?? 2 * numTokens + 20);
  const random = generator(options.seed ?? 0);
  const tokens = [], steps = [], prompt = encoder ? settings.start : sourceIds;
  let past = emptyPast(), fed = prompt;
  while (tokens.length < maximum && !signal.aborted) {
    const { logits, lens_logits, ...outputs } = await run(step, { ...memory, ...past, tokens: ids(fed), lens: empty(1, 0, settings.d_model) });
    past = Object.fromEntries(Object.entries(outputs).filter(([name]) => name.startsWith("present_")).map(([name, x]) => [name.replace("present_", "past_"), x]));
    for (const id of settings.forbidden) logits.data[id] = -Infinity;
    const order = sorted(logits.data);
    const chosen = options.temperature ? draw(logits.data, order, options, random) : order[0];
    const id = forced[tokens.length]?.id ?? chosen;
    steps.push({ states: outputs.states, norms: outputs.norms, attention: outputs.attention, cross: outputs.cross_attention });
    if (settings.ends.includes(id)) break;
    const context = [...(encoder ? [] : sourceIds), ...tokens.map((token) => token.id)];
    const probabilities = softmax(logits.data);
    const named = (id) => describe(target, context, id, { probability: probabilities[id], log_probability: Math.log(probabilities[id]) });
    tokens.push({ ...forced[tokens.length], ...named(id), alternatives: Array.from(order.subarray(0, NUM_ALTERNATIVES), named) });
    ontoken(tokens.at(-1));
    fed = [id];
    await pause(0); // lets the page draw
  }
  const output = { tokens, text: decode(target, tokens.map(({ id }) => id)) };
  return { input: { text }, source: sourceTokens, outputs: [output], beam: null, trace: { memory, steps, prompt, options } };
}

/** The output that the model generates with some parts switched off. */
export const generateWithout = async (...request) => (await generate(...request)).outputs[0];

/** Attention of the output by kind, as the server's: one layer, `only`, if there are too many weights to be shown. */
export async function attention(model, { source: sourceTokens, outputs: [{ tokens }], trace }, index, layer = null) {
  const texts = tokens.map(({ text }) => text);
  const from = sourceTokens.map(({ text }) => text);
  const inputs = describeAll(target, trace.prompt).map(({ text }) => text);
  const self = [...inputs, ...texts].slice(0, -1);
  const { steps, memory } = trace;
  const maps = encoder
    ? {
        cross: { tensors: steps.map(({ cross }) => cross), queries: texts, keys: from, skip: inputs.length - 1, firstQuery: 0, firstKey: null, firstSource: 0 },
        decoder: { tensors: steps.map((each) => each.attention), queries: texts, keys: self, skip: inputs.length - 1, firstQuery: 0, firstKey: inputs.length, firstSource: null, isCausal: true },
        encoder: { tensors: memory.encoder_attention ? [memory.encoder_attention] : [], queries: from, keys: from, skip: 0, firstQuery: null, firstKey: null, firstSource: 0 },
      }
    : { self: { tensors: steps.map((each) => each.attention), queries: self, keys: self, skip: 0, firstQuery: inputs.length - 1, firstKey: inputs.length, firstSource: 0, isCausal: true } };
  return Object.fromEntries(Object.entries(maps).filter(([, { tensors }]) => tensors.length).map(([kind, { tensors, skip, ...map }]) => {
    const [numLayers, , heads] = tensors[0].dims;
    const only = numLayers * heads * map.queries.length * map.keys.length > LARGEST_MAPS ? (layer ?? numLayers - 1) : null;
    const layers = only == null ? range(numLayers) : [only];
    const weights = layers.map((layer) => range(heads).map((head) => rows(tensors, layer, head, map.keys.length).slice(skip, skip + map.queries.length)));
    return [kind, { ...map, weights, numLayers, only }];
  }));
}

/** Weights of a head for all queries, which several steps computed: keys of later tokens have none. */
function rows(tensors, layer, head, numKeys) {
  return tensors.flatMap(({ dims: [, , heads, queries, keys], data }) =>
    range(queries).map((query) => {
      const start = ((layer * heads + head) * queries + query) * keys;
      const row = new Float32Array(numKeys);
      row.set(data.subarray(start, start + Math.min(keys, numKeys)));
      return row;
    }));
}

/**
 * The output with its probabilities after changes, and with `lens` the layers, as the server's: lengths of vectors, and
 * the logit lens, at the positions that predict the output.
 */
export async function layers(model, result, index, { lens = false, ablations = [], signal = null } = {}) {
  const { input, source: { length }, outputs: [output], trace: { memory, steps, prompt, options } } = result;
  const { tokens } = output;
  if (!lens) return ablations.length ? generateWithout(model, input.text, { ...options, max_new_tokens: tokens.length }, { signal, forced: tokens, ablations }) : output;
  const skipped = Math.max(0, tokens.length - MAX_POSITIONS);
  const all = [...prompt, ...tokens.map(({ id }) => id)];
  const names = ["embedding", ...range(model.numLayers).map((layer) => `layer ${layer + 1}`)];
  const parts = ["attention", ...(encoder ? ["cross-attention"] : []), "feed-forward"];
  const found = names.map((name, row) => ({ name, norms: [], parts: row ? Object.fromEntries(parts.map((part) => [part, []])) : {}, cells: [] }));
  for (const [index, { states, norms }] of steps.slice(0, tokens.length).entries()) {
    if (index < skipped) continue;
    const arrays = { ...memory, ...emptyPast(), tokens: ids(prompt.slice(0, 1)), lens: states };
    const { lens_logits: { dims: [, , size], data } } = await run(step, arrays);
    found.forEach((layer, row) => {
      layer.norms.push(Math.hypot(...states.data.subarray(row * settings.d_model, (row + 1) * settings.d_model)));
      if (row) parts.forEach((part, column) => layer.parts[part].push(norms.data[(row - 1) * parts.length + column]));
      const probabilities = softmax(data.subarray(row * size, (row + 1) * size));
      const id = probabilities.reduce((best, value, id, values) => (value > values[best] ? id : best), 0);
      layer.cells.push(describe(target, all.slice(0, prompt.length + index), id, { probability: probabilities[id] }));
    });
    await pause(0);
  }
  const columns = describeAll(target, all).map(({ text }) => text).slice(prompt.length - 1 + skipped, -1);
  return { tokens, first: (encoder ? 0 : length - 1) + skipped, columns, layers: found };
}
