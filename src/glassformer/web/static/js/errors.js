// Errors: what a checkpoint gets wrong, counted; a cell opens its examples, an example opens Inspect.

import "./confusion.js";
import { query } from "./api.js";
import { busy, el, field, fill, meter, nothingYet, scrolled, select, silent, table } from "./dom.js";
import { count, fixed, percent } from "./format.js";
import { latest } from "./state.js";

const chooser = (label, options, value, choose) =>
  field(label, select(options, value, choose, { id: `errors-${label.replace(" ", "-")}` }));

class Errors {
  constructor(root, params, context) {
    Object.assign(this, { root, context, params });
    this.measure = latest(async (signal, path, options) => [await context.api.get(path, { signal }),
      await context.api.get(query(`${path}/errors`, options), { signal })]);
    this.open = latest((signal, path) => context.api.get(path, { signal }));
    this.controls = el("div", { class: "controls" });
    this.facts = el("dl", { class: "facts" });
    this.confusion = el("glass-confusion");
    this.title = el("h2", { id: "matrix-title" });
    this.reading = el("p", { class: "note" });
    this.matrix = el("section", { class: "panel", "aria-labelledby": "matrix-title" }, this.title,
      el("p", { class: "hint" },
        "A row is the target, a column what was predicted; count, and per cent of the row."),
      scrolled("Table of answers", this.confusion), this.reading);
    this.confusion.addEventListener("cell", ({ detail }) => context.go(this.address(detail)));
    this.examples = el("section", { class: "panel examples", "aria-labelledby": "examples-title" });
    this.groups = el("section", { class: "panel", "aria-labelledby": "groups-title" });
    this.detail = el("div", { class: "columns" }, this.examples, this.groups);
    fill(root, el("section", { class: "panel", "aria-label": "What is measured" }, this.controls, this.facts),
      this.matrix, this.detail);
  }

  async start() {
    const { runs, folder, first } = await this.context.api.models();
    Object.assign(this, { folder, first, runs: runs.filter((run) => run.kind === "run") });
    await this.update(this.params);
  }

  async update(params) {
    this.params = params;
    this.matrix.hidden = this.detail.hidden = !this.found;
    const run = params.run ?? (this.runs.some(({ id }) => id === this.first) ? this.first : this.runs[0]?.id);
    if (!run) { fill(this.facts, nothingYet()); return; }
    const key = JSON.stringify([run, params.step, params.split]);
    if (key !== this.key && !await this.#measure(run, key)) return;
    this.matrix.hidden = this.detail.hidden = false;
    this.draw();
    await this.list();
  }

  /** Ask the model; whether the answer is the newest. What was shown goes away where there is none. */
  async #measure(run, key) {
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
      return true;
    } catch (error) {
      Object.assign(this, { key: null, found: null });
      this.matrix.hidden = this.detail.hidden = true;
      fill(this.facts, el("p", { class: "muted" }, "Nothing was measured. Choose another run."));
      throw error;
    } finally {
      if (this.key === key || this.key === null) busy(this.root, false);
    }
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
    fill(this.facts, fact("step", count(Number(found.step))), fact("accuracy", percent(found.accuracy, 2)),
      fact("exact match", percent(found.exact_match, 2)), fact("loss", fixed(found.loss, 4)),
      fact("examples", [found.examples < found.of && `the first ${count(found.examples)} of `, count(found.of)]));
    this.matrix.classList.toggle("none", !this.table);
    this.title.textContent = this.table ? "Confusion matrix" : "No confusion matrix";
    this.reading.textContent = !this.table
      ? `The task ${about.task} has no confusion matrix: a wrong token is not the answer to another question.`
      : `${this.table.reading && `A column is ${this.table.reading}. `}Choose a cell to see its examples.`;
    const { target, predicted } = this.params;
    const chosen = target === undefined ? null : { target, predicted };
    if (this.table) this.confusion.data = { ...this.table, chosen };
    const shares = Object.entries(found.by).map(([group, labels]) => [el("h3", {}, `By ${group}`), table({
      caption: `Exact match by ${group}`,
      head: [group, { text: "exact match", n: true }, { text: "examples", n: true }, silent("bar")],
      rows: Object.entries(labels).map(([name, share]) =>
        [name, percent(share, 2), count(found.counts[group][name]), el("span", { class: "gauge" }, meter(share))]),
    })]);
    this.groups.hidden = !shares.length;
    fill(this.groups, el("h2", { id: "groups-title" }, "Right, by group"), shares);
  }

  /** The examples of the chosen cell; without one, some that are wrong. */
  async list() {
    const { target, predicted } = this.params;
    const { found, table: chosen } = this;
    const path = `/api/runs/${encodeURIComponent(this.run)}/errors/cell`;
    const { step, split } = this.params;
    const cell = target !== undefined && predicted !== undefined && chosen
      ? await this.open(query(path, { step, split, group: chosen.group, target, predicted })) : null;
    if (this.gone || (cell === undefined)) return;
    const rows = cell ? cell.examples : found.errors.map(({ row, example }) => ({ row, text: example }));
    const said = rows.some((each) => each.answers?.answer !== undefined);
    const title = cell ? `Target ${target}, predicted ${predicted}: ${count(cell.count)}` : "Some that are wrong";
    const link = ({ row }) => el("a", { class: "open",
      href: this.context.href("inspect", { run: this.run, step, split: found.split, row }),
      "aria-label": `Inspect example ${row}` }, "Inspect");
    fill(this.examples, el("h2", { id: "examples-title" }, title),
      rows.length ? scrolled("Table of examples", table({ caption: title,
        head: [{ text: "row", n: true }, "example", ...(said ? ["predicted"] : []), silent("link")],
        rows: rows.map((each) => [each.row, el("span", { class: "mono text" }, each.text),
          ...(said ? [el("strong", { class: "mono" }, each.answers.answer)] : []), link(each)]),
      })) : el("p", { class: "muted" }, "None."),
      cell && cell.count > rows.length && el("p", { class: "note" }, `The first ${count(rows.length)} are shown.`));
    if (cell) this.context.announce(`${title} examples`);
  }

  commands() {
    const at = this.found && this.params.step ? `${this.run}@${this.params.step}` : this.run;
    const split = this.found?.split ?? "test";
    return {
      cli: `glass evaluate ${at} --split ${split}${this.folder === "runs" ? "" : ` --runs ${this.folder}`}`,
      python: "import glassformer as gf\n\n"
        + `found = gf.evaluate(${JSON.stringify(`${this.folder}/${at}`)}, split=${JSON.stringify(split)})\n`
        + (this.table ? `found.confusion[${JSON.stringify(this.table.group)}]` : "found.by"),
    };
  }

  unmount() { this.gone = true; }
}

export const page = {
  title: "Errors",
  styles: "errors.css",
  async mount(root, params, context) {
    const view = new Errors(root, params, context);
    queueMicrotask(() => view.start().catch(context.alert));
    return view;
  },
};
