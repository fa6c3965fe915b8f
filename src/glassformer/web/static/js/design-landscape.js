// <glass-landscape>: the designs of neighbouring wishes, ratio by expansion. One tab stop; arrows move, Enter chooses.

import { el, fill } from "./dom.js";
import { count, fixed, percent } from "./format.js";

const LEVELS = 5; // grounds between "met" and "far off": classes, so that the theme decides the colours

customElements.define("glass-landscape", class extends HTMLElement {
  #cells = [];
  #axes = null;
  #wish = null;

  connectedCallback() {
    this.note ??= el("p", { class: "note", "aria-live": "polite" });
    this.table ??= el("table",
      { class: "landscape", role: "grid", "aria-label": "Layers × d_model by wished ratio and expansion" });
    if (!this.children.length) this.append(el("div", { class: "scroll" }, this.table), this.note);
  }

  /** {ratios, expansions, most}: an empty grid to be filled. */
  set axes({ ratios, expansions, most }) {
    this.#axes = { ratios, expansions, most };
    const cell = (glu, row) => (ratio, column) => el("button", { type: "button", tabindex: -1, class: "waiting",
      onclick: () => this.dispatchEvent(new CustomEvent("pick", { detail: { ratio, glu } })),
      onkeydown: (event) => this.#move(event, row, column), onfocus: () => this.#say(row, column),
      onmouseenter: () => this.#say(row, column) }, "…");
    this.#cells = expansions.map((glu, row) => ratios.map(cell(glu, row)));
    fill(this.table,
      el("thead", {}, el("tr", { role: "row" }, el("th", { scope: "col", role: "columnheader" }, "GLU ╲ ratio"),
        ratios.map((ratio) => el("th", { scope: "col", role: "columnheader" }, percent(ratio, 0))))),
      el("tbody", {}, expansions.map((glu, row) => el("tr", { role: "row" },
        el("th", { scope: "row", role: "rowheader" }, fixed(glu, 2)),
        this.#cells[row].map((cell) => el("td", { role: "gridcell" }, cell))))));
    fill(this.note, "Click a cell, or move with the arrows and press Enter, to request its pair.");
    this.#mark();
  }

  /** One answer of the server: {row, column, cell, late}. */
  put({ row, column, cell, late }) {
    const button = this.#cells[row][column];
    const { most, ratios, expansions } = this.#axes;
    button.answer = cell;
    button.late = late;
    button.className = cell ? `far-${Math.min(LEVELS, Math.ceil(LEVELS * cell.drift / most))}` : "none";
    button.textContent = cell ? `${cell.n_layers}×${cell.d_model}` : late ? "?" : "none";
    button.setAttribute("aria-label",
      `ratio ${percent(ratios[column], 0)}, expansion ${expansions[row]}: ${this.#words(cell, late)}`);
  }

  set wish({ ratio, glu }) {
    this.#wish = { ratio: Number(ratio), glu: Number(glu) };
    this.#mark();
  }

  #words(cell, late) {
    if (late) return "takes too long to solve here";
    if (!cell) return "no design";
    return `${count(cell.n_layers)} layers of width ${count(cell.d_model)}, ${count(cell.params)} parameters, `
      + `drift ${fixed(cell.drift, 1)}`;
  }

  #mark() {
    if (!this.#axes || !this.#wish) return;
    const near = (values, wish) => values.findIndex((value) => Math.abs(value - wish) < 1e-9);
    const [column, row] = [near(this.#axes.ratios, this.#wish.ratio), near(this.#axes.expansions, this.#wish.glu)];
    const stop = this.#cells[Math.max(0, row)][Math.max(0, column)];
    this.#cells.flat().forEach((cell) => {
      cell.tabIndex = cell === stop ? 0 : -1;
      cell.setAttribute("aria-pressed", String(row >= 0 && column >= 0 && cell === stop));
    });
  }

  #move(event, row, column) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const next = step && this.#cells[row + step[0]]?.[column + step[1]];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    if (!next) return;
    for (const cell of this.#cells.flat()) cell.tabIndex = cell === next ? 0 : -1;
    next.focus();
  }

  #say(row, column) {
    const { ratios, expansions } = this.#axes;
    const { answer, late } = this.#cells[row][column];
    if (answer === undefined) return;
    fill(this.note, `${percent(ratios[column], 0)} and ${expansions[row]}: ${this.#words(answer, late)}`);
  }
});
