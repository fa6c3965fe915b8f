// The left and upper controls of Inspect: which model, at which step, on which text, beside which other one.

import { check, el, field, fill, isEnter, select } from "./dom.js";
import { count } from "./format.js";
import { modelName, parseModel } from "./inspect-data.js";

const precisionLabel = (name) => (name === "float32" ? "as trained" : name);

/** Which model and text. change(patch) is a new view. */
export class Form {
  constructor(change) {
    this.change = change;
    this.prompt = el("textarea", { rows: 2, spellcheck: "false", autocomplete: "off", maxlength: 16000, name: "prompt",
      onkeydown: (event) => { if (isEnter(event)) this.#submit(event); } });
    this.target = el("input", { type: "text", spellcheck: "false", autocomplete: "off", name: "target" });
    this.model = el("div", { class: "pair" });
    this.example = el("div", { class: "pair wide-first" });
    this.facts = el("p", { class: "hint" });
    this.grow = el("button", { type: "button", disabled: true }, "Append likeliest");
    this.root = el("form", { onsubmit: (event) => this.#submit(event) },
      this.model, this.facts, this.example, field("Prompt", this.prompt), field("Target (optional)", this.target),
      el("div", { class: "row actions" }, el("button", { type: "submit", class: "primary" }, "Inspect"), this.grow));
  }

  #submit(event) {
    event.preventDefault();
    const [text, target] = [this.prompt.value, this.target.value];
    if (text === "") return;
    const left = text !== this.#seen.text && target === (this.#seen.target ?? ""); // it belongs to the text before
    this.change({ text, target: left ? null : target || null, row: null, pos: null, src: 0 });
  }

  #seen = {};

  /** Which model it is, before anything is known of it: whatever becomes of its answer, another can be chosen. */
  choose(view, runs) {
    if (this.runs?.value === view.run) return;
    const fresh = (run) => ({ run, step: "best", row: null, split: null, text: null, target: null, ablate: [],
      other: null, pos: null, src: 0, kind: null, layer: null, head: null });
    this.runs = select(runs, view.run, (run) => this.change(fresh(run)), { name: "run" });
    this.precision = el("div", { class: "field" });
    fill(this.model, field("Model", this.runs), this.precision);
  }

  /** Nothing that the model said is left; what the reader wrote is. */
  clear() {
    this.#seen = {};
    this.grow.disabled = true;
    fill(this.facts);
  }

  /** about: what the run offers. */
  draw(view, about) {
    if (view.text !== null) this.prompt.value = view.text; // it stays when the model cannot read it
    const bits = select(about.precisions.map((name) => [name, precisionLabel(name)]), view.precision,
      (precision) => this.change({ precision }), { name: "precision" });
    const held = this.precision.contains(document.activeElement);
    fill(this.precision, ...field("Precision", bits).children);
    if (held) bits.focus();
    const pick = (row) => row !== "" && this.change({ row: Number(row), text: null, target: null, pos: null, src: 0 });
    const listed = about.examples.map(({ row, text }) => [row, text]);
    if (view.text !== null) listed.unshift(["", "your own prompt"]);
    else if (!about.examples.some(({ row }) => row === view.row)) listed.unshift([view.row, `example ${view.row}`]);
    fill(this.example, about.examples.length > 0 && [
      field("Example of the task", select(listed, view.text === null ? view.row : "", pick, { name: "example" })),
      field("Split", select(Object.keys(about.splits), view.split ?? about.split,
        (split) => this.change({ split, row: null, text: null, target: null, pos: null }), { name: "split" })),
    ], about.note && el("p", { class: "note" }, `No examples: ${about.note}`));
  }

  /** What the server made of the question: the text that it read. */
  show(look, append) {
    this.#seen = look;
    this.prompt.value = look.text;
    this.target.value = look.target ?? "";
    this.grow.disabled = look.extended === null;
    this.grow.onclick = append;
    const heads = Object.values(look.kinds).at(-1).heads;
    fill(this.facts, el("span", { id: "parameters" }, count(look.parameters)), " parameters · ",
      `${heads.length} layer${heads.length === 1 ? "" : "s"} × ${Math.max(...heads)} heads`);
  }
}

/** Training time, and another model to compare with. */
export class Controls {
  constructor(change, scrub) {
    this.change = change;
    this.slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Checkpoint", name: "step",
      oninput: () => scrub(this.#stops[this.slider.value]) });
    this.said = el("output", { class: "number" });
    this.time = el("div", { class: "time" }, el("span", { class: "label" }, "Training step"), this.slider, this.said);
    this.kinds = el("div", { class: "segmented", role: "group", "aria-label": "Kind of attention" });
    this.compare = el("div", { class: "row" });
    this.switches = el("div", { class: "row" });
    this.root = el("div", { class: "controls" },
      el("div", { class: "row" }, this.kinds, this.time, this.compare), this.switches);
  }

  #stops = [];

  draw(view, runs, about, look) {
    // Of an example that was watched, training kept more moments than there are checkpoints.
    const seen = view.text === null && view.split === "val" && about.watched.includes(view.row);
    const snapshots = seen && !view.ablate.length && view.precision === "float32" ? about.snapshots : [];
    this.#stops = [...new Set([...about.checkpoints, ...snapshots])].sort((a, b) => a - b);
    this.time.hidden = this.#stops.length < 2;
    const step = { best: about.best, last: about.last }[view.step] ?? Number(view.step);
    this.slider.max = Math.max(0, this.#stops.length - 1);
    this.slider.value = Math.max(0, this.#stops.indexOf(step));
    const kept = about.checkpoints.includes(step);
    const named = step === about.best ? `${step}, the best` : `${step}${kept ? "" : ", snapshot"}`;
    fill(this.said, named);
    this.slider.setAttribute("aria-valuetext", `step ${named}`);
    const kinds = Object.keys(look.kinds);
    this.kinds.hidden = kinds.length < 2;
    fill(this.kinds, kinds.map((kind) => el("button", { type: "button", "aria-pressed": kind === view.kind,
      onclick: () => this.change({ kind, layer: null, head: null }) }, kind)));
    this.#drawCompare(view, runs, about);
    fill(this.switches,
      check("mean of the layer", view.head === "mean", (on) => this.change({ head: on ? "mean" : 0 }),
        { name: "mean" }),
      this.scale = check("auto scale", false, (auto) => this.change({ auto }), { name: "auto" }),
      check("as a table", view.table, (table) => this.change({ table }), { name: "table" }));
  }

  /** Whether the map in view is scaled to its peak: as the address says, or since the peak is low. */
  showScale(auto) { this.scale.querySelector("input").checked = auto; }

  #drawCompare(view, runs, { checkpoints: steps, precisions }) {
    const { run: own, step: now, precision: bits } = view;
    const offered = new Map([["", "nothing"]]);
    const offer = (run, step, precision, text) => offered.set(modelName({ run, step, precision }), text);
    for (const precision of precisions) {
      if (precision !== bits) offer(own, now, precision, precision === "float32" ? "as trained" : `its ${precision}`);
    }
    for (const step of steps) if (String(step) !== now) offer(own, String(step), "float32", `its step ${step}`);
    for (const run of runs) if (run !== own) offer(run, "best", "float32", run);
    const chosen = view.other ? modelName(view.other) : "";
    if (!offered.has(chosen)) offered.set(chosen, chosen);
    const choose = (text) => this.change({ other: parseModel(text), difference: text ? view.difference : false });
    const how = [["side by side", false], ["difference", true]].map(([text, difference]) =>
      el("button", { type: "button", "aria-pressed": view.difference === difference,
        onclick: () => this.change({ difference }) }, text));
    fill(this.compare, field("Compare with", select([...offered], chosen, choose, { name: "compare" })),
      view.other && el("div", { class: "segmented", role: "group", "aria-label": "How to compare" }, how));
  }
}
