// Texts as rows of tokens.

import { html, percent, roving, visible } from "./dom.js";

/** A token: a button if it can be selected, shaded by `shade`. */
function tokenElement(token, index, onselect) {
  const probability = token.probability;
  const label = `${visible(token.text)}${probability == null ? "" : `, probability ${percent(probability)}`}`;
  const element = html(onselect ? "button" : "span", {
    type: onselect ? "button" : null, class: "token", "data-index": index, title: onselect ? null : token.text,
    "aria-label": onselect ? label : null,
    "aria-pressed": onselect ? "false" : null,
    onpointerenter: () => onselect?.(index),
    onfocus: () => onselect?.(index),
  }, visible(token.text));
  if (/^\s/.test(token.text)) element.classList.add("spaced");
  if (token.isForced) element.classList.add("forced");
  if (probability != null) element.style.setProperty("--probability", probability.toFixed(3));
  return element;
}

/** A row of tokens; `add` appends one, `shade` and `select` mark them. */
export class TokenRow {
  constructor(label, onselect = null) {
    this.onselect = onselect;
    this.elements = [];
    this.list = html("div", { class: "tokens", role: "group", "aria-label": label });
    this.element = html("div", { class: "token-row" }, html("h3", {}, label), this.list);
  }

  add(token) {
    this.elements.push(tokenElement(token, this.elements.length, this.onselect));
    this.list.append(this.elements.at(-1));
  }

  /** Show tokens that do not change any more. */
  set(tokens) {
    const focused = this.elements.indexOf(document.activeElement);
    this.elements = tokens.map((token, index) => tokenElement(token, index, this.onselect));
    this.list.replaceChildren(...(tokens.length ? this.elements : [html("span", { class: "empty" }, "(empty)")]));
    if (this.onselect) roving(this.elements);
    this.elements[focused]?.focus();
  }

  /** Shade each token by a weight; null removes the shading. */
  shade(weights) {
    const maximum = Math.max(1e-9, ...(weights ?? [0]));
    this.elements.forEach((element, index) => {
      const weight = weights?.[index] ?? 0;
      element.style.setProperty("--weight", (weight / maximum).toFixed(3));
    });
  }

  select(index) {
    this.elements.forEach((element, position) => {
      if (this.onselect) element.setAttribute("aria-pressed", String(position === index));
    });
  }
}

/** Index of the token with the lowest probability among those with a letter or digit, or among all if none has one. */
export function leastCertain(tokens) {
  const probability = ({ text, probability }, word) => (word.test(text) ? (probability ?? 1) : Infinity);
  const [words, all] = [/[\p{L}\p{N}]/u, /^/].map((word) => tokens.map((token) => probability(token, word)));
  const values = words.some(Number.isFinite) ? words : all;
  return Math.max(0, values.indexOf(Math.min(...values)));
}

/** The text that tokens have together. */
export const joined = (tokens) => tokens.map(({ plain }) => plain).join("").trim();
