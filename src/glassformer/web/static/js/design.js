// Design: a parameter budget with sliders. The server lists the options and solves; this page asks, one question at a
// time, and draws the answer.

import { el, fill, put, scrolled, silent, table } from "./dom.js";
import { Controls } from "./design-controls.js";
import "./design-landscape.js";
import { count, fixed, percent } from "./format.js";
import { perFrame } from "./state.js";

const RESTING = 250; // milliseconds without a change before the landscape is requested
/** Parts of the bar, in the order of the table; the line "layers" is the sum of three of them. */
const DRAWN = ["token embedding", "position embedding", "head", "attention", "feed-forward", "norms", "final norm"];

const NUMBERS = ["parameters", "off", "d_model", "d_ff", "layers", "ratio", "GLU", "int4"]; // of each alternative
const query = (view) => Object.fromEntries(Object.entries(view).filter(([, value]) => value !== undefined)
  .map(([name, value]) => [name, String(value)]));
const keep = (object, wanted) => Object.fromEntries(Object.entries(object).filter(([name]) => wanted(name)));

/** What the server says of the options: which are always shown, with which defaults, and which are true or false. */
class Options {
  constructor({ options, wishes }) {
    Object.assign(this, { all: options, wishes });
    this.defaults = Object.fromEntries(options.filter(({ shown }) => shown).map((each) => [each.name, each.default]));
    this.flags = new Set(options.filter(({ kind }) => kind === "flag").map(({ name }) => name));
    this.wished = new Set(Object.entries(wishes).flat(2));
  }

  /** The address as values. */
  parse(params) {
    const number = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
    const typed = ([name, text]) => [name, this.flags.has(name) ? ["1", "true"].includes(text) : number(text)];
    return { ...this.defaults, ...Object.fromEntries(Object.entries(params).map(typed)) };
  }

  /** Only what differs from where the page begins. */
  address(view) {
    return Object.fromEntries(Object.entries(view)
      .filter(([name, value]) => value != null && this.defaults[name] !== value)
      .map(([name, value]) => [name, typeof value === "boolean" ? Number(value) : String(value)]));
  }
}

class Design {
  constructor(root, context, options) {
    Object.assign(this, { root, context, options });
    const settle = (patch) => this.settle(patch);
    this.controls = new Controls(options.all, options.wishes, { move: (patch) => this.#move(patch), settle });
    this.verdict = el("p", { class: "verdict", id: "verdict" });
    this.portable = el("div", { id: "portable" });
    this.bar = el("div", { "aria-hidden": "true" });
    this.title = el("h2", { id: "places-title" }, "Where the parameters are");
    this.found = el("div", { class: "found" });
    this.below = el("div", { class: "stack" });
    this.land = el("glass-landscape");
    this.land.addEventListener("pick", ({ detail }) => settle({ ...this.controls.unlimited,
      embedding_ratio: detail.ratio, glu_expansion: detail.glu }));
    fill(root,
      el("section", { class: "panel answer", "aria-labelledby": "answer-title" },
        el("h2", { id: "answer-title", class: "visually-hidden" }, "Answer"), this.verdict, this.portable, this.bar),
      el("div", { class: "two" },
        el("section", { class: "panel budget", "aria-labelledby": "budget-title" },
          el("h2", { id: "budget-title" }, "Budget"), this.controls.root),
        el("div", { class: "stack" },
          el("section", { class: "panel", "aria-labelledby": "places-title" }, this.title, this.found),
          this.below,
          el("section", { class: "panel", "aria-labelledby": "land-title" },
            el("h2", { id: "land-title" }, "What other wishes would give", el("span", { class: "muted" },
              " layers × d_model; the darker a cell, the less both wishes are met")), this.land))));
    this.solveSoon = perFrame(() => this.#solve());
  }

  #move(patch) {
    this.view = { ...this.view, ...patch };
    this.controls.draw(this.view);
    this.#ask();
  }

  settle(patch) {
    const address = this.options.address({ ...this.view, ...patch });
    this.loud = true;
    this.context.go(address);
    this.update(address); // the address may be the same: a slider dragged and brought back
  }

  update(params) {
    this.view = this.options.parse(params);
    this.controls.draw(this.view);
    this.#ask();
  }

  #ask() {
    this.wanted = JSON.stringify(query(this.view));
    this.solveSoon();
  }

  /** One request at a time; of those made meanwhile, the newest is next. */
  async #solve() {
    if (this.flying || this.wanted === this.solved) return;
    this.flying = true;
    const question = this.wanted;
    try {
      const answer = await this.context.api.get(this.context.api.query("/api/design", JSON.parse(question)));
      if (this.gone) return;
      this.answer = answer;
      this.context.alert(null);
      const shown = keep(answer.options, (name) => name in this.options.defaults); // 5M is a number now
      if (question === this.wanted) this.controls.draw({ ...this.view, ...shown });
      this.#draw(answer);
    } catch (error) {
      if (this.gone) return;
      this.answer = null;
      this.#refused(error);
    } finally {
      this.flying = false;
      this.solved = question;
      this.root.dataset.ready = question;
    }
    if (this.wanted !== question) this.solveSoon();
    else this.#rest();
  }

