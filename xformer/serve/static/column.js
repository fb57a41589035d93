// One side: the output token by token, and the details of the selected token.

import { announce, errorLine, format, formatScore, html, percent, roving, visible } from "./dom.js";
import { rowOf } from "./attention_maps.js";
import { drawAttention, drawEditor } from "./attention_panel.js";
import { predictionCard } from "./bars.js";
import { drawLayers } from "./layers.js";
import { drawAlignment, drawBeam, drawResult, drawTokens, drawTraining } from "./panels.js";
import { drawSwitches } from "./switches.js";
import { joined, leastCertain, TokenRow } from "./tokens.js";

/** Tabs: title, function `(column, show)` that shows the content, what it is, and the page of the tutorial about it. */
const TABS = {
  result: ["Result", drawResult, "What the model computes for the text.", "6-encoder"],
  attention: ["Attention", drawAttention, "How much each token takes from each of the others, in every layer and head.", "1-attention"],
  tokens: ["Alternatives", drawTokens, "The tokens that the model could have chosen in the place of the selected one.", "10-decoding"],
  layers: ["Layer by layer", drawLayers, "What the model would predict after each of its layers, and what their parts add.", "5-residuals-and-norms"],
  switches: ["Switch off", drawSwitches, "What becomes of the output without some parts of the model.", "2-multi-head-attention"],
  alignment: ["Alignment", drawAlignment, "Which tokens of the source each token of the output belongs to.", "7-decoder"],
  beam: ["Beam", drawBeam, "The candidates of each step of the search, and which of them were kept.", "10-decoding"],
  training: ["Training", drawTraining, "How the model learned, step by step.", "11-translator"],
};

export class Column {
  /** `onforce(tokens)` is called to generate again with an output that begins with some tokens. */
  constructor(label, api, onforce) {
    Object.assign(this, { label, api, onforce });
    this.selection = { kind: "cross", layer: null, head: null, leaveOutFirst: null, scaleRows: null, order: "layer" };
    this.showPruned = true;
    this.sampling = { temperature: 1 };
    this.status = html("p", { class: "status", role: "status" });
    this.name = html("h2", {}, "");
    this.rows = html("div", { class: "rows" });
    this.tabs = html("div", { class: "tabs", role: "tablist", "aria-label": "Details" });
    this.panel = html("div", { class: "panel", role: "tabpanel", tabindex: 0, id: `panel-${label}` });
    this.element = html("article", { class: `column side-${label}`, "aria-label": `Output ${label.toUpperCase()}` },
      html("header", { class: "column-header" }, html("span", { class: "badge" }, label.toUpperCase()), this.name, this.status),
      this.rows, this.tabs, this.panel);
  }

  /** Show a model before anything is generated. */
  setModel(model) {
    if (this.model?.name === model.name) return;
    this.model = model;
    this.switches = { off: [], kind: model.isEncoderDecoder ? "cross" : "decoder" };
    this.name.textContent = model.title;
    this.clear();
  }

  /** Forget what was computed for an output. */
  forget() {
    this.attention = this.lens = this.unchanged = this.shownChange = null;
    this.change?.abort();
  }

  clear() {
    this.result = null;
    this.output = 0;
    this.token = null;
    this.forget();
    this.rows.replaceChildren();
    this.status.textContent = this.model.description;
    this.drawTabs();
  }

  /**
   * Generate, and show tokens as they arrive. A later run replaces an earlier one, whose `signal` is aborted.
   *
   * With tokens that are `forced`, text and options are those of the run before.
   */
  async run(text, options, signal, forced = []) {
    if (forced.length) [text, options] = this.request;
    const before = forced.length ? this.result : null;
    this.request = [text, options, forced];
    this.clear();
    this.signal = signal;
    this.source = new TokenRow(this.model.isEncoderDecoder ? "Source" : "Prompt");
    this.row = new TokenRow(this.model.generates ? "Output" : "Text", (index) => this.select(index));
    this.nbest = html("div", { class: "nbest" });
    this.peek = html("p", { class: "peek" });
    const legend = html("p", { class: "hint" }, "␣ is a space, ⏎ a new line, ∅ an empty text.",
      this.model.generates ? " The stronger the line under a token, the less certain the model was; the least certain word is selected." : null);
    this.rows.replaceChildren(this.source.element, this.row.element, legend, this.peek, this.nbest);
    this.source.element.hidden = true;
    this.row.element.classList.add("output");
    this.running = true;
    this.drawTabs();
    this.element.setAttribute("aria-busy", "true");
    this.status.textContent = "…";
    const started = performance.now();
    const [sourceRow, row] = [this.source, this.row];
    const streamed = [];
    let source = [];
    let announced = started;
    let result;
    try {
      result = await this.api.generate(this.model, text, options, {
        signal,
        forced,
        onsource: (tokens) => {
          source = tokens;
          sourceRow.set(tokens);
          sourceRow.element.hidden = !tokens.length;
        },
        ontoken: (token) => {
          streamed.push(token);
          row.add(token);
          this.status.textContent = `${streamed.length} tokens`;
          if (performance.now() - announced > 2000) {
            announced = performance.now();
            announce(joined(streamed));
          }
        },
        // The best hypothesis of a beam search changes.
        onreplace: (tokens) => row.set(tokens),
      });
    } catch (error) {
      if (signal !== this.signal) return;
      if (error.name !== "AbortError") throw this.fail(error, before);
      const output = { tokens: streamed, text: joined(streamed) };
      result = streamed.length ? { input: this.api.inputOf(text, options), source, outputs: [output] } : null;
    }
    if (signal !== this.signal) return;
    this.stopped();
    this.result = result;
    if (!this.result) {
      this.status.textContent = "Stopped";
      this.drawTabs();
      return;
    }
    const seconds = (performance.now() - started) / 1000;
    const tokens = this.result.outputs[0].tokens;
    this.status.textContent = `${tokens.length} tokens, ${format(seconds, 2)} s${signal.aborted ? ", stopped" : ""}`;
    this.showOutput(0, forced.length ? forced.length - 1 : undefined);
    announce(`${this.model.generates ? "Output" : "Text"} of ${this.model.title}: ${joined(tokens)}`);
  }

