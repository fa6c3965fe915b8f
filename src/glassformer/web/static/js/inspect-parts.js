// Parts of the Inspect page that are too small to be elements: facts, ablation, ranking, a map in numbers, the legend.

import { el, fill, meter, silent, table } from "./dom.js";
import { fixed, nats, signed, three } from "./format.js";
import { ramp } from "./ramp.js";

const WHOLE = 40; // tokens up to which a map is written out; beyond, the strongest cells of one row

/** Target, loss, entropy; the same of another model. */
export function facts(look, at, otherName) {
  const fact = (name, value, id) => value !== "–" && value !== undefined
    && el("div", {}, el("dt", {}, name), el("dd", { class: "number", id }, value));
  const several = look.losses.filter((loss) => loss !== null).length > 1;
  return el("dl", { class: "facts" }, fact("target", at.target?.word, "target"),
    fact("loss", nats(at.loss), "loss-here"), fact("entropy", nats(at.entropy), "entropy"),
    several && fact("mean loss", nats(look.loss), "loss"),
    at.against && [fact(`loss, ${otherName}`, nats(at.against.loss), "loss-against"),
      fact(`KL from ${otherName}`, nats(at.against.kl), "kl-against")]);
}

/** What the ablated heads did: loss before and after, the prediction before and after. */
export function effect(look, { before, next }) {
  if (!look.ablated.length || !before) return null;
  const number = (text, id) => el("b", { class: "number", id }, text);
  const word = ({ word: text, p }) => [el("b", { class: "word" }, text), ` ${three(p)}`];
  const change = look.loss !== null && el("p", {}, "loss ", number(three(look.loss_before), "loss-before"), " → ",
    number(three(look.loss), "loss-after"), ` nats (${signed(look.loss - look.loss_before)})`);
  return el("div", { class: "effect" }, change,
    el("p", {}, "predicted ", word(before.top), " → ", word(next[0])),
    el("p", {}, "KL from before ", number(nats(before.kl), "kl-before")));
}

/** Every head by its effect; a click shows it, a second button ablates it. */
export function rankingTable({ by, rows }, chosen, { pick, toggle }) {
  const most = Math.max(1e-9, ...rows.map((each) => Math.abs(each.effect)));
  const digits = most < 0.01 ? 6 : 3; // of a model that is sure, the effects are small, and not all zero
  const button = (text, label, run) =>
    el("button", { type: "button", class: "quiet small", "aria-label": label, onclick: run }, text);
  return table({
    caption: `Heads by ${by === "loss" ? "change of the loss" : "divergence"} when ablated`,
    head: ["head", { text: by === "loss" ? "Δ loss, nats" : "KL, nats", n: true }, silent("bar"), silent("ablate")],
    rows: rows.map(({ head, effect: size }) => el("tr", { class: head === chosen ? "marked" : null },
      el("th", { scope: "row" }, button(head, `Show ${head}`, () => pick(head))),
      el("td", { class: "n" }, by === "loss" ? signed(size, digits) : fixed(size, digits)),
      el("td", { class: "wide" }, meter(Math.abs(size) / most, size < 0 ? "minus" : "")),
      el("td", { class: "n" }, button("✕", `Ablate ${head}`, () => toggle(head))))),
  });
}

/** The map in numbers: all of it if it is small, else the strongest cells of the row in view. */
export function mapTable({ values, shape: [T, S], rows, columns, row, name }) {
  const cell = (i, j) => (Number.isNaN(values[i * S + j]) ? "" : fixed(values[i * S + j]));
  if (T <= WHOLE && S <= WHOLE) {
    return table({ caption: `${name}: row = from, column = to; empty = masked`,
      head: ["from \\ to", ...columns.map((text) => ({ text, n: true }))],
      rows: rows.map((word, i) => [word, ...columns.map((_, j) => cell(i, j))]) });
  }
  const size = (j) => Math.abs(values[row * S + j]);
  const order = [...Array(S).keys()].filter((j) => !Number.isNaN(size(j))).sort((a, b) => size(b) - size(a));
  return table({ caption: `${name}: what position ${row} (${rows[row]}) attends to, the ${WHOLE} strongest`,
    head: ["to", { text: "position", n: true }, { text: "weight", n: true }],
    rows: order.slice(0, WHOLE).map((j) => [columns[j], String(j), cell(row, j)]) });
}

/** The scale, drawn with the ramp that the picture is drawn with. */
export function legend(box, { top, difference }) {
  const strip = el("canvas", { width: 96, height: 1, "aria-hidden": true });
  const context = strip.getContext("2d");
  for (let x = 0; x < 96; x += 1) {
    context.fillStyle = `rgb(${ramp(difference ? x / 47.5 - 1 : x / 95)})`;
    context.fillRect(x, 0, 1, 1);
  }
  const end = top === 1 ? "1" : fixed(top, top < 0.1 ? 3 : 2);
  fill(box, el("span", {}, difference ? `−${end}` : "0"), strip, el("span", {}, difference ? `+${end}` : end),
    top < 1 && el("span", {}, "(scaled to the peak)"));
}
