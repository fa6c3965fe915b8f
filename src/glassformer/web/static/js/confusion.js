// <glass-confusion>: targets against predictions. Every cell prints its count and its share of
// the row; the ground only repeats the share. Arrows move, Enter opens the cell's examples.

import { el, fill } from "./dom.js";
import { count, percent } from "./format.js";

const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

customElements.define("glass-confusion", class extends HTMLElement {
  #cells = [];

  /** {group, rows, columns, counts, shares, chosen: {target, predicted} | null} */
  set data({ group, rows, columns, counts, shares, chosen }) {
    const focused = this.contains(document.activeElement) ? document.activeElement.dataset : null;
    const cell = (target, predicted, i, j) => {
      const here = chosen?.target === target && chosen?.predicted === predicted;
      const right = target === predicted;
      const button = el("button", {
        type: "button", class: right ? "cell right" : "cell", tabindex: -1,
        "aria-pressed": here, "data-row": i, "data-column": j,
        "aria-label": `target ${target}, predicted ${predicted}: `
          + `${count(counts[i][j])}, ${percent(shares[i][j])} of the row`,
        disabled: counts[i][j] === 0,
        onclick: () => this.dispatchEvent(new CustomEvent("cell", { detail: { target, predicted } })),
      }, counts[i][j] === 0 ? el("span", { class: "none" }, "·") : [
        el("span", { class: "count" }, count(counts[i][j])), el("span", { class: "share" }, percent(shares[i][j]))]);
      button.style.setProperty("--share", shares[i][j].toFixed(4));
      return button;
    };
    this.#cells = rows.map((target, i) => columns.map((predicted, j) => cell(target, predicted, i, j)));
    const all = this.#cells.flat();
    const first = all.find((each) => each.getAttribute("aria-pressed") === "true")
      ?? all.find((each) => !each.disabled);
    if (first) first.tabIndex = 0;
    fill(this, el("table", { class: "confusion", onkeydown: (event) => this.#key(event) },
      el("caption", { class: "visually-hidden" }, `By ${group}: rows are targets, columns predictions`),
      el("thead", {}, el("tr", {}, ["target", ...columns].map((name) => el("th", { scope: "col" }, name)),
        el("th", { scope: "col", class: "n" }, "all"))),
      el("tbody", {}, rows.map((name, i) => el("tr", {}, el("th", { scope: "row" }, name),
        this.#cells[i].map((button) => el("td", {}, button)),
          el("td", { class: "n" }, count(counts[i].reduce((a, b) => a + b, 0))))))));
    if (focused?.row !== undefined) this.#cells[focused.row]?.[focused.column]?.focus();
  }

  #key(event) {
    const { row, column } = event.target.dataset;
    if (row === undefined || !MOVES[event.key]) return;
    event.preventDefault();
    let [i, j] = [Number(row), Number(column)];
    const [down, along] = MOVES[event.key];
    do { i += down; j += along; } while (this.#cells[i]?.[j]?.disabled);
    const next = this.#cells[i]?.[j];
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
});