  stopped() {
    this.running = false;
    this.element.removeAttribute("aria-busy");
  }

  /** Show an error, and the result before the run, if any. */
  fail(error, before) {
    this.stopped();
    this.status.textContent = "";
    const message = errorLine(error);
    if (before) {
      this.result = before;
      this.showOutput(0);
      this.rows.prepend(message);
    } else {
      this.drawTabs();
      this.rows.replaceChildren(message);
    }
    return error;
  }

  /** Show one of the outputs, best first, and select a token. */
  showOutput(index, token = leastCertain(this.result.outputs[index].tokens)) {
    this.output = index;
    this.forget();
    const { source, outputs } = this.result;
    if (source.length) this.source.set(source);
    this.source.element.hidden = !source.length;
    this.row.set(outputs[index].tokens);
    const focused = this.nbest.contains(document.activeElement);
    const buttons = outputs.length < 2 ? [] : outputs.map((output, position) =>
      html("button", { type: "button", "aria-pressed": String(position === index), onclick: () => this.showOutput(position) },
        html("span", { class: "rank" }, String(position + 1)),
        html("span", { class: "text" }, output.text),
        html("span", { class: "score" }, formatScore(output.score))));
    roving(buttons, 0, index);
    this.nbest.replaceChildren(...(buttons.length ? [html("h3", {}, "Outputs of the search, and their scores"), ...buttons] : []));
    if (focused) buttons[index].focus();
    this.token = null;
    this.drawTabs();
    this.select(token);
  }

  /** Whether the inside of the model can be changed. */
  get changes() {
    return this.model.generates && Boolean(this.api.generateWithout);
  }

  get tokens() {
    return this.result?.outputs[this.output]?.tokens ?? [];
  }

  /** Tabs that the model and the result have content for. */
  get available() {
    const { result, model } = this;
    const output = result?.outputs[this.output];
    return Object.keys(TABS).filter((tab) => ({
      tokens: model.generates && (!result || this.tokens.some(({ alternatives }) => alternatives?.length)),
      attention: !result || this.tokens.length,
      layers: model.generates && this.api.layers && (!result || this.tokens.length),
      switches: this.changes && (!result || this.tokens.length),
      alignment: result ? output?.alignment : model.isEncoderDecoder,
      beam: result?.beam,
      result: result ? result.summary : !model.generates,
      training: model.hasTraining,
    })[tab]);
  }

  drawTabs() {
    const names = this.available;
    if (!names.includes(this.tab)) this.tab = names[0];
    const buttons = names.map((name) =>
      html("button", {
        type: "button", role: "tab", id: `tab-${this.label}-${name}`, "aria-selected": String(name === this.tab),
        "aria-controls": this.panel.id, "data-tab": name, onclick: () => this.showTab(name),
      }, TABS[name][0]));
    roving(buttons, 0, Math.max(0, names.indexOf(this.tab)));
    this.tabs.replaceChildren(...buttons);
    this.drawPanel();
  }

  showTab(name) {
    this.tab = name;
    this.drawTabs();
    this.tabs.querySelector("[aria-selected=true]")?.focus();
  }

  async drawPanel() {
    this.panel.setAttribute("aria-labelledby", `tab-${this.label}-${this.tab}`);
    this.figure = null;
    const drawing = (this.drawing = Symbol(this.tab));
    if (!this.tab) return this.panel.replaceChildren();
    const [, draw, sentence, page] = TABS[this.tab];
    const [part, ...topic] = page.split("-");
    const name = `Part ${part} of the tutorial: ${topic.join(" ")}`;
    const link = html("a", { href: `${this.api.tutorial}${page}.md`, target: "_blank" }, name);
    const more = this.api.tutorial ? link : `${name} (docs/tutorial/${page}.md in the repository of xformer).`;
    const intro = html("p", { class: "intro" }, sentence, " ", more);
    const show = (...children) => drawing === this.drawing && this.panel.replaceChildren(intro, ...children);
    if (!this.result && this.tab !== "training") {
      if (this.running) return show(html("p", { class: "empty" }, "Running …"));
      return show(html("p", { class: "empty" }, this.model.generates
        ? "Enter a text and press Generate. Select a token to see its alternatives and its attention."
        : "Enter a text and press Run to see the result and its attention."));
    }
    this.panel.style.minHeight = `${this.panel.offsetHeight}px`; // so that the page does not jump while it waits
    try {
      await draw(this, show);
    } catch (error) {
      show(errorLine(error));
    }
    this.mark();
    if (drawing === this.drawing) this.panel.style.minHeight = null;
  }

