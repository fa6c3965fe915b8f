// The page Inspect: one text in one model. What it predicts, what its heads attend to, which of them matter.

import "./bars.js";
import { busy, el, fill, nothingYet, put, scrolled } from "./dom.js";
import "./grid.js";
import { commands } from "./inspect-commands.js";
import { Looks, address, headName, parse, placeOf, question } from "./inspect-data.js";
import { Controls, Form } from "./inspect-form.js";
import { MapView } from "./inspect-maps.js";
import { effect, facts, rankingTable } from "./inspect-parts.js";
import * as keys from "./keys.js";
import "./lens.js";
import "./norms.js";
import { latest, mounted, perFrame } from "./state.js";
import "./tokens.js";

const RANKED_AT_ONCE = 64 * 16; // tokens x heads up to which every head is tried without being asked
const QUIETLY = { quietly: true };
let draws = 0; // of this page about any run

class Inspect {
  view = null;
  look = null;
  other = null;
  runs = [];
  abouts = new Map();

  constructor(root, context) {
    this.root = root;
    this.context = context;
    this.looks = new Looks(context.api);
    const change = (patch) => this.change(patch);
    this.form = new Form(change);
    this.scrub = perFrame((step) => this.change({ step: String(step) }, QUIETLY));
    this.input = el("section", { class: "panel input", "aria-label": "Input" }, el("h2", {}, "Input"), this.form.root);
    this.frame = el("div", { class: "three" }, this.input);
    fill(root, this.frame);
    this.clear();
    this.refresh = latest((signal) => this.#refresh(signal));
    this.unbind = keys.bind(this.#keys());
    this.unwatch = context.theme.watch(() => this.map.drawLegend());
  }

  get subject() { return this.view?.run; }

  /** Steps of one run follow the slider: one stays, dimmed and under its own name, until the next is there. */
  model({ run, precision = "float32" }) { return `${run} ${precision}`; }

  /** Everything but the form is made anew: no node of the model before is left to be shown. */
  clear() {
    Object.assign(this, { look: null, other: null, drawn: null });
    this.root.classList.add("blank"); // until there is something to show
    this.form.clear();
    const change = (patch) => this.change(patch);
    this.controls = new Controls(change, this.scrub);
    this.map = new MapView({ over: (cell) => this.#hoverCell(cell),
      pick: (row) => this.change(this.view.kind === "encoder" ? { src: row } : { pos: row }, QUIETLY) });
    const [below, beside] = this.#results();
    while (this.form.root.nextSibling) this.form.root.nextSibling.remove();
    while (this.input.nextSibling) this.input.nextSibling.remove();
    put(this.input, below);
    put(this.frame, beside);
  }

  /** What the model said: [below the form, beside it]. */
  #results() {
    const tokens = (name, choose) => el("glass-tokens", { onpick: ({ detail }) => this.change(choose(detail), QUIETLY),
      onover: ({ detail }) => this.#hoverToken(name, detail) });
    this.source = tokens("source", (src) => ({ src }));
    this.tokens = tokens("own", (pos) => ({ pos }));
    this.sourceTitle = el("h3", {}, "Source");
    this.bars = el("glass-bars");
    this.answers = el("div", { class: "answers" });
    this.grid = el("glass-grid", { onpick: ({ detail }) => this.change(detail),
      ontoggle: ({ detail: { layer, head } }) => this.toggle(headName(this.view.kind, layer, head)) });
    this.ablate = el("div", { class: "ablate" });
    this.lens = el("glass-lens", { onover: ({ detail }) => { this.grid.hover = detail; } });
    this.norms = el("glass-norms");
    this.ranking = el("div", { class: "ranking" });
    this.where = el("span", { class: "muted" });
    this.advice = el("p", { class: "note" }, "Weights show what a head attends to, not what matters: press ",
      el("kbd", {}, "x"), " to ablate it and see.");
    this.map.beside.append(this.ablate, this.advice);
    const panel = (name, title, ...children) => el("section", { class: `panel ${name}`, "aria-label": title },
      el("h2", {}, title, name === "lens" && this.where), children);
    return [
      [this.sourceTitle, this.source, el("h3", {}, "Tokens"), this.tokens, el("h3", {}, "Next"), this.bars,
        this.answers],
      [panel("attention", "Attention", this.controls.root, this.grid, this.map.nodes),
        el("div", { class: "stack" },
          panel("lens", "Logit lens", scrolled("Logit lens table", this.lens)),
          panel("norms", "Norms", this.norms), panel("rank", "If ablated", this.ranking))]];
  }

  #keys() {
    const layers = () => this.look.kinds[this.view.kind].heads;
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    const along = (by) => () => {
      const name = this.view.kind === "encoder" ? "src" : "pos";
      this.change({ [name]: within(this.view[name] + by, this.look.kinds[this.view.kind].rows) }, QUIETLY);
    };
    const head = (by) => () => {
      const count = layers()[this.view.layer];
      this.change({ head: ((this.view.head === "mean" ? 0 : this.view.head) + by + count) % count });
    };
    const layer = (by) => () => {
      const next = within(this.view.layer + by, layers().length);
      this.change({ layer: next, head: this.view.head === "mean" ? "mean" : within(this.view.head, layers()[next]) });
    };
    const ready = (run) => () => this.look && run();
    return {
      ArrowLeft: ["position to the left", ready(along(-1))], ArrowRight: ["position to the right", ready(along(1))],
      ArrowUp: ["layer above", ready(layer(-1))], ArrowDown: ["layer below", ready(layer(1))],
      "[": ["head before", ready(head(-1))], "]": ["head after", ready(head(1))],
      a: ["mean of the layer's heads", ready(() => this.change({ head: this.view.head === "mean" ? 0 : "mean" }))],
      x: ["ablate this head, or bring it back", ready(() => this.toggle(this.headName()))],
      t: ["show as table", ready(() => this.change({ table: !this.view.table }, QUIETLY))],
      g: ["append the likeliest next token", ready(() => this.append())],
      "/": ["write a prompt", () => { this.form.prompt.focus(); this.form.prompt.select(); }],
    };
  }

  headName() {
    const { kind, layer, head } = this.view;
    return head === "mean" ? null : headName(kind, layer, head);
  }

  otherName() {
    const { run, step, precision } = this.view.other;
    if (run !== this.view.run) return run;
    if (precision === this.view.precision) return `step ${step}`;
    return precision === "float32" ? "as trained" : precision;
  }

  /** A new view; quietly: without a step in the history. */
  change(patch, { quietly = false } = {}) {
    const params = address({ ...this.view, ...patch });
    if (quietly) this.context.replace(params);
    else this.context.go(params);
  }

  toggle(name) {
    const why = this.look.snapshot ? "A snapshot holds no model to change" : "A mean is not a head: choose one";
    if (name === null || this.look.snapshot) { this.context.toast(why); return; }
    const { ablate } = this.view;
    this.change({ ablate: ablate.includes(name) ? ablate.filter((each) => each !== name) : [...ablate, name] });
  }

  append() {
    if (this.look.extended !== null) this.change({ text: this.look.extended, target: null, row: null, pos: null });
  }

  async prepare() {
    this.models = await this.context.api.models();
    this.runs = this.models.ids;
    if (!this.runs.length) fill(this.root, nothingYet());
  }

  async update(params) {
    if (!this.runs.length) return;
    this.view = parse(params);
    this.view.run ??= this.models.first;
    this.form.choose(this.view, this.runs);
    await this.refresh();
  }

  async #about(signal) {
    const { run, split } = this.view;
    const name = `${run} ${split ?? ""}`;
    const { query, get } = this.context.api;
    const path = query(`/api/runs/${encodeURIComponent(run)}/inspect`, { split });
    if (!this.abouts.has(name)) {
      const about = await get(path, { signal });
      this.abouts.set(name, about).set(`${run} ${about.split}`, about);
    }
    return this.abouts.get(name);
  }

  async #refresh(signal) {
    busy(this.root, true);
    try {
      await this.#load(await this.#about(signal), signal);
    } catch (error) {
      if (signal.aborted || error.status !== 404 || !/kept/.test(error.what)) throw error;
      this.looks.forget(); // the server dropped an old result: request it again
      await this.refresh();
    } finally {
      if (!signal.aborted) {
        busy(this.root, false);
        this.root.dataset.ready = String(++draws);
      }
    }
  }

