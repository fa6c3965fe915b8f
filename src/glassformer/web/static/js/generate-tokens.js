// <glass-spoken>: the prompt, then each generated token on a ground of its probability. One tab stop; arrows move.

import { el, fill } from "./dom.js";
import { four } from "./format.js";

/** Grounds by probability; the number itself is in the label, the hint and the table. */
const LEVELS = [0.9, 0.5, 0.2, 0.05];
export const level = (probability) => LEVELS.findIndex((least) => probability >= least) + 1 || LEVELS.length + 1;

customElements.define("glass-spoken", class extends HTMLElement {
  #tokens = [];
  #buttons = [];
  #prompt = null;

  /** {prompt: [{word}], arrow, tokens: [{word, probability, forced, end}], picked}; tokens that were there stay. */
  set data({ prompt, arrow = false, tokens, picked = null }) {
    const same = this.#prompt === prompt && this.#tokens === tokens && tokens.length >= this.#buttons.length;
    if (!same) {
      this.#buttons = [];
      this.#prompt = prompt;
      this.#tokens = tokens;
      this.list = el("div", { class: "spoken", role: "group",
        "aria-label": "Generated tokens: arrows move, each shows what else could have come" });
      const given = prompt.map(({ word }) => el("span", { class: "word" }, word));
      const to = arrow && el("span", { class: "muted" }, "→");
      fill(this, given.length > 0 && el("div", { class: "given" }, given, to), this.list, this.#legend());
    }
    tokens.slice(this.#buttons.length).forEach((token) => this.#add(token));
    this.querySelector(".legend").hidden = !tokens.length;
    const stop = picked ?? 0;
    this.#buttons.forEach((button, index) => {
      button.tabIndex = index === stop ? 0 : -1;
      button.setAttribute("aria-pressed", String(index === picked));
    });
  }

  #add({ word, probability, forced, end }) {
    const index = this.#buttons.length;
    const told = `${word}, probability ${four(probability)}${forced ? ", given" : ""}${end ? ", the end" : ""}`;
    const button = el("button", { type: "button", class: `p${level(probability)}${forced ? " forced" : ""}`,
      title: told, "aria-label": told, tabindex: -1,
      onclick: () => this.#pick(index), onkeydown: (event) => this.#move(event, index) }, word);
    this.#buttons.push(button);
    this.list.append(button);
  }

  #pick(index) { this.dispatchEvent(new CustomEvent("pick", { detail: index })); }

  #move(event, index) {
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: this.#buttons.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (!this.#buttons[to]) return;
    this.#pick(to);
    this.#buttons[to].focus();
  }

  #legend() {
    const names = [...LEVELS.map((least) => `from ${least}`), "less"];
    return el("p", { class: "note legend" }, "probability ",
      names.map((name, i) => el("span", { class: `key p${i + 1}` }, name)));
  }
});