  /** Width for figures, which are drawn for it, so that their text has its size. */
  get width() {
    const { paddingLeft, paddingRight } = getComputedStyle(this.panel);
    return Math.max(240, this.panel.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight));
  }

  /** A promise that is kept until the output changes, unless it fails. */
  keep(name, make) {
    this[name] ??= make().catch((error) => {
      this[name] = null;
      throw error;
    });
    return this[name];
  }

  async maps() {
    return this.keep("attention", () => this.api.attention(this.model, this.result, this.output));
  }

  /** Begin a change of the model, which ends an earlier one; returns its signal. */
  beginChange() {
    this.change?.abort();
    this.change = new AbortController();
    return this.change.signal;
  }

  /** Show what `work` computes in a place, unless another change begins before that. */
  async showChange(place, signal, work) {
    place.setAttribute("aria-busy", "true");
    const child = await work().catch(errorLine);
    if (signal.aborted) return;
    place.replaceChildren(child);
    place.removeAttribute("aria-busy");
  }

  /** The output tokens with their probabilities `before` and `after` changes of the model. */
  async changed(changes, signal) {
    const unchanged = this.keep("unchanged", () => this.api.layers(this.model, this.result, this.output));
    const [before, after] = await Promise.all([unchanged, this.api.layers(this.model, this.result, this.output, { ...changes, signal })]);
    return { before: before.tokens, after: after.tokens };
  }

  /** The probabilities of a token before and after a change, as wide as their place. */
  changeCard({ before, after }, token, place) {
    return predictionCard({ before: before[token], after: after[token], name: this.model.name, width: Math.min(520, place.clientWidth) });
  }

  /** The position that predicts an output token, among the columns of the layers. */
  columnOf(token) {
    return (this.model.isEncoderDecoder ? 0 : this.result.source.length - 1) + token - this.firstColumn;
  }

  /** Select a token of the output; `quiet` keeps the panel as it is. */
  select(index, quiet = false) {
    if (index == null || index < 0 || index >= this.tokens.length || index === this.token) return;
    this.token = index;
    if (!quiet) this.picked = index;
    if (this.tab === "tokens" && !quiet) this.drawPanel();
    else this.mark();
    this.maps().then(() => this.mark(), () => {});
  }

  /** The most probable alternatives in one line, while another tab is open. */
  drawPeek() {
    const alternatives = this.tab === "tokens" ? [] : (this.tokens[this.token]?.alternatives ?? []);
    const children = alternatives.slice(0, 4).map(({ text, probability }) => html("span", {}, html("b", {}, visible(text)), ` ${percent(probability)}`));
    this.peek?.replaceChildren(...(children.length ? ["Most probable:", ...children] : []));
  }

  /** Mark the selected token in every row and figure. */
  async mark() {
    this.row?.select(this.token);
    this.drawPeek();
    this.source?.shade(null);
    this.row?.shade(null);
    if (this.token == null || !this.result) return;
    const { alignment } = this.result.outputs[this.output];
    if (this.tab === "alignment") {
      this.figure?.select(this.token);
      this.source.shade(alignment?.[this.token]);
      return;
    }
    if (this.tab === "layers") return this.layersView?.select(this.columnOf(this.token));
    if (this.tab === "switches" && this.shownChange) {
      const { prediction } = this.switchView;
      prediction.replaceChildren(this.changeCard(this.shownChange, this.token, prediction));
    }
    if (!this.attention) return;
    const maps = await this.attention.catch(() => ({}));
    const { selection } = this;
    for (const [kind, map] of Object.entries(maps)) {
      const query = map.firstQuery == null ? -1 : this.token + map.firstQuery;
      if (query < 0 || query >= map.queries.length) continue;
      const weights = rowOf(map, kind === selection.kind ? selection : { layer: null, head: null }, query);
      const shade = (row, first) => first != null && row.shade(row.elements.map((_, index) => weights[index + first] ?? 0));
      shade(this.source, map.firstSource);
      shade(this.row, map.firstKey);
      if (this.tab !== "attention" || kind !== selection.kind || !this.view) continue;
      this.view.select(query);
      drawEditor(this);
    }
  }

  /** Everything that is shown, for JSON. */
  async data() {
    if (!this.result) return null;
    const attention = await this.maps().catch(() => null);
    const { source, outputs, beam, summary } = this.result;
    return { model: this.model.name, source, outputs, beam, summary, output: this.output, attention };
  }
}
