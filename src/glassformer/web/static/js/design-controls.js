// The controls of Design, one for each option that the server lists. Those that matter most are sliders: a range to
// play with, and a text box to be exact. The others are in a drawer, made from their kind, choices and help.

import { check, el, field, fill, fresh, select } from "./dom.js";
import { count, fixed, percent } from "./format.js";

/** Positions 0 … 1000 of a slider that runs from low to high by equal factors; values are round numbers. */
const log = (low, high, digits = 3) => ({
  at: (value) => Math.round(1000 * Math.log(value / low) / Math.log(high / low)),
  of: (position) => Number((low * (high / low) ** (position / 1000)).toPrecision(digits)),
  min: 0, max: 1000, step: 1,
});
const linear = (low, high, step, digits) => ({
  at: (value) => value, of: (position) => Number(position.toFixed(digits)), min: low, max: high, step,
});
const powers = (low, high) =>
  ({ at: (value) => Math.round(Math.log2(value)), of: (position) => 2 ** position, min: low, max: high, step: 1 });

const plain = (text) => text.replace(/[,_\s]/g, "");
/** The scale of each slider, how its value is written and read, and its snap points. */
const SLIDERS = {
  params: { scale: log(10_000, 1_000_000_000), show: count, read: plain,
    snaps: [[1e6, "1M"], [5e6, "5M"], [10e6, "10M"], [25e6, "25M"], [100e6, "100M"]] },
  embedding_ratio: { scale: linear(0.02, 0.9, 0.005, 3), show: (x) => percent(x, 1), words: { usual: 0.35 },
    read: (text) => (/%/.test(text) ? text.replace(/\s/g, "") : text.trim()),
    snaps: [["usual", "usual"], [0.25, "25 %"], [0.35, "35 %"], [0.45, "45 %"], ["free", "free"]] },
  glu_expansion: { scale: linear(1, 6, 0.01, 2), show: (x) => `${fixed(x, 2)}×`,
    read: (text) => text.replace(/[×x\s]/g, ""),
    snaps: [[2, "2.0"], [2.66, "2.66"], [3, "3.0"], [4, "4.0"], ["free", "free"]] },
  vocab: { scale: log(64, 262_144), show: count, read: plain,
    snaps: [[256, "256"], [8000, "8k"], [16_000, "16k"], [32_000, "32k"]] },
  heads: { scale: linear(1, 64, 1, 0), show: count, read: plain,
    snaps: [[4, "4"], [8, "8"], [16, "16"], ["any", "any"]] },
  length: { scale: powers(5, 15), show: count, read: plain,
    snaps: [[128, "128"], [512, "512"], [2048, "2,048"]] },
};
/** Options with a control of their own below the sliders. */
const PLACED = new Set(["tied", "exact_ratio", "exact_expansion", "multiple", "tolerance"]);

const KEEP = [["total", "the total; the two as nearly as it allows"], ["ratio", "the ratio, to the nearest width"],
  ["expansion", "the expansion, to the nearest d_ff"], ["both", "both, if any design has them"]];
const FLAGS = { total: {}, ratio: { exact_ratio: true }, expansion: { exact_expansion: true },
  both: { exact_ratio: true, exact_expansion: true } };
const kept = ({ exact_ratio: ratio, exact_expansion: expansion }) =>
  (ratio ? (expansion ? "both" : "ratio") : expansion ? "expansion" : "total");

class Slider {
  constructor({ name, label, help }, { move, settle }) {
    const spec = SLIDERS[name];
    const { scale, snaps } = spec;
    Object.assign(this, { name, spec, scale });
    const id = fresh("slider");
    this.range = el("input", { type: "range", id, name, title: help, min: scale.min, max: scale.max, step: scale.step,
      oninput: () => move({ [name]: scale.of(Number(this.range.value)) }),
      onchange: () => settle({ [name]: scale.of(Number(this.range.value)) }) });
    this.box = el("input", { type: "text", name: `${name}-exact`, autocomplete: "off", spellcheck: "false",
      "aria-label": `${label}, exactly`,
      onchange: () => settle({ [name]: spec.read(this.box.value) }) });
    this.snaps = snaps.map(([value, text]) => [value, el("button", { type: "button", "aria-label": `${label} ${text}`,
      onclick: () => settle({ [name]: value }) }, text)]);
    this.root = el("div", { class: "slider" },
      el("div", { class: "row spread" }, el("label", { for: id }, label), this.box), this.range,
      el("div", { class: "snaps" }, this.snaps.map(([, button]) => button)));
  }

