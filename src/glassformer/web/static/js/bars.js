// <glass-bars>: what the model would say next, by three; beside it another model's, or before an ablation.

import { el, fill, meter, silent, table } from "./dom.js";
import { three } from "./format.js";

customElements.define("glass-bars", class extends HTMLElement {
  /** {rows: [{word, p, other}], target, caption, names: [ours, theirs] | null} */
  set data({ rows, target, caption, names }) {
    const lines = rows.map(({ word, p, other }) => [
      el("span", { class: word === target ? "word target" : "word", title: word }, word),
      three(p), ...(names ? [three(other)] : []), [meter(p), names && meter(other, "other")]]);
    const head = ["token", { text: names?.[0] ?? "p", n: true }, ...(names ? [{ text: names[1], n: true }] : []),
      silent("bar")];
    fill(this, table({ caption, rows: lines, head }));
  }
});