  async #load(about, signal) {
    const { view } = this;
    if (view.text === null) {
      view.split ??= about.split;
      view.row ??= about.examples[0]?.row ?? null;
      if (view.row === null) view.text = about.prompt; // of a model whose task is not known
    }
    this.form.draw(view, about);
    const look = await this.looks.ask(question(view), signal);
    const other = view.other && await this.looks.ask(question(view, view.other), signal);
    if (signal.aborted) return;
    Object.assign(this, { look, other });
    this.root.classList.remove("blank");
    this.context.alert(null);
    if (view.head === null) await this.#choose(view);
    if (signal.aborted) return;
    this.#settle(view);
    if (signal.aborted) return; // the address was completed, and is asked for as a whole
    this.drawn = view;
    this.form.show(look, () => this.append());
    this.controls.draw(view, this.runs, about, look);
    await this.#draw(view, signal);
  }

  /** Every head is tried without being asked where that takes no time. */
  get #ranks() {
    const { look } = this;
    return !look.snapshot && (look.ranked || look.headCount * look.words.length <= RANKED_AT_ONCE);
  }

  /** The head whose ablation changes most, as in `glass inspect`; the first where heads are not ranked. */
  async #choose(view) {
    const { rows } = this.#ranks ? await this.look.ranking() : { rows: [] };
    const places = rows.map(({ head }) => placeOf(head));
    const best = places.find(({ kind }) => view.kind === null || view.kind === kind);
    Object.assign(view, best ?? { kind: view.kind ?? "self", layer: 0, head: 0 });
  }

  /** Put what the address left open, or set too high, where it belongs. */
  #settle(view) {
    const { kinds, readout, words, source_words: source } = this.look;
    if (!kinds[view.kind]) view.kind = "self";
    const { heads } = kinds[view.kind];
    view.layer = Math.min(view.layer, heads.length - 1);
    if (view.head !== "mean") view.head = Math.min(view.head, heads[view.layer] - 1);
    view.pos = Math.min(view.pos ?? readout, words.length - 1);
    view.src = Math.min(view.src, (source?.length ?? 1) - 1);
    this.context.replace(address(view));
  }

  async #draw(view, signal) {
    const { look, other } = this;
    const { kind, layer, head, pos } = view;
    const alike = other && String(other.words) === String(look.words) ? other : null;
    this.sourceTitle.hidden = this.source.hidden = look.source_words === null;
    if (look.source_words) this.source.data = { words: look.source_words, selected: view.src, label: "Source tokens" };
    this.tokens.data = { words: look.words, selected: pos, label: "Tokens" };
    const difference = view.difference && Boolean(alike);
    const models = other && !difference ? [look, other] : [look];
    const [at, small, ...maps] = await Promise.all([look.position(pos, alike), look.thumbnails(kind),
      ...models.map((each) => each.map(kind, layer, head, difference ? alike : null))]);
    if (signal.aborted) return;
    this.#drawPosition(view, at);
    const name = this.headName() ?? `${kind === "self" ? "" : `${kind}.`}L${layer} mean`;
    const row = kind === "encoder" ? view.src : pos;
    this.map.draw(maps.map((map, i) => ({ ...map, ...models[i].wordsOf(kind), name,
      row: row < map.shape[0] ? row : null, caption: i ? this.otherName() : "this model" })),
      { ...view, difference, title: difference ? `${name}, minus ${this.otherName()}'s` : name });
    this.controls.showScale(this.map.auto);
    this.#drawGrid(view, small);
    this.#drawAblation(view, at);
    await this.#drawRanking(signal);
  }

  #drawPosition(view, at) {
    const target = at.target?.word;
    const beside = at.against ?? at.before;
    const named = (rows) => rows.map(({ row, ...rest }) => ({ name: row, ...rest }));
    this.bars.data = { target, caption: `Likeliest next tokens at position ${view.pos}`,
      names: beside && ["p", at.against ? this.otherName() : "before"],
      rows: at.next.map(({ word, p }, i) => ({ word, p, other: beside?.p[i] })) };
    fill(this.answers, facts(this.look, at, view.other && this.otherName()));
    fill(this.where, `position ${view.pos}, token ‘`, el("span", { class: "word" }, this.look.words[view.pos]), "’");
    this.lens.data = { target, caption: `Prediction of each sublayer at position ${view.pos}`, rows: named(at.lens) };
    this.norms.data = { caption: `Norms at position ${view.pos}`, rows: named(at.norms) };
  }

  #drawGrid(view, small) {
    const { heads } = this.look.kinds[view.kind];
    const ablated = view.ablate.map(placeOf).filter(({ kind }) => kind === view.kind);
    this.grid.data = { bytes: small.values, shape: small.shape, heads, kind: view.kind, top: this.map.top };
    this.grid.chosen = { layer: view.layer, head: view.head,
      ablated: new Set(ablated.map(({ layer, head }) => `${layer}.${head}`)) };
  }

  #drawAblation({ ablate }, at) {
    const name = this.headName();
    const out = ablate.includes(name);
    this.advice.hidden = this.look.snapshot;
    fill(this.ablate, el("div", { class: "row" },
      name && !this.look.snapshot && el("button", { type: "button", id: "ablate", "aria-pressed": out,
        onclick: () => this.toggle(name) }, `${out ? "Restore" : "Ablate"} ${name}`,
        el("kbd", { "aria-hidden": true }, "x")),
      ablate.filter((each) => each !== name).map((each) => el("button", { type: "button", class: "chip",
        "aria-label": `Restore ${each}`, onclick: () => this.toggle(each) }, each, " ✕")),
      ablate.length > 1 && el("button", { type: "button", class: "quiet", onclick: () => this.change({ ablate: [] }) },
        "restore all")), effect(this.look, at));
  }

  async #drawRanking(signal) {
    const { look } = this;
    const pick = (name) => this.change(placeOf(name));
    const show = async () => {
      const found = await look.ranking();
      if (signal.aborted) return;
      const long = found.rows.length > 8 && !this.ranking.classList.contains("whole");
      const { ablated } = look;
      fill(this.ranking, ablated.length > 0
        && el("p", { class: "note" }, `On top of what is ablated already: ${ablated.join(", ")}.`),
      scrolled("Ranking of heads",
        rankingTable(found, this.headName(), { pick, toggle: (name) => this.toggle(name) })),
      long && el("button", { type: "button", class: "quiet", onclick: (event) => {
        this.ranking.classList.add("whole");
        event.target.remove();
      } }, `Show all ${found.rows.length} heads`));
    };
    const ask = () => { look.ranked = true; show().catch(this.context.alert); };
    if (look.snapshot) fill(this.ranking, el("p", { class: "muted" }, "A snapshot holds no model to try this on."));
    else if (this.#ranks) await show();
    else fill(this.ranking, el("button", { type: "button", onclick: ask }, `Try all ${look.headCount} heads`));
  }

  #hoverCell(cell) {
    const { kind } = this.view;
    const [row, column] = cell ? [cell.row, cell.column] : [-1, -1];
    this.tokens.hover = [kind === "encoder" ? -1 : row, kind === "self" ? column : -1];
    if (this.look.source_words) this.source.hover = [kind === "encoder" ? row : -1, kind === "self" ? -1 : column];
    this.map.hover = cell;
    this.map.say(cell);
  }

  /** A token is a row on its own side, and a column where it can be attended to. */
  #hoverToken(side, place) {
    const { kind } = this.view;
    const row = (side === "source") === (kind === "encoder") ? place : null;
    const column = (side === "own") === (kind === "self") ? place : null;
    this.map.hover = place === null ? null : { row, column };
  }

  commands() {
    const { view, look, other, models } = this;
    return view && view === this.drawn ? commands(view, look, other, models.paths) : {};
  }

  unmount() {
    this.unbind();
    this.unwatch();
  }
}

export const page = { title: "Inspect", styles: "inspect.css", mount: mounted(Inspect) };