  #rest() {
    if (this.loud) this.context.announce(this.verdict.textContent);
    this.loud = false;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const body = keep(query(this.view), (name) => !this.options.wished.has(name));
      this.land.wish = { ratio: this.view.embedding_ratio, glu: this.view.glu_expansion };
      if (!this.answer || JSON.stringify(body) === this.surveyed) return;
      this.surveyed = JSON.stringify(body);
      this.#survey(body).catch((error) => { this.surveyed = null; this.context.alert(error); });
    }, RESTING);
  }

  async #survey(body) {
    this.surveying?.abort();
    this.surveying = new AbortController();
    const { signal } = this.surveying;
    delete this.land.dataset.ready;
    await this.context.api.stream("/api/design/landscape", body, (line) => {
      if (signal.aborted || this.gone) return;
      if (line.ratios) this.land.axes = line;
      else this.land.put(line);
    }, { signal });
    if (signal.aborted) return;
    this.land.wish = { ratio: this.view.embedding_ratio, glu: this.view.glu_expansion };
    this.land.dataset.ready = "true";
  }

  #refused(error) {
    this.#none("No answer");
    fill(this.found, el("p", {}, error.what ?? String(error)), error.hint && el("p", { class: "hint" }, error.hint));
    if (error.what === undefined) this.context.alert(error);
  }

  #none(verdict) {
    this.verdict.className = "verdict bad";
    fill(this.verdict, verdict);
    fill(this.title, "Why");
    for (const part of [this.portable, this.bar, this.below]) fill(part);
  }

  #draw(answer) {
    if (answer.infeasible) { this.#infeasible(answer.infeasible); return; }
    const [total, ...rest] = answer.verdict;
    this.verdict.className = "verdict good";
    fill(this.title, "Where the parameters are");
    fill(this.verdict, "✓ ", el("strong", {}, total), rest.map((part) => ` · ${part}`));
    const { verdict, reasons, settings, label } = answer.portable;
    fill(this.portable, el("p", { class: reasons.length ? "warn" : "good" }, verdict, " ",
      label && this.#asking(settings, label)), reasons.map((line) => el("p", { class: "note" }, line)));
    this.#allocation(answer.lines);
    fill(this.below, this.#others(answer), this.#costs(answer.costs));
  }

  #infeasible({ why, changes, helpless, unknown }) {
    this.#none(["✕ ", el("strong", {}, "No design keeps these limits")]);
    fill(this.found, el("p", { id: "why" }, why),
      changes.length > 0 && [el("h3", {}, "Each of these changes alone makes it feasible"),
        el("div", { class: "row changes" }, changes.map(({ label, settings }) =>
        el("button", { type: "button", onclick: () => this.settle(settings) }, label)))],
      helpless.length > 0
        && el("p", { class: "note" }, `Changing only one of these does not help: ${helpless.join(", ")}.`),
      unknown.length > 0 && el("p", { class: "note" }, `Not known of these: ${unknown.join(", ")}.`));
  }

  #allocation(lines) {
    const number = (name) => DRAWN.indexOf(name) + 1;
    const drawn = lines.filter(({ name, parameters }) => number(name) && parameters);
    const swatch = (name) => el("span", { class: number(name) ? `swatch series-${number(name)}` : "swatch" });
    fill(this.bar, el("div", { class: "stacked" }, drawn.map(({ name, share }) => {
      const part = el("span", { class: `series-${number(name)}`, title: name });
      part.style.width = `${100 * share}%`;
      return part;
    })),
    el("p", { class: "parts" }, drawn.map(({ name, share }) =>
      el("span", {}, swatch(name), `${name} ${percent(share, share < 0.001 ? 3 : 1)}`))));
    const row = ({ name, parameters, share, note, indented }) => el("tr", { class: indented ? "indented" : null },
      el("th", { scope: "row" }, swatch(name), name),
      el("td", { class: "n" }, count(parameters)), el("td", { class: "n" }, percent(share, 2)),
      el("td", { class: "muted wide" }, note));
    const total = lines.at(-1);
    const made = table({ caption: "Parameters by component; the three lines under layers are parts of it",
      head: ["component", { text: "parameters", n: true }, { text: "share", n: true }, "of which"],
      rows: lines.slice(0, -1).map(row), props: { id: "allocation" } });
    put(made, el("tfoot", {}, row(total)));
    fill(this.found, scrolled("Allocation table", made));
  }

  #costs(costs) {
    return el("section", { class: "panel", "aria-labelledby": "costs-title" }, el("h2", { id: "costs-title" }, "Costs"),
      table({ caption: "Work and memory", head: ["what", { text: "amount", n: true }, "when"],
        rows: costs.map(({ name, text, note }) => [name, text, el("span", { class: "muted" }, note)]),
        props: { id: "costs", class: "data costs" } }));
  }

  #asking(settings, label) {
    return el("button", { type: "button", class: "small", onclick: () => this.settle(settings) }, label);
  }

  #others({ gave_way: gave, not_proven: open, warnings, alternatives }) {
    const rows = alternatives.map((one) => [one.name, count(one.params), one.miss, one.d_model, one.d_ff, one.n_layers,
      percent(one.embedding_ratio, 2), fixed(one.glu_expansion, 2), one.int4 ? "yes" : "no",
      one.settings ? this.#asking(one.settings, "request it") : ""]);
    return el("section", { class: "panel", "aria-labelledby": "gave-title" },
      el("h2", { id: "gave-title" }, "What gave way"),
      gave.length ? el("ul", { id: "gave-way" }, gave.map((line) => el("li", {}, line)))
        : el("p", { class: "good", id: "gave-way" }, "Nothing: every wish is met."),
      open.length > 0 && el("ul", { id: "not-proven", class: "note" },
        open.map((line) => el("li", {}, `not proven: ${line}`))),
      warnings.map(({ what, settings }) => el("p", { class: "warn" }, `⚠ ${what}. `,
        this.#asking(settings, `request ${Object.entries(settings).flat().join(" ").replaceAll("_", " ")}`))),
      el("h3", {}, "Other designs within the tolerance"),
      scrolled("Other designs", table({ caption: "Designs that are best at one thing each",
        head: ["best at", ...NUMBERS.map((text) => ({ text, n: true })), silent("choose")],
        rows, props: { id: "alternatives" } })),
      el("div", { class: "row config" },
        el("button", { type: "button", id: "config", onclick: () => this.#config() }, "Copy config (TOML)"),
        el("span", { class: "hint" }, "what ", el("code", {}, "glass train"), " takes")));
  }

  async #config() {
    try {
      const { toml } = await this.context.api.get(this.context.api.query("/api/design/config", query(this.view)));
      await navigator.clipboard.writeText(toml);
      this.context.toast("Copied a config: save it as design.toml, then glass train design.toml");
    } catch (error) {
      this.context.alert(error);
    }
  }

  commands() { return { cli: this.answer?.cli, python: this.answer?.python }; }

  unmount() {
    this.gone = true;
    clearTimeout(this.timer);
    this.surveying?.abort();
  }
}

export const page = {
  title: "Design",
  styles: "design.css",
  async mount(root, params, context) {
    const design = new Design(root, context, new Options(await context.api.get("/api/design/options")));
    queueMicrotask(() => design.update(params));
    return design;
  },
};
