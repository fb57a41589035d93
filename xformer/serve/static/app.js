// The page: a text, and one or two sides with their own model and settings; the second may have its own text.

import * as api from "./api.js";
import { Column } from "./column.js";
import { announce } from "./dom.js";
import { download } from "./figure_card.js";
import { fromHash, toHash } from "./link.js";
import { generationOptions, Settings } from "./settings.js";

const byId = (id) => document.getElementById(id);
const [text, form, generate, stop, compare] = ["text", "inputs", "generate", "stop", "compare"].map(byId);
const [ownText, textB] = ["own-text", "text-b"].map(byId);
let sides = [];
let running = null;
let example = null; // of the model

const shown = () => sides.filter(({ column }) => !column.element.hidden);

const textOf = (side) => (side === sides[1] && ownText.checked ? textB.value : text.value);

function state() {
  const sideOf = (side) => ({
    model: side.settings.model.name, settings: side.settings.values, ...(side === sides[1] && ownText.checked ? { text: textB.value } : {}),
  });
  return { text: text.value, sides: shown().map(sideOf) };
}

function changed() {
  // An example gives way to that of another model; a text that somebody wrote stays.
  const { model } = sides[0].settings;
  const isReplaced = text.value === example && example !== model.example;
  if (isReplaced) text.value = model.example;
  example = model.example;
  for (const { settings, column } of sides) column.setModel(settings.model);
  const generates = shown().some(({ settings }) => settings.model.generates);
  generate.textContent = generates ? "Generate" : "Run";
  history.replaceState(null, "", toHash(state()));
  if (isReplaced) run();
}

function showSecond(visible) {
  compare.setAttribute("aria-pressed", String(visible));
  document.body.classList.toggle("comparing", visible);
  byId("second").hidden = sides[1].settings.element.hidden = sides[1].column.element.hidden = !visible;
}

/** Give the second side a text of its own, or the same one. */
function showOwnText(value) {
  ownText.checked = value != null;
  textB.hidden = value == null;
  textB.value = value ?? "";
}

/** Generate; with tokens that are `forced`, on one side only. */
async function run(chosen = shown(), forced = []) {
  const invalid = shown().map(({ settings }) => settings.invalid).find(Boolean);
  if (invalid) return invalid.reportValidity();
  const blank = chosen.find((side) => !textOf(side).trim());
  if (blank) return (blank === sides[1] && ownText.checked ? textB : text).focus();
  running?.abort();
  const controller = (running = new AbortController());
  generate.disabled = byId("json").disabled = true;
  stop.hidden = false;
  await Promise.allSettled(chosen.map((side) => side.column.run(textOf(side), generationOptions(side.settings.values), controller.signal, forced)));
  if (controller !== running) return;
  generate.disabled = false;
  stop.hidden = true;
  byId("json").disabled = !shown().some(({ column }) => column.result);
}

/** Show text and settings of the address, if it has a text; returns whether it has. */
function open() {
  const linked = fromHash(location.hash);
  if (!linked) return false;
  text.value = linked.text;
  showSecond(linked.sides.length > 1);
  linked.sides.forEach((value, index) => sides[index].settings.set(value));
  showOwnText(linked.sides[1]?.text);
  ({ example } = sides[0].settings.model);
  return true;
}

/** Attention and probabilities have more digits than anybody needs. */
const rounded = (_, value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(5)) : value);

const SCHEMES = ["auto", "light", "dark"];

function setScheme(scheme) {
  if (scheme === "auto") delete document.documentElement.dataset.scheme;
  else document.documentElement.dataset.scheme = scheme;
  byId("scheme").textContent = `◐ ${scheme}`;
  byId("scheme").setAttribute("aria-label", `Colors: ${scheme}`);
  stored(scheme);
}

/** Read the choice of colors, or keep one; storage may be disabled, and a choice is then for this page only. */
function stored(scheme = null) {
  try {
    if (scheme) localStorage.setItem("scheme", scheme);
    return localStorage.getItem("scheme");
  } catch {
    return null;
  }
}

async function start() {
  api.readToken();
  setScheme(SCHEMES.find((scheme) => scheme === stored()) ?? "auto");
  byId("scheme").addEventListener("click", () => {
    const current = document.documentElement.dataset.scheme ?? "auto";
    setScheme(SCHEMES[(SCHEMES.indexOf(current) + 1) % SCHEMES.length]);
  });
  const models = await api.models();
  if (!models.length) return announce("No model of texts is served.");
  sides = [..."ab"].map((label) => {
    const side = { settings: new Settings(label, models, changed) };
    side.column = new Column(label, api, (forced) => run([side], forced));
    return side;
  });
  byId("settings").replaceChildren(...sides.map(({ settings }) => settings.element));
  byId("output").replaceChildren(...sides.map(({ column }) => column.element));
  if (models.length > 1) sides[1].settings.set({ model: models[1].name, settings: {} });
  showSecond(false);
  if (!open()) text.value = models[0].example;
  changed();

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    // On a phone the output is below the settings.
    if (byId("output").getBoundingClientRect().top > 0.6 * innerHeight) byId("output").scrollIntoView();
    run();
  });
  stop.addEventListener("click", () => running?.abort());
  for (const area of [text, textB]) {
    area.addEventListener("input", changed);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
  }
  ownText.addEventListener("change", () => {
    showOwnText(ownText.checked ? text.value : null);
    changed();
    if (ownText.checked) textB.focus();
  });
  compare.addEventListener("click", () => {
    showSecond(sides[1].column.element.hidden);
    changed();
  });
  byId("link").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      announce("Link copied");
      byId("link").textContent = "Copied";
    } catch {
      byId("link").textContent = "Copy the address";
    }
    setTimeout(() => (byId("link").textContent = "Copy link"), 2000);
  });
  byId("json").addEventListener("click", async () => {
    const results = await Promise.all(shown().map(({ column }) => column.data()));
    download("xformer.json", JSON.stringify({ ...state(), link: location.href, results }, rounded), "application/json");
  });
  window.addEventListener("hashchange", () => {
    if (!open()) return;
    changed();
    run();
  });
  run();
}

start().catch((error) => {
  byId("output").textContent = `The models cannot be listed: ${error.message}`;
});
