// <glass-divergence>: bars by position, one colour a precision, on one scale; the words below are the buttons.

import { el, fill, svg } from "./dom.js";
import { short } from "./format.js";

const HEIGHT = 120;
const WIDE = 30;
const SHORT = 3; // letters that fit into a column; longer words are written upwards

customElements.define("glass-divergence", class extends HTMLElement {
  /** {words, positions, selected, series: [{name, values}], answer} */
  set data({ words, positions, selected, series, answer }) {
    const most = Math.max(...series.flatMap(({ values }) => values), 1e-12);
    const told = (at) => {
      const each = series.map(({ name, values }) => `${name} ${short(values[at])} nats`);
      return `position ${positions[at]} ${words[positions[at]]}: ${each.join(", ")}`;
    };
    const each = (WIDE - 8) / series.length;
    const bars = positions.flatMap((position, at) => series.map(({ values }, i) => {
      const height = Math.max(values[at] > 0 ? 1 : 0, HEIGHT * values[at] / most);
      return svg("rect", { class: `precision-${i + 1}`, x: at * WIDE + 4 + i * each, y: HEIGHT - height,
        width: each - 1, height });
    }));
    const width = positions.length * WIDE;
    const held = this.contains(document.activeElement);
    const buttons = positions.map((position, at) => el("button", { type: "button",
      tabindex: position === selected ? 0 : -1, "aria-pressed": String(position === selected),
      title: told(at), "aria-label": told(at), onclick: () => this.#pick(position),
      onkeydown: (event) => {
        const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: positions.length - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        event.stopPropagation();
        if (positions[to] !== undefined) { this.focusNext = true; this.#pick(positions[to]); }
      } }, words[position]));
    const names = series.map(({ name }, i) => el("span", { class: "key" },
      el("span", { class: `swatch precision-${i + 1}`, "aria-hidden": "true" }), name));
    const isTall = positions.some((position) => words[position].length > SHORT);
    const before = this.querySelector(".scroll")?.scrollLeft ?? 0;
    fill(this, el("p", { class: "note legend" }, names, `full height is ${short(most)} nats`),
      el("div", { class: "scroll" }, el("div", { class: "chart" },
        svg("svg", { width, height: HEIGHT + 1, viewBox: `0 0 ${width} ${HEIGHT + 1}`, "aria-hidden": "true" },
          svg("line", { x1: 0, x2: width, y1: HEIGHT + 0.5, y2: HEIGHT + 0.5, class: "axis" }), bars),
        el("div", { class: isTall ? "words tall" : "words", role: "group", "aria-label": "Positions" }, buttons))),
      el("p", { class: "note", id: "told" }, answer ? "Read once: " : "", told(positions.indexOf(selected))));
    this.querySelector(".scroll").scrollLeft = before;
    if (held || this.focusNext) buttons[positions.indexOf(selected)]?.focus();
    this.focusNext = false;
  }

  #pick(position) { this.dispatchEvent(new CustomEvent("pick", { detail: position })); }
});
