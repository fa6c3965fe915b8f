// Quantize: float32 beside every scheme on one text. Where they part, by how much, and what the bits save.

import { busy, el, field, fill, panel, right, scrolled, select, silent, table } from "./dom.js";
import { count, fixed, four, percent, short } from "./format.js";
import { ModelForm } from "./generate-model.js";
import { modelPath, quoted } from "./inspect-commands.js";
import "./quantize-chart.js";
import * as keys from "./keys.js";
import { latest, mounted } from "./state.js";

const WAYS = [["there", "from float32 to the small one: what it misses"],
  ["back", "from the small one to float32: what it invents"]];
const parse = (params) => ({ run: params.run ?? null, step: params.step ?? "best", text: params.text ?? null,
  pos: /^\d{1,6}$/.test(params.pos ?? "") ? Number(params.pos) : null, way: params.way === "back" ? "back" : "there" });
const address = ({ run, step, text, pos, way }) =>
  ({ run, step: step === "best" ? null : step, text, pos, way: way === "there" ? null : way });
const bytes = (value) => `${count(value)} B`;

/** Thin bars over one another, one a precision, on one scale. */
function bars(values, most, first = 0) {
  return el("span", { class: "bars", "aria-hidden": "true" }, values.map((value, i) => {
    const bar = el("span", { class: `bar precision-${first + i}` });
    bar.style.width = `${most ? Math.max(0.5, 100 * value / most) : 0}%`;
    return bar;
  }));
}
const keyed = (name, i) =>
  el("span", { class: "key" }, el("span", { class: `swatch precision-${i}`, "aria-hidden": "true" }), name);

const WEIGHTS_ALONE = "These copies are rounded by their weights alone (glass quantize --no-smooth). Without that "
  + "option the command reads some text first, moves outliers into the weights and loses less.";

class Quantize {
  constructor(root, context) {
    Object.assign(this, { root, context, found: null, speeds: null });
    this.form = new ModelForm(context, { change: (patch) => this.#change(patch), submit: () => this.#change({}),
      verb: "Compare", label: "Text" });
    this.sizes = el("div", {});
    this.speed = el("div", { id: "speed" });
    this.verdict = el("p", { class: "lead", id: "verdict" });
    this.chart = el("glass-divergence");
    this.chart.addEventListener("pick", ({ detail }) => this.#change({ pos: detail }, { quietly: true }));
    this.way = el("div", {});
    this.worst = el("div", { class: "worst" });
    this.answers = el("div", {});
    this.answersTitle = el("h2", { id: "next-title" }, "Next token");
    this.layers = el("div", {});
    fill(root, el("div", { class: "two" },
      el("div", { class: "stack" }, panel("ask", "Model and text", this.form.root),
        panel("size", "Size", this.sizes), panel("speed", "Speed, measured here", this.speed)),
      el("div", { class: "stack" }, panel("kl", "Divergence by position", this.verdict,
        el("p", { class: "muted", id: "weights-alone" }, WEIGHTS_ALONE), this.way, this.chart, this.worst),
        el("div", { class: "columns" }, panel("next", this.answersTitle, this.answers),
          panel("layers", "Error of each layer", this.layers)))));
    this.compare = latest((signal) => this.#compare(signal));
    const along = (by) => () => this.found && this.#step(by);
    this.unbind = keys.bind({ ArrowLeft: ["position to the left", along(-1)],
      ArrowRight: ["position to the right", along(1)],
      w: ["the worst position in view", () => this.found && this.#pick(this.#worst())],
      "/": ["write a text", () => this.form.text.focus()] });
  }

  get subject() { return this.view?.run; }

  clear() {
    Object.assign(this, { found: null, speeds: null, asked: null, measured: null });
    this.root.classList.add("blank"); // until there is something to show
    delete this.speed.dataset.ready;
    for (const part of [this.verdict, this.way, this.chart, this.worst, this.answersTitle, this.answers, this.layers,
      this.sizes, this.speed]) fill(part);
  }

  async update(params) {
    const view = parse(params);
    this.view = view;
    if (!await this.form.prepare(view)) { fill(this.root, this.form.empty()); return; }
    if (this.view === view) await this.compare();
  }

  #change(patch, { quietly = false } = {}) {
    const view = { ...this.view, text: this.form.text.value, ...patch };
    if ("text" in patch || patch.run || view.text !== this.view.text) view.pos = null;
    if (quietly) this.context.replace(address(view));
    else this.context.go(address(view));
  }

  #pick(pos) { this.#change({ pos }, { quietly: true }); }
  #step(by) {
    const { positions } = this.found;
    const at = positions.indexOf(this.view.pos) + by;
    if (positions[at] !== undefined) this.#pick(positions[at]);
  }
  #worst() {
    const { against, positions } = this.found;
    const highest = positions.map((_, at) => Math.max(...Object.values(against).map((one) => one[this.view.way][at])));
    return positions[highest.indexOf(Math.max(...highest))];
  }

