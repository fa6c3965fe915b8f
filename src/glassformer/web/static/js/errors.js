// Errors: what a checkpoint gets wrong, counted; a cell opens its examples, an example opens Inspect.

import "./confusion.js";
import { query } from "./api.js";
import { build, busy, el, field, fill, meter, nothingYet, right, scrolled, select, silent, table } from "./dom.js";
import { count, percent, short } from "./format.js";
import { latest, mounted } from "./state.js";

const chooser = (label, options, value, choose) =>
  field(label, select(options, value, choose, { id: `errors-${label.replace(" ", "-")}` }));

const SHARE = "0 … 100 %"; // the head of a column of bars
const gauge = (share) => el("span", { class: "gauge" }, meter(share));

class Errors {
  constructor(root, context, params) {
    Object.assign(this, { root, context, params });
    this.measure = latest(async (signal, path, options) => [await context.api.get(path, { signal }),
      await context.api.get(query(`${path}/errors`, options), { signal })]);
    this.open = latest((signal, path) => context.api.get(path, { signal }));
    this.extract = latest((signal, path) => context.api.get(path, { signal }));
    this.machine = el("section", { class: "panel", "aria-labelledby": "machine-title", hidden: true });
    this.controls = el("div", { class: "controls" });
    this.facts = el("dl", { class: "facts" });
    this.confusion = el("glass-confusion");
    this.title = el("h2", { id: "matrix-title" });
    this.reading = el("p", { class: "note" });
    this.places = el("div", { class: "columns places" });
    this.matrix = el("section", { class: "panel", "aria-labelledby": "matrix-title" }, this.title,
      el("p", { class: "hint" },
        "A row is the target, a column what was predicted; count, and per cent of the row."),
      scrolled("Table of answers", this.confusion), this.reading, this.places);
    this.confusion.addEventListener("cell", ({ detail }) => context.go(this.address(detail)));
    this.examples = el("section", { class: "panel examples", "aria-labelledby": "examples-title" });
    this.groups = el("section", { class: "panel", "aria-labelledby": "groups-title" });
    this.detail = el("div", { class: "columns" }, this.examples, this.groups);
    fill(root, el("section", { class: "panel", "aria-label": "What is measured" }, this.controls, this.facts),
      this.machine, this.matrix, this.detail);
  }

  get subject() { return this.run; }

  clear() {
    Object.assign(this, { key: null, found: null, about: null, table: null });
    this.matrix.hidden = this.detail.hidden = this.machine.hidden = true;
    for (const part of [this.facts, this.machine, this.title, this.confusion, this.reading, this.places, this.examples,
      this.groups]) fill(part);
  }

  async prepare() {
    const { runs, folder, first } = await this.context.api.models();
    Object.assign(this, { folder, first, runs: runs.filter((run) => run.kind === "run") });
  }

  async update(params) {
    this.params = params;
    const run = params.run ?? (this.runs.some(({ id }) => id === this.first) ? this.first : this.runs[0]?.id);
    if (!run) { fill(this.facts, nothingYet()); return; }
    const key = JSON.stringify([run, params.step, params.split]);
    if (key !== this.key && !await this.#measure(run, key)) return;
    this.matrix.hidden = this.detail.hidden = false;
    this.draw();
    await this.list();
  }

  /** Ask the model; whether the answer is the newest. What was shown goes away before. */
  async #measure(run, key) {
    this.clear();
    Object.assign(this, { run, key });
    busy(this.root, true);
    this.#control(this.#runs());
    fill(this.facts, el("p", { class: "muted", role: "status" },
      "Measuring: the model answers the examples of the split."));
    try {
      const { step, split } = this.params;
      const [about, found] = await this.measure(`/api/runs/${encodeURIComponent(run)}`, { step, split }) ?? [];
      if (!found || this.gone) return false;
      Object.assign(this, { about, found });
      this.context.alert(null);
      this.#machine(run, step).catch(this.context.alert);
      return true;
    } finally {
      if (this.key === key) busy(this.root, false);
    }
  }

