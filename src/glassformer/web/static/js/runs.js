// Runs: curves that grow while one looks, a table of what there is, and only the settings that differ.

import "./curves.js";
import { query } from "./api.js";
import { sparkline, swatch } from "./curves.js";
import { check, el, field, fill, scrolled, select } from "./dom.js";
import { count, fixed, missing, percent } from "./format.js";
import { latest } from "./state.js";

const MOST = 20; // runs on one chart; the server draws the same line
const FIRST = 6; // shown where nothing was picked
const EVERY = 1000;
const TONE = { running: "good", finished: "", stopped: "muted", stalled: "warn", diverged: "bad", damaged: "bad",
  model: "muted" };

/** The view, from the parameters of the address. */
export function parse(params) {
  const y = params.y ?? "loss";
  const span = Number(params.smooth ?? (y === "loss" ? 16 : 1));
  return {
    picked: params.runs === undefined ? null : params.runs.split(",").filter(Boolean).slice(0, MOST),
    y, x: ["tokens", "time"].includes(params.x) ? params.x : "step",
    logX: params.logx === "1", logY: params.logy === "1", group: params.group === "seed",
    span: span >= 1 && span <= 1e6 ? span : 1,
  };
}

class Runs {
  constructor(root, params, context) {
    Object.assign(this, { context, view: parse(params), runs: [], lines: new Map(), cursors: new Map(),
      rows: new Map() });
    this.ask = latest((signal, path) => context.api.get(path, { signal }));
    this.askSettings = latest((signal, path) => context.api.get(path, { signal }));
    this.controls = el("div", { class: "controls" });
    this.live = el("span", { class: "live muted" });
    this.curves = el("glass-curves");
    this.curves.addEventListener("point", ({ detail }) =>
      context.go({ run: detail.run, step: detail.step }, "inspect"));
    this.curves.addEventListener("said", ({ detail }) => context.announce(detail));
    this.alerts = el("div", { class: "alerts" });
    this.body = el("tbody", {});
    this.filter = el("input", { type: "search", placeholder: "part of a name", oninput: () => this.sift() });
    this.note = el("p", { class: "note" });
    const heads = ["run", "status", "step", "val loss", "val accuracy", "curve", "differs in"];
    fill(root,
      el("section", { class: "panel", "aria-labelledby": "curves-title" },
        el("div", { class: "row spread" }, el("h2", { id: "curves-title" }, "Curves"), this.live), this.controls,
          this.curves, this.alerts),
      el("section", { class: "panel", "aria-labelledby": "table-title" },
        el("div", { class: "row spread" }, el("h2", { id: "table-title" }, "Runs"),
          field("Filter", this.filter, { hidden: true })),
        scrolled("Table of runs",
          el("table", { class: "data runs-table" },
            el("caption", { class: "visually-hidden" }, "Runs; tick those to draw"),
            el("thead", {}, el("tr", {},
              heads.map((text, i) => el("th", { scope: "col", class: i > 1 && i < 5 ? "n" : null }, text)))),
            this.body)),
        this.note));
  }

  async start() {
    await this.list();
    await this.draw();
    this.tick();
  }

