// The enlarged head of the Inspect page: one map, two side by side, or their difference, on one scale.

import { el, fill, scrolled } from "./dom.js";
import { fixed } from "./format.js";
import { strongest } from "./heat.js";
import { legend, mapTable } from "./inspect-parts.js";

const LARGE = 24 * 24; // cells; in a causal map the first rows have few keys, and would set the scale alone
const LOW = 0.3; // a peak below this leaves a pale map on a scale from 0 to 1
const WIDE = 20; // tokens from which a map gets the whole width

/** The value that auto scale draws darkest: the largest; of a large map all but a hundredth lie below. */
function darkest({ values }) {
  const sizes = values.map(Math.abs).filter((value) => !Number.isNaN(value)).sort();
  return sizes.at(values.length > LARGE ? Math.floor(0.99 * sizes.length) : -1);
}

export class MapView {
  #shown = [];
  #scale = { top: 1, difference: false };

  /** pick(row): a row was chosen; over(cell or null): one is pointed at. */
  constructor({ pick, over }) {
    this.tell = { pick, over };
    this.title = el("h3", { id: "head-title" });
    this.legend = el("div", { class: "scale" });
    this.maps = el("div", { class: "maps" });
    this.cell = el("p", { class: "cell", id: "cell" });
    this.beside = el("div", { class: "beside" }, this.cell);
    this.frame = el("div", { class: "look" }, this.maps, this.beside);
    this.table = scrolled("The map as a table");
  }

  get nodes() {
    return [el("div", { class: "row spread head-line" }, this.title, this.legend), this.frame, this.table];
  }

  get heats() { return [...this.maps.querySelectorAll("glass-heat")]; }

  /** maps: [{values, shape, exact, rows, columns, row, name, caption}] */
  draw(maps, { auto, table, difference, title }) {
    const peak = Math.max(1e-6, ...maps.map(darkest));
    this.auto = auto ?? peak < LOW;
    this.#scale = { top: this.auto ? peak : 1, difference };
    this.#shown = maps;
    fill(this.title, title);
    this.drawLegend();
    this.frame.classList.toggle("wide", maps.length > 1 || maps[0].shape[1] > WIDE);
    if (this.maps.children.length !== maps.length || !this.heats.length) this.#build(maps.length);
    maps.forEach((map, i) => {
      const figure = this.maps.children[i];
      fill(figure.querySelector("figcaption"), maps.length > 1 && map.caption);
      figure.querySelector(".scroll").setAttribute("aria-label", `Map: ${map.caption}`);
      const label = `${map.name}${map.row === null ? "" : `: ${strongest(map, map.row)}`}`;
      this.heats[i].data = { ...map, top: this.#scale.top, label };
    });
    this.say(null);
    this.table.hidden = !table;
    fill(this.table, table && mapTable(maps[0]));
  }

  #build(count) {
    const heat = () => el("glass-heat", { oncell: ({ detail }) => this.tell.over(detail),
      onpick: ({ detail }) => this.tell.pick(detail.row) });
    fill(this.maps, [...Array(count)].map(() => el("figure", {}, el("figcaption"),
      el("div", { class: "scroll", tabindex: 0, role: "group" }, heat()))));
  }

  /** The weight that has the strongest colour. */
  get top() { return this.#scale.top; }

  drawLegend() { legend(this.legend, this.#scale); }

  set hover(cell) { for (const heat of this.heats) heat.hover = cell; }

  /** One cell in words; without one, the strongest of the row in view. */
  say(cell) {
    const [map] = this.#shown;
    if (!cell) { fill(this.cell, map.row === null ? "" : strongest(map, map.row)); return; }
    const value = map.values[cell.row * map.shape[1] + cell.column];
    const written = Number.isNaN(value) ? "masked" : `${map.exact ? "" : "≈ "}${fixed(value)}`;
    const word = (text) => el("bdi", {}, text); // a word from right to left turns nothing but itself
    fill(this.cell, "‘", word(map.rows[cell.row]), `’ (position ${cell.row}) to ‘`, word(map.columns[cell.column]),
      `’ (position ${cell.column}): ${written}`);
  }
}
