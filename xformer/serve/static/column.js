// One side: the output token by token, and the details of the selected token.

import { announce, format, formatScore, html, percent, roving, visible } from "./dom.js";
import { alternativesCard } from "./alternatives.js";
import { rowOf } from "./attention_maps.js";
import { AttentionView } from "./attention_view.js";
import { beamTree } from "./beam_tree.js";
import { trainingCurves } from "./curves.js";
import { figureCard } from "./figure_card.js";
import { heatMap } from "./heatmap.js";
import { LayersView } from "./layers_view.js";
import { predictionCard } from "./prediction.js";
import { rowEditor } from "./row_editor.js";
import { SwitchView } from "./switch_view.js";
import { partName } from "./switches.js";
import { barChart } from "./bars.js";
import { TokenRow } from "./tokens.js";

const TABS = { tokens: "Alternatives", result: "Result", attention: "Attention", layers: "Layer by layer", switches: "Switch off", alignment: "Alignment", beam: "Beam", training: "Training" };

const errorLine = (error) => html("p", { class: "error", role: "alert" }, error.message);

const joined = (tokens) => tokens.map(({ plain }) => plain).join("").trim();

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
    this.tab = "tokens";
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
    this.source = new TokenRow("Source");
    this.row = new TokenRow(this.model.generates ? "Output" : "Text", (index) => this.select(index));
    this.nbest = html("div", { class: "nbest" });
    this.peek = html("p", { class: "peek" });
    this.rows.replaceChildren(this.source.element, this.row.element, this.peek, this.nbest);
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
    this.showOutput(0, forced.length - 1);
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
  showOutput(index, token = 0) {
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
    this.nbest.replaceChildren(...buttons);
    if (focused) buttons[index].focus();
    this.token = null;
    this.drawTabs();
    this.select(Math.max(0, token));
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
      }, TABS[name]));
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
    const show = (...children) => drawing === this.drawing && this.panel.replaceChildren(...children);
    if (!this.tab) return show();
    if (!this.result && this.tab !== "training") {
      if (this.running) return show(html("p", { class: "empty" }, "Running …"));
      return show(html("p", { class: "empty" }, this.model.generates
        ? "Enter a text and press Generate. Select a token to see its alternatives and its attention."
        : "Enter a text and press Run to see the result and its attention."));
    }
    try {
      await this[`draw_${this.tab}`](show);
    } catch (error) {
      show(errorLine(error));
    }
    this.mark();
  }

  /** Width for figures, which are drawn for it, so that their text has its size. */
  get width() {
    const { paddingLeft, paddingRight } = getComputedStyle(this.panel);
    return Math.max(240, this.panel.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight));
  }

  draw_tokens(show) {
    const token = this.tokens[this.token ?? 0];
    if (!token?.alternatives?.length) return show(html("p", { class: "empty" }, "No probabilities were recorded for this token."));
    const position = this.token ?? 0;
    show(alternativesCard({
      token, state: this.sampling, name: `${this.model.name}-alternatives-${position + 1}`, width: Math.min(620, this.width),
      onselect: (chosen) => this.onforce([...this.tokens.slice(0, position), { ...chosen, alternatives: token.alternatives, isForced: true }]),
    }));
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

  async draw_attention(show) {
    const result = this.result;
    const maps = await this.maps();
    if (result !== this.result) return;
    this.editor = this.changes && this.api.changesAttention ? html("section", { class: "figure-card editor" }) : null;
    this.edited = null;
    this.view = new AttentionView({
      maps, selection: this.selection, name: this.model.name, editor: this.editor,
      onhover: (row) => this.select(this.tokenOf(row), true),
      onpick: (row) => this.pick(this.tokenOf(row)),
      onchange: () => this.mark(),
      onload: (layer) => this.loadLayer(layer),
    });
    show(this.view.element);
  }

  /** Show the weights of a token in the editor, which does not follow the pointer on its way over the map. */
  pick(token) {
    if (token == null || token < 0 || token >= this.tokens.length) return;
    this.picked = token;
    this.drawEditor();
  }

  /** Sliders of the attention that predicts the token that was picked, and what they change. */
  drawEditor() {
    const { selection, view: { map }, picked: token } = this;
    const query = token + map.firstQuery;
    const shown = `${JSON.stringify(selection)} ${query}`;
    if (!this.editor || this.tab !== "attention" || map.firstQuery == null || this.edited === shown) return;
    this.edited = shown;
    const content = html("div");
    const show = (...children) => this.editor.replaceChildren(html("h4", {}, "Change these weights by hand"), ...children, content);
    if (selection.layer == null || selection.head == null) return show(html("p", { class: "hint" }, "Select a head to change its weights for the selected token."));
    const numKeys = map.isCausal ? query + 1 : map.keys.length;
    const weights = map.weights[map.only == null ? selection.layer : 0][selection.head][query].slice(0, numKeys);
    const part = { kind: selection.kind === "self" ? "decoder" : selection.kind, layer: selection.layer, head: selection.head, query };
    const rest = map.keys.slice(numKeys).map(() => 0);
    const hint = `Attention of “${visible(map.queries[query])}” in ${partName({ ...part, part: "attention" })}. Click a row of the map to choose another token.`;
    show(html("p", { class: "hint" }, hint), rowEditor({
      keys: map.keys.slice(0, numKeys), weights,
      onchange: async (values) => {
        const signal = this.beginChange();
        if (!values) return content.replaceChildren();
        try {
          const change = await this.changed({ attention_rows: [{ ...part, weights: [...values, ...rest] }] }, signal);
          if (!signal.aborted) content.replaceChildren(this.changeCard(change, token, this.editor));
        } catch (error) {
          if (!signal.aborted) content.replaceChildren(errorLine(error));
        }
      },
    }));
  }

  /** Begin a change of the model, which ends an earlier one; returns its signal. */
  beginChange() {
    this.change?.abort();
    this.change = new AbortController();
    return this.change.signal;
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

  /** Show another layer of attention that is too large to be loaded at once. */
  async loadLayer(layer) {
    this.attention = this.api.attention(this.model, this.result, this.output, layer);
    await this.drawPanel();
    this.panel.querySelector("[data-field=layer]")?.focus();
  }

  /** Index of the output token of a query of the attention that is shown, or null. */
  tokenOf(query) {
    const { firstQuery } = this.view.map;
    return firstQuery == null ? null : query - firstQuery;
  }

  /** The position that predicts an output token, among the columns of the layers. */
  columnOf(token) {
    return (this.model.isEncoderDecoder ? 0 : this.result.source.length - 1) + token - this.firstColumn;
  }

  async draw_layers(show) {
    const result = this.result;
    this.layersView = null;
    if (!this.lens) show(html("p", { class: "empty" }, "Running …"));
    const { layers, columns, first } = await this.keep("lens", () => this.api.layers(this.model, result, this.output, { lens: true }));
    if (result !== this.result) return;
    this.firstColumn = first;
    this.layersView = new LayersView({
      layers, columns, name: this.model.name, width: this.width,
      onselect: (column) => {
        this.layersView.select(column);
        this.select(this.token + column - this.columnOf(this.token));
      },
    });
    show(this.layersView.element);
  }

  draw_switches(show) {
    this.switchView = new SwitchView({ model: this.model, state: this.switches, onchange: () => this.switched() });
    show(this.switchView.element);
    this.switched();
  }

  /** Show what the parts that are off change: the probabilities of the selected token, and the output. */
  async switched() {
    const { switchView, switches, request: [text, options, forced] } = this;
    const ablations = switches.off;
    this.shownChange = null;
    const signal = this.beginChange();
    if (!ablations.length) return;
    const attempt = async (place, work) => {
      place.setAttribute("aria-busy", "true");
      try {
        const value = await work();
        if (!signal.aborted) place.replaceChildren(value);
      } catch (error) {
        if (!signal.aborted) place.replaceChildren(errorLine(error));
      }
      if (!signal.aborted) place.removeAttribute("aria-busy");
    };
    await attempt(switchView.prediction, async () => {
      const change = await this.changed({ ablations }, signal);
      if (!signal.aborted) this.shownChange = change;
      return this.changeCard(change, this.token ?? 0, switchView.prediction);
    });
    await attempt(switchView.output, async () => {
      const generated = await this.api.generateWithout(this.model, text, options, { ablations, forced, signal });
      const row = new TokenRow("Output with these parts off");
      row.set(generated.tokens);
      if (!signal.aborted) announce(`Output with these parts off: ${generated.text}`);
      return row.element;
    });
  }

  draw_alignment(show) {
    const { alignment } = this.result.outputs[this.output];
    this.figure = heatMap({
      weights: alignment, rows: this.tokens.map(({ text }) => text), columns: this.result.source.map(({ text }) => text),
      title: "Alignment", ringed: true, onhover: (row) => this.select(row, true),
    });
    show(figureCard({
      title: "Alignment", name: `${this.model.name}-alignment`, figure: this.figure,
      note: html("p", { class: "hint" }, "Rows: output. Columns: source. A circle marks the most likely source token."),
    }));
  }

  draw_beam(show) {
    const detail = html("p", { class: "path", "aria-live": "polite" }, "Select a candidate to see its hypothesis.");
    const figure = beamTree({
      steps: this.result.beam, output: this.result.outputs[this.output], showPruned: this.showPruned,
      onselect: (path) => {
        const last = path.at(-1);
        detail.replaceChildren(html("strong", {}, joined(path)),
          ` score ${formatScore(last.score)}${last.finished ? ", finished" : last.kept ? ", kept" : ", pruned"}${last.group == null ? "" : `, group ${last.group + 1}`}`);
      },
    });
    const toggle = html("label", { class: "check" },
      html("input", {
        type: "checkbox", checked: this.showPruned,
        onchange: (event) => {
          this.showPruned = event.target.checked;
          this.drawPanel().then(() => this.panel.querySelector("input[type=checkbox]").focus());
        },
      }), "Show pruned candidates");
    show(figureCard({ title: "Beam search", name: `${this.model.name}-beam`, figure, controls: [toggle], note: detail }));
  }

  draw_result(show) {
    show(...this.result.summary.map(({ title, bars, lines, weights, size }) => {
      const name = `${this.model.name}-${title}`;
      if (bars) return figureCard({ title, name, figure: barChart({ bars, title, width: Math.min(620, this.width) }) });
      if (lines.length > 1) return figureCard({ title, name, figure: heatMap({ weights, rows: lines, columns: lines, title, letters: 28 }) });
      return html("p", {}, `The vector of the text has ${size} numbers. Enter several lines to compare them.`);
    }));
  }

  async draw_training(show) {
    const log = await this.api.log(this.model);
    show(html("div", { class: "charts" }, trainingCurves(log, this.model.name, this.width)));
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
    this.peek?.replaceChildren(...children);
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
      if (this.tab !== "attention" || kind !== selection.kind) continue;
      this.view?.select(query);
      this.drawEditor();
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