  /** The finite-state machine that the model computes, where it was trained on one. */
  async #machine(run, step) {
    const { found: whole } = this;
    this.machine.hidden = !whole.is_machine;
    if (this.machine.hidden) return;
    const title = el("h2", { id: "machine-title" }, "The machine it computes");
    fill(this.machine, title, el("p", { class: "muted", role: "status" }, "Asking the model about strings."));
    const found = await this.extract(query(`/api/runs/${encodeURIComponent(run)}/machine`, { step }));
    if (!found || this.found !== whole) return;
    fill(this.machine, title, scrolled("The machine", build(found.drawing)), el("p", {}, found.text));
  }

  address(change) {
    const { step, split, by, target, predicted } = this.params;
    return { run: this.run, step, split, by, target, predicted, ...change };
  }

  #runs() {
    const ids = this.runs.map((run) => run.id);
    if (!ids.includes(this.run)) ids.unshift(this.run); // a model, or a run that is gone: the alert says which
    return chooser("run", ids, this.run, (run) => this.context.go({ run }));
  }

  #control(...choosers) {
    const held = document.activeElement?.id;
    fill(this.controls, choosers);
    if (held?.startsWith("errors-")) document.getElementById(held)?.focus();
  }

  draw() {
    const { found, about } = this;
    const go = (change) => this.context.go(this.address({ target: null, predicted: null, ...change }));
    const steps = [["best", `best (${about.best ?? "–"})`], ["last", `last (${about.last ?? "–"})`],
      ...about.checkpoints.map((step) => [String(step), count(step)])];
    this.table = found.tables.find((each) => each.group === this.params.by) ?? found.tables[0];
    const splits = Object.entries(found.splits).map(([name, size]) => [name, `${name} (${count(size)})`]);
    const groups = found.tables.map((each) => each.group);
    this.#control(this.#runs(),
      chooser("checkpoint", steps, this.params.step ?? "best", (step) => go({ step: step === "best" ? null : step })),
      chooser("split", splits, found.split, (split) => go({ split })),
      groups.length > 1 && chooser("table by", groups, this.table.group, (by) => go({ by })));
    const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
    const answers = found.kind === "answers"; // a text and a random walk are matched by luck alone
    const random = found.kind === "process";
    fill(this.facts, fact("step", count(Number(found.step))),
      random && fact("above the machine's own entropy", `${short(found.oracle.excess)} nats (0 is perfect)`),
      fact("accuracy", percent(found.accuracy, 2)),
      answers && fact("exact match", percent(found.exact_match, 2)), fact("loss", `${short(found.loss)} nats`),
      found.kind === "text" && fact("perplexity", short(Math.exp(found.loss))),
      answers && fact("wrong", count(found.wrong)),
      random && fact("predicts what cannot occur", `in ${count(found.wrong)} strings`),
      fact("examples", [found.examples < found.of && `the first ${count(found.examples)} of `, count(found.of)]));
    this.matrix.classList.toggle("none", !this.table);
    this.matrix.hidden = !this.table && !answers && !found.positions.length;
    this.title.textContent = this.table ? "Confusion matrix" : answers ? "Where it goes wrong" : "By position";
    this.reading.textContent = this.table
      ? `${this.table.reading && `A column is ${this.table.reading}. `}Choose a cell to see its examples.` : "";
    this.#places();
    const { target, predicted } = this.params;
    const chosen = target === undefined ? null : { target, predicted };
    if (this.table) this.confusion.data = { ...this.table, chosen };
    const shares = Object.entries(found.by).map(([group, labels]) => [el("h3", {}, `By ${group}`), table({
      caption: `Exact match by ${group}`,
      head: [group, right("exact match"), right("examples"), SHARE],
      rows: Object.entries(labels).map(([name, share]) =>
        [name, percent(share, 2), count(found.counts[group][name]), gauge(share)]),
    })]);
    this.groups.hidden = !shares.length;
    fill(this.groups, el("h2", { id: "groups-title" }, "Right, by group"), shares);
  }

  /** Of answers of several tokens: which positions are right, and which tokens are taken for which. */
  #places() {
    const { positions, confused } = this.found;
    const where = this.found.kind === "text" ? "window" : "answer";
    const code = (text) => el("code", {}, text);
    fill(this.places, positions.length > 0 && el("div", {}, el("h3", {}, `By position in the ${where}`),
      scrolled("By position", table({ caption: `Right tokens by position in the ${where}`,
        head: ["position", right("accuracy"), right("of"), SHARE], rows: positions.map((one) =>
          [one.position, percent(one.accuracy, 2), count(one.count), gauge(one.accuracy)]) }))),
      confused.length > 0 && el("div", {}, el("h3", {}, "Tokens confused most often"),
        scrolled("Confused tokens", table({ caption: "Tokens confused most often",
          head: ["right token", "predicted", right("times"), "relative"],
          rows: confused.map((one) => [code(one.target), code(one.predicted), count(one.count),
            gauge(one.count / confused[0].count)]) }))));
  }

  /** The examples of the chosen cell; without one, the first that are wrong. */
  async list() {
    const { target, predicted } = this.params;
    const { found, table: chosen } = this;
    const path = `/api/runs/${encodeURIComponent(this.run)}/errors/cell`;
    const { step, split } = this.params;
    const cell = target !== undefined && predicted !== undefined && chosen
      ? await this.open(query(path, { step, split, group: chosen.group, target, predicted })) : null;
    if (this.gone || cell === undefined || found !== this.found) return;
    if (!cell && found.kind !== "answers") { this.#farthest(); return; }
    const rows = cell ? cell.examples.map(({ row, text, targets, answers }) =>
      ({ row, input: text, target: [targets.answer ?? target], predicted: [answers.answer ?? predicted] }))
      : found.errors;
    const title = cell ? `Target ${target}, predicted ${predicted}: ${count(cell.count)}`
      : rows.length < found.wrong ? `Wrong: the first ${count(rows.length)} of ${count(found.wrong)}`
        : `Wrong: ${count(rows.length)}`;
    const sure = !cell;
    const said = (each) => [each.predicted.map((word, i) => [i > 0 && " ",
      word === each.target[i] ? word : el("strong", { class: "bad" }, word)]),
      each.of > each.predicted.length && el("span", { class: "muted" }, ` ${each.wrong} of ${each.of} tokens wrong`)];
    fill(this.examples, el("h2", { id: "examples-title" }, title),
      rows.length ? scrolled("Table of examples", table({ caption: title,
        head: [right("row"), "input", "right answer", "predicted", ...(sure ? [right("p of right")] : []),
          silent("link")],
        rows: rows.map((each) => [each.row, el("span", { class: "mono text" }, each.input),
          el("span", { class: "mono good answer" }, each.target.join(" ")),
          el("span", { class: "mono said" }, said(each)),
          ...(sure ? [percent(each.right_probability)] : []), this.#link(each)]),
      })) : el("p", { class: "muted" }, cell ? "None." : "No answer is wrong."),
      !cell && found.positions.length > 0 && rows.length > 0 && el("p", { class: "note" },
        "Predicted: the likeliest token at each position, after the right tokens before it. p: what the right token ",
        "had where the first wrong one was predicted."),
      cell && cell.count > rows.length && el("p", { class: "note" }, `The first ${count(rows.length)} are shown.`));
    if (cell) this.context.announce(`${title} examples`);
  }

  #link({ row }) {
    const { run, found: { split }, params: { step } } = this;
    return el("a", { class: "open", "aria-label": `Inspect example ${row}`,
      href: this.context.href("inspect", { run, step, split, row }) }, "Inspect");
  }

  /** Of a text or a random walk nothing is right or wrong: the predictions that are farthest off. */
  #farthest() {
    const { found } = this;
    const random = found.kind === "process";
    const title = random ? "Farthest from the truth" : "Least expected";
    const shares = (list) => list.map(([word, share], i) => [i > 0 && ", ", el("span", { class: "mono" }, word),
      ` ${percent(share)}`]);
    const code = (words) => el("span", { class: "mono" }, words.join(" "));
    const cells = (each) => random
      ? [shares(each.truth), shares(each.model), `${short(Number(each.excess))} nats`]
      : [code(each.target), code(each.predicted), short(each.right_probability)];
    fill(this.examples, el("h2", { id: "examples-title" }, title),
      scrolled("Table of examples", table({ caption: title,
        head: [right("row"), random ? "input" : "text before",
          ...(random ? ["the truth", "the model", right("too many")]
            : ["followed by", "most probable", right("p of what followed")]), silent("link")],
        rows: found.errors.map((each) =>
          [each.row, el("span", { class: "mono text" }, each.input), ...cells(each), this.#link(each)]) })),
      el("p", { class: "note" }, random
        ? "What follows is decided by chance: a token other than the most probable one is no mistake."
        : "A text can go on in many ways: a token other than the most probable one is no mistake."));
  }

  commands() {
    if (!this.found) return {};
    const at = this.params.step ? `${this.run}@${this.params.step}` : this.run;
    const { split } = this.found;
    return {
      cli: `glass evaluate ${at} --split ${split}${this.folder === "runs" ? "" : ` --runs ${this.folder}`}`,
      python: "import glassformer as gf\n\n"
        + `found = gf.evaluate(${JSON.stringify(`${this.folder}/${at}`)}, split=${JSON.stringify(split)})\n`
        + (this.table ? `found.confusion[${JSON.stringify(this.table.group)}]` : "found.by"),
    };
  }

  unmount() { this.gone = true; }
}

export const page = { title: "Errors", styles: "errors.css", mount: mounted(Errors) };
