// <glass-norms>: how long the residual stream is after each sublayer, and what attention and MLP add to it.

import { el, fill, svg, table } from "./dom.js";
import { fixed, short } from "./format.js";

const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [320, 164, 38, 8, 60];

customElements.define("glass-norms", class extends HTMLElement {
  /** {rows: [{name, residual, added}]}: added is what this sublayer wrote, null for the embedding */
  set data({ rows, caption }) {
    const most = Math.max(1e-9, ...rows.flatMap(({ residual, added }) => [residual ?? 0, added ?? 0]));
    const step = (WIDTH - LEFT) / rows.length;
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
    const bar = (value, x, width, name) => typeof value === "number" && svg("rect", { class: name, rx: 1.5,
      x: x.toFixed(1), y: y(value).toFixed(1), width: width.toFixed(1),
      height: (HEIGHT - BOTTOM - y(value)).toFixed(1) });
    const every = Math.ceil(rows.length / 20);
    const told = rows.map(({ name, residual }) => `${name} ${short(residual)}`).join(", ");
    const rules = [0, most / 2, most].map((value) => [
      svg("line", { x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value), class: "rule" }),
      svg("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, short(value))]);
    const bars = rows.map(({ name, residual, added }, i) => [
      bar(residual, LEFT + (i + 0.12) * step, 0.42 * step, "residual"),
      bar(added, LEFT + (i + 0.58) * step, 0.26 * step, "added"),
      i % every === 0 && svg("text", { "text-anchor": "end",
        transform: `translate(${LEFT + (i + 0.45) * step + 4} ${HEIGHT - BOTTOM + 7}) rotate(-90)` }, name)]);
    const key = (name, text) => [el("span", { class: `key ${name}` }), ` ${text} `];
    const head = ["after", { text: "residual", n: true }, { text: "written", n: true }];
    const seen = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${caption}: ${told}` };
    fill(this, svg("svg", seen, rules, bars),
      el("p", { class: "legend", "aria-hidden": true },
        key("residual", "residual stream"),
        rows.some(({ added }) => added !== null) && key("added", "written by this sublayer")),
      el("details", {}, el("summary", {}, "as a table"), table({ caption, head,
        rows: rows.map(({ name, residual, added }) => [name, fixed(residual), fixed(added)]) })));
  }
});