  draw(value) {
    const number = Number(value);
    const isWord = Number.isNaN(number);
    const text = isWord ? String(value) : this.spec.show(number);
    if (document.activeElement !== this.box) this.box.value = text;
    const place = isWord ? this.spec.words?.[value] : number;
    if (place !== undefined && document.activeElement !== this.range) this.range.value = this.scale.at(place);
    this.range.setAttribute("aria-valuetext", text);
    this.range.classList.toggle("unset", isWord);
    for (const [snap, button] of this.snaps) button.setAttribute("aria-pressed", `${String(snap) === String(value)}`);
  }
}

/**
 * options: what the server lists. move(patch): while a slider is dragged; settle(patch): a choice that the address
 * keeps. A value of undefined is the option's default.
 */
export class Controls {
  constructor(options, wishes, { move, settle }) {
    this.settle = settle;
    this.sliders = options.filter(({ name }) => name in SLIDERS).map((option) => new Slider(option, { move, settle }));
    this.others = options.filter(({ name }) => !(name in SLIDERS) && !PLACED.has(name));
    this.unlimited = Object.fromEntries(Object.values(wishes).flat().map((name) => [name, undefined]));
    this.rest = el("div", { class: "rest" });
    this.drawer = el("div", { class: "rest" });
    this.root = el("div", { class: "controls" }, this.sliders.map(({ root }) => root), this.rest,
      el("details", { class: "more" }, el("summary", {}, "More options"), this.drawer));
  }

  draw(view) {
    for (const slider of this.sliders) slider.draw(view[slider.name]);
    const active = document.activeElement;
    const focused = this.rest.contains(active) || this.drawer.contains(active) ? active.name : null;
    fill(this.drawer, this.others.map((option) => this.#control(option, view[option.name])));
    fill(this.rest,
      check("tied: the head is the token embedding", view.tied !== false,
        (tied) => this.settle({ tied: tied ? undefined : false }), { name: "tied" }),
      field("When they cannot all hold, keep",
        select(KEEP, kept(view), (value) => this.settle({ ...this.unlimited, ...FLAGS[value] }), { name: "keep" })),
      field("Widths are multiples of", select([["", "what int4 takes, if near"], ["1", "anything"], 8, 16, 32, 64],
        view.multiple ?? "", (value) => this.settle({ multiple: Number(value) || undefined }), { name: "multiple" })),
      field("The count may be off by",
        select([...new Set([0.0005, 0.001, 0.005, 0.01, 0.05, view.tolerance ?? 0.005])].map((each) =>
          [String(each), `${Number((100 * each).toPrecision(4))} %`]), String(view.tolerance ?? 0.005),
      (value) => this.settle({ tolerance: value === "0.005" ? undefined : Number(value) }), { name: "tolerance" })),
      this.#limits(view));
    if (focused) this.root.querySelector(`.rest [name="${focused}"]`)?.focus();
  }

  #control({ name, label, help, kind, choices, default: usual }, value = usual) {
    const settle = (chosen) => this.settle({ [name]: chosen === usual || chosen === "" ? undefined : chosen });
    if (kind === "flag") return check(label, value, settle, { name, title: help });
    const all = usual === null ? [["", "as the shape has it"], ...choices] : choices; // "" is the default
    if (kind === "choice") return field(label, select(all, value ?? "", settle, { name }), { hint: help });
    const box = el("input", { type: "text", name, value: value ?? "", autocomplete: "off", spellcheck: "false",
      onchange: (event) => this.settle({ [name]: event.target.value.trim() || undefined }) });
    return field(label, box, { hint: help });
  }

  /** Settings that came by a button or a link, each with a way to take it back. */
  #limits(view) {
    const names = new Set(this.others.map(({ name }) => name));
    const others = Object.entries(view).filter(([name, value]) => names.has(name) && value !== undefined);
    return others.length > 0 && el("div", { class: "limits" }, el("span", { class: "label" }, "And"),
      others.map(([name, value]) =>
      el("button", { type: "button", class: "chip", "aria-label": `Drop ${name.replaceAll("_", " ")} ${value}`,
        onclick: () => this.settle({ [name]: undefined }) }, `${name.replaceAll("_", " ")} ${value} ✕`)));
  }
}