  async #compare(signal) {
    const { run, step, text } = this.view;
    if (!text) { this.clear(); fill(this.verdict, "Write a text to compare on."); this.form.text.focus(); return; }
    const asked = { run, step, text };
    const name = JSON.stringify(asked);
    if (this.asked !== name) {
      busy(this.root, true);
      if (!this.found) fill(this.verdict, "The model is quantized in every scheme: this takes some seconds.");
      try {
        const found = await this.context.api.post("/api/quantize", asked, { signal });
        if (signal.aborted) return;
        Object.assign(this, { found, asked: name });
      } finally {
        if (!signal.aborted) busy(this.root, false);
      }
      this.context.alert(null);
      this.root.classList.remove("blank");
    }
    const { positions } = this.found;
    if (!positions.includes(this.view.pos)) this.view.pos = this.#worst();
    this.context.replace(address(this.view));
    this.#draw();
    this.root.dataset.ready = name;
    await this.#measure(signal);
  }

  async #measure(signal) {
    const name = `${this.view.run}@${this.view.step}`;
    if (this.measured === name) return;
    fill(this.speed, el("p", { class: "muted" }, "Measuring…"));
    const speeds = await this.context.api.post("/api/quantize/speed", { run: this.view.run, step: this.view.step },
      { signal });
    if (signal.aborted) return;
    Object.assign(this, { speeds, measured: name });
    this.#drawSpeed();
  }

  #draw() {
    const { view, found } = this;
    const index = found.positions.indexOf(view.pos);
    fill(this.way,
      field("Direction of the divergence", select(WAYS, view.way, (way) => this.#change({ way }), { name: "way" })));
    this.#drawVerdict();
    this.chart.data = { words: found.words, positions: found.positions, selected: view.pos,
      answer: found.head === "answer",
      series: Object.entries(found.against).map(([name, one]) => ({ name, values: one[view.way] })) };
    this.#drawWorst();
    this.#drawSizes();
    this.#drawAnswers(index);
    this.#drawLayers();
  }

  #drawVerdict() {
    const { found, view } = this;
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    fill(this.verdict, Object.entries(found.against).map(([name, one], i) => [i ? " · " : "", el("strong", {}, name),
      found.head === "answer" ? ` KL ${short(one[view.way][0])} nats, ${one.same[0] ? "the same answer" : "another"}`
        : ` KL ${short(mean(one[view.way]))} nats a position, worst ${short(Math.max(...one[view.way]))}, `
          + `same likeliest token at ${one.same.filter(Boolean).length} of ${one.same.length}`]));
  }

  #drawWorst() {
    const { found, view, view: { run, text } } = this;
    const step = view.step === "best" ? null : view.step;
    const plain = new Set(found.precisions.filter((one) => one.name === one.scheme).map((one) => one.name));
    const link = (name, pos) => el("a", { href: this.context.href("inspect", { run, step, text, pos,
      with: `${view.run}@${view.step}:${name}` }), "aria-label": `Inspect position ${pos} beside ${name}` }, "Inspect");
    const lists = Object.entries(found.against).map(([name, one]) => el("div", {}, el("h3", {}, `Farthest in ${name}`),
      el("ol", { class: "worst-list" }, one.worst.map((at) => el("li", {},
        el("button", { type: "button", class: "small", onclick: () => this.#pick(found.positions[at]) },
          el("span", { class: "muted" }, "position ", found.positions[at]), found.words[found.positions[at]]),
        el("span", { class: "number" }, short(one.there[at])), plain.has(name) && link(name, found.positions[at]))))));
    fill(this.worst, lists);
  }

  #drawSizes() {
    const { precisions } = this.found;
    const [full] = precisions;
    const schemes = (one) => Object.entries(one.schemes)
      .map(([name, layers]) => `${layers} ${layers === 1 ? "layer" : "layers"} ${name}`).join(", ");
    const smaller = (one) => one !== full
      && el("div", { class: "muted" }, `${fixed(full.file_bytes / one.file_bytes, 2)}× smaller`);
    fill(this.sizes, scrolled("Sizes", table({ caption: "Bytes in each precision", props: { id: "sizes" },
      head: ["precision", right("on disk"), right("in memory")],
      rows: precisions
        .map((one, i) => [keyed(one.name, i), [bytes(one.file_bytes), smaller(one)], bytes(one.resident_bytes)]) })),
      precisions.filter((one) => one.backends.length)
        .map((one) => el("p", { class: "note" }, `${one.name}: ${schemes(one)}; kernels: ${one.backends.join(", ")}`)),
      this.found.missing.map((line) => el("p", { class: "note" }, line)),
      el("p", { class: "note" }, "On disk: the weights' file as glass quantize would write it. Nothing was written."));
  }

  #drawSpeed() {
    const { rounds, prefill_tokens: prompt, new_tokens: made, speeds } = this.speeds;
    const kinds = [["prefill", `reading ${prompt} tokens`], ["decode", `writing ${made} tokens`]];
    fill(this.speed, kinds.map(([kind, title]) => {
      const rows = Object.entries(speeds).filter(([, one]) => one[kind]);
      if (!rows.length) return el("p", { class: "note" }, "This model writes nothing: it gives one answer.");
      const said = ({ ratio, slower }) => el("span", { class: slower ? "warn" : "good" },
        slower ? `slower: ${fixed(ratio, 2)}×` : `faster: ${fixed(1 / ratio, 2)}×`);
      // Each was measured against float32 in turn: the rate that it is compared with stands beside it.
      return [el("h3", {}, `${title}, tokens/s`), table({ caption: `Tokens a second, ${title}`,
        head: ["precision", right("its rate"), right("float32's"), silent("compared")],
        rows: rows.map(([name, one], i) => {
          const [full, small] = one[kind].tokens_per_second;
          return [keyed(name, i + 1), count(small), count(full), said(one[kind])];
        }) })];
    }), el("p", { class: "note" }, `Medians of ${rounds} rounds, each precision in turn with float32, batch 1, on `,
      "this machine as busy as it is now; × is the median of the rounds' own ratios."),
      el("button", { type: "button", class: "small",
        onclick: () => { this.measured = null; this.compare().catch(this.context.alert); } }, "measure again"));
    this.speed.dataset.ready = "true";
  }

  #drawAnswers(index) {
    const { found, view } = this;
    const names = found.precisions.map(({ name }) => name);
    fill(this.answersTitle, found.head === "answer" ? "Answer" : "Next token",
      el("span", { class: "muted" }, ` at position ${view.pos}, token `), el("code", {}, found.words[view.pos]));
    fill(this.answers, scrolled("Likeliest answers", table({
      caption: "The likeliest answers in each precision", props: { id: "answers" },
      head: ["token", ...names.map((name, i) => right(keyed(name, i))), silent("bars")],
      rows: found.answers[index].map(({ word, p }) => [el("code", {}, word), ...names.map((name) => four(p[name])),
        bars(names.map((name) => p[name]), 1)]) })));
  }

  #drawLayers() {
    const { against } = this.found;
    const names = Object.keys(against);
    const paths = Object.keys(against[names[0]].layers);
    const most = Math.max(...names.flatMap((name) => Object.values(against[name].layers)));
    fill(this.layers, scrolled("Error of each layer", table({ props: { id: "layers" },
      caption: "Relative error of each layer's output on the float model's inputs",
      head: ["layer", ...names.map((name, i) => right(keyed(name, i + 1))), silent("bars")],
      rows: paths.map((path) => [el("code", {}, path), ...names.map((name) => percent(against[name].layers[path], 2)),
        bars(names.map((name) => against[name].layers[path] ?? 0), most, 1)]) })),
    el("p", { class: "note" }, "Of each layer's output, on the inputs it has in float32: what that layer alone adds."));
  }

  commands() {
    if (!this.found) return {};
    const path = modelPath(this.view, this.form.known.paths);
    return { cli: this.found.precisions.slice(1).map(({ name, scheme }) =>
      `glass quantize ${quoted(path)} --scheme ${scheme}${name === scheme ? "" : " --indivisible int8"}`).join(" && "),
      python: ["import glassformer as gf",
        "from glassformer.lab.measure.precision import in_precisions, prompted", "",
        `model = gf.load(${JSON.stringify(path)})`,
        `print(prompted(model, in_precisions(model), ${JSON.stringify(this.view.text)}))`].join("\n") };
  }

  unmount() { this.unbind(); }
}

export const page = { title: "Quantize", styles: "quantize.css", mount: mounted(Quantize) };
