// <glass-lens>: what each sublayer would answer if it were the last, and how far that is from the answer.

import { el, fill, meter, table } from "./dom.js";
import { fixed, three } from "./format.js";

customElements.define("glass-lens", class extends HTMLElement {
  /** {rows: [{name, layer, top: [{word, p}], kl}], target, caption} */
  set data({ rows, target, caption }) {
    const most = Math.max(1e-9, ...rows.map(({ kl }) => kl ?? 0));
    const cell = ({ word, p } = {}) => (word === undefined ? "" : el("span",
      { class: word === target ? "word target" : "word", title: `${word} p ${three(p)}` }, word));
    const made = rows.map(({ name, top, kl, layer }) => {
      const over = { onpointerenter: () => this.#tell(layer), onpointerleave: () => this.#tell(null) };
      return el("tr", { "data-layer": layer, ...over }, el("th", { scope: "row" }, name), el("td", {}, cell(top[0])),
        el("td", { class: "n muted" }, fixed(top[0]?.p, 2)), el("td", {}, cell(top[1])), el("td", {}, cell(top[2])),
        el("td", { class: "n" }, three(kl), meter(kl / most, "kl")));
    });
    const head = ["after", "1st", { text: "p", n: true }, "2nd", "3rd", { text: "KL, nats", n: true }];
    fill(this, table({ caption, rows: made, head }));
  }

  #tell(layer) { this.dispatchEvent(new CustomEvent("over", { detail: layer })); }
});
