// Runs: curves that grow while one looks, a table of what there is, and only the settings that differ.

import "./curves.js";
import { query } from "./api.js";
import { sparkline, swatch } from "./curves.js";
import { check, el, field, fill, nothingYet, panel, scrolled, select } from "./dom.js";
import { count, fixed, missing, percent, size } from "./format.js";
import { latest, mounted } from "./state.js";

const MOST = 20; // runs on one chart; the server draws the same line
const FIRST = 6; // shown where nothing was picked
const EVERY = 1000;
const TONE = { running: "good", finished: "", stopped: "muted", stalled: "warn", diverged: "bad", damaged: "bad",
  model: "muted" };

const NEWEST = "-written";

const written = (value) => (Array.isArray(value) ? value.join(", ") : String(value));
/** Columns: by what they sort, their head, and a cell; `n`: numbers. */
const COLUMNS = [
  { key: "id", head: "run" },
  { key: "status", head: "status", cell: ({ status, why }) => el("span", { class: `status ${TONE[status] ?? ""}` },
    status, why && el("span", { class: "why" }, why)) },
  { key: "task", head: "task",
    cell: ({ task, tags = [] }) => [task, tags.map((tag) => el("span", { class: "chip" }, tag))] },
  { key: "parameters", head: "parameters", n: true, cell: (run) => size(run.parameters) },
  { key: "step", head: "step", n: true,
    cell: ({ step, steps }) => (steps ? `${count(step)} / ${count(steps)}` : count(step)) },
  { key: "seconds", head: "time", n: true, cell: (run) => run.time },
  { key: "val_loss", head: "val loss", n: true, cell: (run) => fixed(run.val_loss, 4) },
  { key: "val_accuracy", head: "val accuracy", n: true, cell: (run) => percent(run.val_accuracy, 2) },
  { key: "seed", head: "seed", n: true, cell: (run) => (missing(run.seed) ? "–" : String(run.seed)) },
  { key: "written", head: "date", cell: (run) => run.date },
  { head: "curve", cell: (run) => sparkline(run.spark ?? [], `loss of ${run.id}, from first to last`) },
  { head: "differs in", cell: (run, differs, keys) => {
    const each = (key) => el("span", { class: "chip", title: `${key} ${written(differs[key])}` },
      key.split(".").filter((part) => !/^\d+$/.test(part)).slice(-2).join("."), " ",
      el("b", {}, written(differs[key])));
    const own = differs ? keys.filter((key) => !missing(differs[key])) : [];
    return [own.slice(0, 3).map(each), own.length > 3
      && el("details", {}, el("summary", {}, `${own.length - 3} more`), own.slice(3).map(each))];
  } },
];

/** Runs by a column, `-written` from large to small; what is missing comes last. */
export function sorted(runs, by) {
  const [key, down] = [by.replace("-", ""), by.startsWith("-") ? -1 : 1];
  return [...runs].sort((a, b) => (missing(a[key]) - missing(b[key])) || (missing(a[key]) ? 0
    : down * (typeof a[key] === "number" ? a[key] - b[key] : String(a[key]).localeCompare(b[key])))
    || a.id.localeCompare(b.id));
}

/** The view, from the parameters of the address. */
export function parse(params) {
  const y = params.y ?? "loss";
  const span = Number(params.smooth ?? (y === "loss" ? 16 : 1));
  return {
    picked: params.runs === undefined ? null : params.runs.split(",").filter(Boolean).slice(0, MOST),
    y, x: ["tokens", "time"].includes(params.x) ? params.x : "step",
    logX: params.logx === "1", logY: params.logy === "1", group: params.group === "seed", val: params.val === "1",
    span: span >= 1 && span <= 1e6 ? span : 1,
    sort: COLUMNS.some(({ key }) => key && key === params.sort?.replace(/^-/, "")) ? params.sort : NEWEST,
  };
}

