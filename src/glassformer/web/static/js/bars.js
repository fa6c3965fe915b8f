// <glass-bars>: what the model would say next, by probability; beside it another model's, or before an ablation.

import { el, fill, table } from "./dom.js";
import { fixed } from "./format.js";

export class GlassBars extends HTMLElement {
  /** {rows: [{word, p, other}], target, caption, names: [ours, theirs] | null} */
  set data({ rows, target, caption, names }) {
    const bar = (value, other) => {
      const meter = el("span", { class: other ? "meter other" : "meter" });
      meter.style.width = `${100 * Math.max(0, value ?? 0)}%`;
      return meter;
    };
    const lines = rows.map(({ word, p, other }) => [
      el("span", { class: word === target ? "word target" : "word" }, word),
      fixed(p), ...(names ? [fixed(other)] : []), [bar(p), names && bar(other, true)]]);
    const head = ["token", { text: names?.[0] ?? "p", n: true }, ...(names ? [{ text: names[1], n: true }] : []),
      { text: el("span", { class: "visually-hidden" }, "bar") }];
    fill(this, table({ caption, rows: lines, head }));
  }
}

customElements.define("glass-bars", GlassBars);
