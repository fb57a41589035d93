// The model and the settings of one side.

import { html } from "./dom.js";

// Names are those of GenerationConfig and of the pipelines' arguments.
const BEAM = [
  { name: "num_beams", label: "Beam size", type: "number", min: 2, max: 32, step: 1, value: 4 },
  { name: "length_penalty", label: "Length penalty", type: "number", min: 0, max: 10, step: 0.1, value: 1 },
  { name: "num_beam_groups", label: "Beam groups", type: "number", min: 1, max: 16, step: 1, value: 1 },
];
const SAMPLING = [
  { name: "temperature", label: "Temperature", type: "number", min: 0.05, max: 5, step: 0.05, value: 1 },
  { name: "top_p", label: "Top-p", type: "number", min: 0.05, max: 1, step: 0.05, value: 0.9 },
  { name: "seed", label: "Seed", type: "number", min: 0, max: 999999, step: 1, value: 0 },
];
const METHODS = { greedy: { label: "Greedy", fields: [] }, beam: { label: "Beam", fields: BEAM }, sampling: { label: "Sample", fields: SAMPLING } };
const LENGTH = { name: "target_length", label: "Desired length", type: "number", min: 1, max: 2000, step: 1, value: "", placeholder: "any" };
const MAXIMUM = { name: "max_new_tokens", label: "Maximum", type: "number", min: 1, max: 2000, step: 1, value: "", placeholder: "auto" };
const UNIT = { name: "length_unit", label: "Unit", options: ["tokens", "words"], value: "tokens" };
const PROMPT = { name: "prompt", label: "Prompt", options: ["chat", "text"], value: "chat", wide: true };
const TOPICS = { name: "topics", label: "Topics", type: "text", value: "", placeholder: "words to favor, separated by commas", wide: true };

/** The controls of one side. `onchange` is called with no arguments. */
export class Settings {
  constructor(label, models, onchange) {
    this.label = label;
    this.models = models;
    this.onchange = onchange;
    this.select = html("select", { id: `model-${label}`, onchange: () => (this.draw(), onchange()) },
      models.map(({ name, title }) => html("option", { value: name }, title)));
    this.body = html("div");
    this.element = html("details", { class: `side side-${label}`, open: matchMedia("(min-width: 861px)").matches },
      html("summary", {}, html("span", { class: "badge" }, label.toUpperCase()), "Model and settings"),
      html("div", { class: "field", hidden: models.length < 2 }, html("label", { for: this.select.id }, "Model"), this.select),
      this.body);
    this.draw();
  }

  get model() {
    return this.models.find(({ name }) => name === this.select.value);
  }

  /** Show the controls that the model has, with the values that they had. */
  draw(values = this.inputs ? this.values : {}) {
    this.inputs = {};
    const sections = [];
    if (this.model.generates) {
      const { supports, defaults, isEncoderDecoder } = this.model;
      // The most probable text is seldom what a language model is asked for: it has no beams.
      const methods = Object.keys(METHODS).filter((name) => supports[name] !== false && (isEncoderDecoder || name !== "beam"));
      const method = methods.includes(values.method) ? values.method : defaults.num_beams > 1 ? "beam" : "greedy";
      this.method = method;
      const button = (name) =>
        html("label", { class: "segment" },
          html("input", {
            type: "radio", name: `method-${this.label}`, value: name, checked: name === method,
            onchange: () => {
              this.method = name;
              const current = this.values;
              this.draw(current);
              this.body.querySelector(`input[value=${name}]`).focus();
              this.onchange();
            },
          }),
          html("span", {}, METHODS[name].label));
      const length = [supports.target_length && LENGTH, supports.target_length && UNIT, isEncoderDecoder ? MAXIMUM : { ...MAXIMUM, value: 40 }, supports.topics && TOPICS, supports.chat && PROMPT];
      const fields = (list) => list.filter(Boolean).map((field) => this.field(field, values));
      sections.push(
        html("div", { class: "segments", role: "radiogroup", "aria-label": "Search" }, methods.map(button)),
        html("div", { class: "grid" }, fields(METHODS[method].fields)),
        html("div", { class: "grid" }, fields(length)),
      );
    }
    this.body.replaceChildren(...sections);
  }

  field({ name, label, wide, value, options, ...attributes }, values) {
    const id = `${name}-${this.label}`;
    const usual = attributes.placeholder ? null : this.model.defaults[name];
    // The default of the model, unless it selects another method: one beam is greedy search.
    const initial = values[name] ?? (usual && usual >= attributes.min ? usual : value);
    const input = options
      ? html("select", { id, onchange: this.onchange }, options.map((option) => html("option", { value: option, selected: option === initial }, option)))
      : html("input", { id, value: initial, oninput: this.onchange, autocomplete: "off", ...attributes });
    this.inputs[name] = input;
    return html("div", { class: wide ? "field wide" : "field" }, html("label", { for: id }, label), input);
  }

  /** The settings that are shown and not empty, as strings. */
  get values() {
    const values = this.model.generates ? { method: this.method } : {};
    for (const [name, input] of Object.entries(this.inputs)) if (input.value.trim() !== "") values[name] = input.value.trim();
    return values;
  }

  /** Set model and settings, for example those of a link. */
  set({ model, settings }) {
    if (this.models.some(({ name }) => name === model)) this.select.value = model;
    this.draw(settings);
  }

  /** The first invalid control, if any. */
  get invalid() {
    return Object.values(this.inputs).find((input) => !input.checkValidity());
  }
}

const TEXTS = new Set(["prompt", "length_unit"]);

/** Arguments of generation for the values of `Settings`: numbers, and topics as a list of phrases. */
export function generationOptions({ method, topics, ...values }) {
  const options = Object.fromEntries(Object.entries(values).map(([name, value]) => [name, TEXTS.has(name) ? value : Number(value)]));
  if (method === "greedy") Object.assign(options, { num_beams: 1, temperature: 0 });
  if (method === "beam") options.num_return_sequences = options.num_beams;
  if (method === "sampling") options.num_beams = 1;
  if (options.target_length == null) delete options.length_unit;
  if (topics) options.sequence_bias = topics.split(",").map((topic) => topic.trim()).filter(Boolean);
  return options;
}