class Runs {
  constructor(root, context, params) {
    Object.assign(this, { root, context, view: parse(params), runs: [], lines: new Map(), cursors: new Map(),
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
    this.filter = el("input", { type: "search", placeholder: "name, task or tag", oninput: () => this.sift() });
    this.note = el("p", { class: "note" });
    this.all = el("input", { type: "checkbox", "aria-label": "draw all that are listed",
      onchange: (event) => this.pickAll(event.target.checked) });
    this.heads = COLUMNS.map(({ key, head, n }) => el("th", { scope: "col", class: n ? "n" : null },
      key === "id" && el("label", { class: "pick" }, this.all),
      key ? el("button", { type: "button", class: "sort", onclick: () => this.sort(key) }, head) : head));
    fill(root,
      panel("curves", "Curves", this.live, this.controls, this.curves, this.alerts),
      panel("table", "Runs", field("Filter", this.filter, { hidden: true }),
        scrolled("Table of runs", el("table", { class: "data runs-table" },
          el("caption", { class: "visually-hidden" }, "Runs; tick those to draw"),
          el("thead", {}, el("tr", {}, this.heads)), this.body)),
        this.note));
  }

  /** No curve is left of what was drawn before. */
  clear() {
    this.lines.clear();
    this.cursors.clear();
    Object.assign(this, { bands: [], drawn: null });
    this.curves.data = { lines: [], bands: [], nothing: "" };
    fill(this.alerts);
  }

  async prepare() {
    await this.list();
    if (!this.runs.length) { this.gone = true; fill(this.root, nothingYet()); return; }
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

  /** Those that run, then the newest; only of one task: losses of two do not compare. */
  suggested() {
    const order = sorted(this.runs.filter((run) => run.kind === "run" && run.status !== "damaged"), NEWEST);
    order.sort((a, b) => (b.status === "running") - (a.status === "running"));
    return order.filter((run) => run.task === order[0]?.task).slice(0, FIRST).map((run) => run.id);
  }

  /** The picked runs that are here. */
  shown() {
    const drawn = new Map(this.runs.filter((run) => run.kind === "run").map((run) => [run.id, run]));
    return (this.view.picked ?? []).map((id) => drawn.get(id)).filter(Boolean);
  }

  async draw() {
    const picked = this.shown().map((run) => run.id);
    const { y, x, span, group, val } = this.view;
    const view = JSON.stringify([picked, y, x, span, group, val]);
    if (view !== this.drawn) { this.lines.clear(); this.bands = []; this.cursors.clear(); }
    if (!picked.length) { this.paint(); return; }
    const seen = picked.map((id) => this.cursors.get(id) ?? "-");
    const answer = await this.ask(query("/api/curves", {
      runs: picked.join(","), series: y, x, seen: seen.join(","),
      smooth: span > 1 ? span : null, group: group ? "seed" : null,
      beside: val ? "val" : null,
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

  #nothing(picked, y) {
    if (!this.runs.some((run) => run.kind === "run")) return "A model has no curves; a run that was trained here has.";
    return picked ? `No ${y} was recorded yet.` : "Tick a run in the table to draw its curve.";
  }

  paint() {
    const { x, y, logX, logY } = this.view;
    const picked = this.shown().map((run) => run.id);
    const none = { x: [], y: [], step: [], alerts: [], checkpoints: [] };
    const lines = this.shown().map(({ id, status }, index) =>
      ({ ...none, ...this.lines.get(id), run: id, index, diverged: status === "diverged" }));
    const bands = (this.bands ?? []).map((band) => ({ ...band, index: picked.indexOf(band.runs[0]) }));
    const tasks = new Set(this.shown().map((run) => run.task));
    const xName = { step: "step", tokens: "tokens", time: "seconds of training" }[x];
    const yName = /loss|nll|objective|entropy|excess/.test(y) ? `${y}, nats` : y;
    const nothing = this.#nothing(picked.length, y);
    this.curves.data = { lines, bands, logX, logY, xName, yName, nothing };
    const told = lines.flatMap((line) => line.alerts.map((alert) => ({ run: line.run, ...alert }))).slice(-8).reverse();
    fill(this.alerts, tasks.size > 1 && /loss/.test(y) && el("p", { class: "note warn" },
      `These runs learn ${[...tasks].join(", ")}: their losses do not compare.`),
    bands.map((band) => el("p", { class: "note" }, swatch(band.index), el("b", {}, ` ${band.name}`),
      `: mean of ${band.runs.join(", ")}; the band is their lowest to highest`)),
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
        val: flag("with validation", "val"),
      };
      this.span = el("span", { class: "hint" });
      fill(this.controls, field("y", this.inputs.y), field("x", this.inputs.x),
        el("div", { class: "smooth" }, field("smoothing", smooth), this.span), this.inputs.logX, this.inputs.logY,
          this.inputs.group, this.inputs.val);
      if (held) document.getElementById(held)?.focus();
    }
    const { y, x, smooth } = this.inputs;
    [y.value, x.value, smooth.value] = [this.view.y, this.view.x, Math.round(Math.log2(this.view.span))];
    for (const name of ["logX", "logY", "group", "val"]) {
      this.inputs[name].querySelector("input").checked = this.view[name];
    }
    this.inputs.val.hidden = !names.includes(`val.${this.view.y}`);
    this.span.textContent = words(this.view.span);
  }

  params() {
    const { picked, y, x, logX, logY, group, val, span, sort } = this.view;
    const usual = y === "loss" ? 16 : 1;
    return {
      runs: picked?.join(","), y: y === "loss" ? null : y, x: x === "step" ? null : x,
      smooth: span === usual ? null : span,
      logx: logX ? 1 : null, logy: logY ? 1 : null, group: group ? "seed" : null, val: val ? 1 : null,
      sort: sort === NEWEST ? null : sort,
    };
  }

  /** By this column; numbers from the largest first, once more the other way round. */
  sort(key) {
    const { sort } = this.view;
    const down = typeof this.runs.find((run) => !missing(run[key]))?.[key] === "number" ? `-${key}` : key;
    this.set({ sort: sort === down ? (down === key ? `-${key}` : key) : down });
  }

  pickAll(on) {
    const listed = sorted(this.runs, this.view.sort)
      .filter(({ id, kind }) => kind === "run" && !this.rows.get(id).node.hidden).map(({ id }) => id);
    if (listed.length > MOST && on) this.context.toast(`The first ${MOST} are drawn.`);
    this.set({ runs: (on ? listed.slice(0, MOST).join(",") : "") || "," });
  }

  set(change, again = false) {
    const params = { ...this.params(), ...change };
    if (again) this.context.replace(params); else this.context.go(params);
  }

  async update(params) {
    this.view = parse(params);
    if (!this.runs.length) return;
    this.view.picked ??= this.suggested();
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
    for (const [place, run] of sorted(this.runs, this.view.sort).entries()) {
      const index = order.get(run.id);
      const differs = index === undefined ? null : this.differs?.runs[run.id];
      const now = JSON.stringify([run, index, differs]);
      const row = this.rows.get(run.id) ?? this.row(run);
      if (row.now !== now || force) this.refill(row, run, index, differs);
      row.now = now;
      if (this.body.children[place] !== row.node) this.body.insertBefore(row.node, this.body.children[place] ?? null);
    }
    COLUMNS.forEach(({ key }, i) => {
      const way = { [key]: "ascending", [`-${key}`]: "descending" }[this.view.sort];
      if (key && way) this.heads[i].setAttribute("aria-sort", way); else this.heads[i].removeAttribute("aria-sort");
    });
    this.sift();
  }

  row(run) {
    const box = el("input", { type: "checkbox", "aria-label": `draw ${run.id}`, disabled: run.kind !== "run",
      onchange: (event) => this.pick(run.id, event.target.checked) });
    const mark = el("span", { class: "mark-cell" });
    const name = el("a", { href: this.context.href("inspect", { run: run.id }) }, run.id);
    const cells = COLUMNS.slice(1).map(({ key, n }) => el("td", { class: n ? "n" : null, "data-key": key }));
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
    COLUMNS.slice(1).forEach(({ key, cell }, i) =>
      fill(cells[i], (run.kind === "run" || key === "status") && cell(run, differs, this.differs?.keys)));
  }

  sift() {
    const part = this.filter.value.trim().toLowerCase();
    let shown = 0;
    for (const { id, task = "", tags = [] } of this.runs) {
      const { node } = this.rows.get(id);
      node.hidden = ![id, task, ...tags].some((text) => text.toLowerCase().includes(part));
      shown += !node.hidden;
    }
    const drawn = this.shown().length;
    [this.all.checked, this.all.indeterminate] = [drawn >= Math.min(MOST, shown), drawn > 0 && drawn < shown];
    this.note.textContent = `${count(shown)} of ${count(this.runs.length)} listed, ${count(drawn)} drawn `
      + `(at most ${MOST}).${drawn ? "" : " Tick a run to draw its curve."}`;
  }

  commands() {
    const picked = this.shown().map((run) => run.id);
    const { y, x, span, logY, val } = this.view;
    const wanted = val ? [y, `val.${y}`] : [y];
    const options = [...wanted.map((name) => `--series ${name}`), x !== "step" && `--x ${x}`, `--smooth ${span}`,
      logY ? "--log" : "--linear", this.folder !== "runs" && `--runs ${this.folder}`];
    const smooth = span > 1 ? `.smoothed(${span})` : "";
    return {
      cli: `glass report ${picked.join(" ")} --curves ${options.filter(Boolean).join(" ")}`,
      python: `from pathlib import Path\nfrom glassformer.lab.runs.curves import read_curves\n\n`
        + picked.flatMap((id) => wanted.map((name) => `read_curves(Path(${JSON.stringify(this.folder)}) / `
          + `${JSON.stringify(id)})[${JSON.stringify(name)}]${name === y ? smooth : ""}`)).join("\n"),
    };
  }

  unmount() { this.gone = true; clearTimeout(this.timer); }
}

const words = (span) => (span > 1 ? `over ${count(span)} points` : "off");

export const page = { title: "Runs", styles: "runs.css", mount: mounted(Runs) };