  /** Once a second while someone looks; the next only after the last has answered. */
  tick() {
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      try {
        if (document.visibilityState === "visible") { await this.list(); await this.draw(); }
        if (this.failed) this.context.alert(null);
        this.failed = false;
      } catch (error) {
        if (!this.gone) this.context.alert(error);
        this.failed = true;
      }
      if (!this.gone) this.tick();
    }, EVERY);
  }

  async list() {
    ({ runs: this.runs, folder: this.folder } = await this.context.api.get("/api/runs"));
    if (this.gone) return;
    this.view.picked ??= this.suggested();
    this.table();
    const growing = this.shown().filter((run) => run.status === "running").length;
    const said = [el("span", { class: "good" }, "● "), `live: ${growing} running`];
    fill(this.live, growing ? said : "nothing is running");
  }

  /** Those that run, then the newest. */
  suggested() {
    const order = this.runs.filter((run) => run.kind === "run" && run.status !== "damaged");
    order.sort((a, b) => (b.status === "running") - (a.status === "running") || b.written - a.written);
    return order.slice(0, FIRST).map((run) => run.id);
  }

  /** The picked runs that are here. */
  shown() {
    const drawn = new Map(this.runs.filter((run) => run.kind === "run").map((run) => [run.id, run]));
    return this.view.picked.map((id) => drawn.get(id)).filter(Boolean);
  }

  async draw() {
    const picked = this.shown().map((run) => run.id);
    const { y, x, span, group } = this.view;
    const view = JSON.stringify([picked, y, x, span, group]);
    if (view !== this.drawn) { this.lines.clear(); this.bands = []; this.cursors.clear(); }
    if (!picked.length) { this.paint(); return; }
    const seen = picked.map((id) => this.cursors.get(id) ?? "-");
    const answer = await this.ask(query("/api/curves", {
      runs: picked.join(","), series: y, x, seen: seen.join(","),
      smooth: span > 1 ? span : null, group: group ? "seed" : null,
    }));
    if (!answer || this.gone) return;
    if (view !== this.drawn) this.settings(picked);
    for (const line of answer.curves) { this.lines.set(line.run, line); this.cursors.set(line.run, line.cursor); }
    if (answer.curves.length) this.bands = answer.bands;
    const changed = answer.curves.length || view !== this.drawn;
    this.drawn = view;
    if (JSON.stringify(answer.names) !== JSON.stringify(this.names)) { this.names = answer.names; this.control(); }
    if (changed) this.paint();
  }

  paint() {
    const { x, y, logX, logY } = this.view;
    const picked = this.shown().map((run) => run.id);
    const none = { x: [], y: [], step: [], alerts: [], checkpoints: [] };
    const lines = this.shown().map(({ id, status }, index) =>
      ({ ...none, ...this.lines.get(id), run: id, index, diverged: status === "diverged" }));
    const bands = (this.bands ?? []).map((band) => ({ ...band, index: picked.indexOf(band.runs[0]) }));
    const xName = { step: "step", tokens: "tokens", time: "seconds of training" }[x];
    this.curves.data = { lines, bands, logX, logY, xName, yName: y };
    const told = lines.flatMap((line) => line.alerts.map((alert) => ({ run: line.run, ...alert }))).slice(-8).reverse();
    fill(this.alerts, bands.map((band) => el("p", { class: "note" }, swatch(band.index),
      ` mean of ${band.runs.join(", ")}; the band is their lowest to highest`)),
    told.length > 0 && [el("h3", {}, "Alerts, newest first"),
      el("ul", { class: "plain" }, told.map(({ run, step, kind, message }) => el("li", {},
        el("span", { class: "bad" }, "✕ "), `${run}, step ${count(step)}: ${kind}. ${message}`)))]);
  }

  /** Made anew only where there are other curves to choose from: a slider must survive being dragged. */
  control() {
    const names = [...new Set([...(this.names ?? ["loss"]), this.view.y])];
    if (JSON.stringify(names) !== this.offered) {
      this.offered = JSON.stringify(names);
      const held = document.activeElement?.id;
      const smooth = el("input", { type: "range", min: 0, max: 8, step: 1,
        oninput: (event) => this.set({ smooth: 2 ** Number(event.target.value) }, true) });
      const flag = (label, name, value = 1) => check(label, false, (on) => this.set({ [name]: on ? value : null }),
        { id: `runs-${name}` });
      this.inputs = {
        y: select(names, this.view.y, (value) => this.set({ y: value, smooth: null }), { id: "runs-y" }),
        x: select(["step", "tokens", "time"], this.view.x, (value) => this.set({ x: value }), { id: "runs-x" }),
        smooth, logX: flag("log x", "logx"), logY: flag("log y", "logy"), group: flag("group seeds", "group", "seed"),
      };
      this.span = el("span", { class: "hint" });
      fill(this.controls, field("y", this.inputs.y), field("x", this.inputs.x),
        el("div", { class: "smooth" }, field("smoothing", smooth), this.span), this.inputs.logX, this.inputs.logY,
          this.inputs.group);
      if (held) document.getElementById(held)?.focus();
    }
    const { y, x, smooth } = this.inputs;
    [y.value, x.value, smooth.value] = [this.view.y, this.view.x, Math.round(Math.log2(this.view.span))];
    for (const name of ["logX", "logY", "group"]) this.inputs[name].querySelector("input").checked = this.view[name];
    this.span.textContent = words(this.view.span);
  }

  params() {
    const { picked, y, x, logX, logY, group, span } = this.view;
    const usual = y === "loss" ? 16 : 1;
    return {
      runs: picked?.join(","), y: y === "loss" ? null : y, x: x === "step" ? null : x,
      smooth: span === usual ? null : span,
      logx: logX ? 1 : null, logy: logY ? 1 : null, group: group ? "seed" : null,
    };
  }

  set(change, again = false) {
    const params = { ...this.params(), ...change };
    if (again) this.context.replace(params); else this.context.go(params);
  }

  async update(params) {
    this.view = { ...parse(params), picked: parse(params).picked ?? this.suggested() };
    this.table();
    this.control();
    await this.draw();
    this.paint();
  }

  async settings(picked) {
    try {
      this.differs = picked.length > 1 ? await this.askSettings(query("/api/settings", { runs: picked.join(",") }))
        : null;
      if (!this.gone) this.table();
    } catch (error) { this.context.alert(error); }
  }

  pick(id, on) {
    const picked = on ? [...this.view.picked, id] : this.view.picked.filter((each) => each !== id);
    if (picked.length > MOST) {
      this.context.toast(`At most ${MOST} runs are drawn at once.`);
      this.table(true);
    } else this.set({ runs: picked.join(",") || "," });
  }

  /** Rows are kept and refilled, so that the focus stays where it is while numbers change. */
  table(force = false) {
    const order = new Map(this.shown().map((run, index) => [run.id, index]));
    const here = new Set(this.runs.map((run) => run.id));
    for (const [id, row] of this.rows) if (!here.has(id)) { row.node.remove(); this.rows.delete(id); }
    for (const [place, run] of this.runs.entries()) {
      const index = order.get(run.id);
      const differs = index === undefined ? null : this.differs?.runs[run.id];
      const now = JSON.stringify([run, index, differs]);
      const row = this.rows.get(run.id) ?? this.row(run);
      if (row.now !== now || force) this.refill(row, run, index, differs);
      row.now = now;
      if (this.body.children[place] !== row.node) this.body.insertBefore(row.node, this.body.children[place] ?? null);
    }
    this.sift();
  }

  row(run) {
    const box = el("input", { type: "checkbox", "aria-label": `draw ${run.id}`, disabled: run.kind !== "run",
      onchange: (event) => this.pick(run.id, event.target.checked) });
    const mark = el("span", { class: "mark-cell" });
    const name = el("a", { href: this.context.href("inspect", { run: run.id }) }, run.id);
    const cells = Array.from({ length: 6 }, (_, i) => el("td", { class: i > 0 && i < 4 ? "n" : null }));
    const head = el("th", { scope: "row" }, el("span", { class: "run-cell" }, el("label", { class: "pick" }, box),
      mark, name));
    const made = { node: el("tr", { "data-run": run.id }, head, cells), box, mark, cells };
    this.rows.set(run.id, made);
    return made;
  }

  refill({ node, box, mark, cells }, run, index, differs) {
    const picked = index !== undefined;
    box.checked = picked;
    node.classList.toggle("picked", picked);
    fill(mark, picked && swatch(index));
    const steps = run.steps ? `${count(run.step)} / ${count(run.steps)}` : count(run.step);
    const keys = differs ? this.differs.keys.filter((key) => !missing(differs[key])) : [];
    const each = (key) => el("span", { class: "chip", title: `${key} ${written(differs[key])}` },
      key.split(".").filter((part) => !/^\d+$/.test(part)).slice(-2).join("."), " ",
        el("b", {}, written(differs[key])));
    const content = [
      el("span", { class: `status ${TONE[run.status] ?? ""}` }, run.status,
        run.why && el("span", { class: "why" }, run.why)),
      run.kind === "run" ? steps : null, fixed(run.val_loss, 4), percent(run.val_accuracy, 2),
      sparkline(run.spark ?? [], `loss of ${run.id}, from first to last`),
      [keys.slice(0, 3).map(each), keys.length > 3
        && el("details", {}, el("summary", {}, `${keys.length - 3} more`), keys.slice(3).map(each))],
    ];
    content.forEach((part, i) => fill(cells[i], run.kind === "run" || i === 0 ? part : null));
  }

  sift() {
    const part = this.filter.value.trim().toLowerCase();
    let shown = 0;
    for (const [id, { node }] of this.rows) { node.hidden = !id.toLowerCase().includes(part); shown += !node.hidden; }
    const all = this.runs.length;
    this.note.textContent = all
      ? `${count(shown)} of ${count(all)} shown, ${count(this.view.picked.length)} drawn (at most ${MOST}).`
      : "No runs here yet. Train one: glass train digits";
  }

  commands() {
    const picked = this.shown().map((run) => run.id);
    const { y, x, span, logY } = this.view;
    const options = [`--series ${y}`, x !== "step" && `--x ${x}`, `--smooth ${span}`, logY ? "--log" : "--linear",
      this.folder !== "runs" && `--runs ${this.folder}`];
    const smooth = span > 1 ? `.smoothed(${span})` : "";
    return {
      cli: `glass report ${picked.join(" ")} --curves ${options.filter(Boolean).join(" ")}`,
      python: `from pathlib import Path\nfrom glassformer.lab.runs.curves import read_curves\n\n`
        + picked.map((id) => `read_curves(Path(${JSON.stringify(this.folder)}) / ${JSON.stringify(id)})`
          + `[${JSON.stringify(y)}]${smooth}`).join("\n"),
    };
  }

  unmount() { this.gone = true; clearTimeout(this.timer); }
}

const words = (span) => (span > 1 ? `over ${count(span)} points` : "off");
const written = (value) => (Array.isArray(value) ? value.join(", ") : String(value));

export const page = {
  title: "Runs",
  styles: "runs.css",
  async mount(root, params, context) {
    const view = new Runs(root, params, context);
    await view.start();
    return view;
  },
};
