// <glass-curves>: one quantity of several runs. Lines differ by colour and by dash, the smoothed one lies
// on the raw one, validation is a thin line with rings, alerts stand on the curve. Arrows move a cursor,
// Enter or a click opens the point.

import { el, fill, svg } from "./dom.js";
import { count, short } from "./format.js";
import { apart, axis, nearest, path } from "./scale.js";

const HOW = "Point at a curve, or focus it and use the arrows; Enter or a click opens Inspect there.";
const COLOURS = 8;
const NEAR = 110; // pixels: about the longest name of a line
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "4 2"];
export const colourOf = (index) => `series-${index % COLOURS + 1}`;
const dashOf = (index) => DASHES[(index + Math.floor(index / COLOURS)) % DASHES.length] || null;

/** A short line in a run's colour and dash: what the legend and the table show. */
export function swatch(index) {
  return svg("svg", { class: `swatch ${colourOf(index)}`, width: 22, height: 10, "aria-hidden": true },
    svg("line", { x1: 0, y1: 5, x2: 22, y2: 5, "stroke-width": 2.5, "stroke-dasharray": dashOf(index) }));
}

/** A curve without axes, as wide as a word. */
export function sparkline(values, label) {
  if (values.length < 2) return null;
  const x = axis([0, values.length - 1], { start: 1, end: 79, pad: 0 });
  const y = axis(values, { start: 19, end: 3, pad: 0 });
  return svg("svg", { class: "spark", width: 80, height: 22, role: "img", "aria-label": label },
    svg("path", { d: path(values.map((_, i) => i), values, x, y) }));
}

customElements.define("glass-curves", class extends HTMLElement {
  #data = null;
  #at = null; // {line, point}: the cursor
  #axes = null;
  #seen = null;

  connectedCallback() {
    this.readout = el("p", { class: "readout" });
    this.chart = el("div", {
      class: "chart", tabindex: 0, role: "application", "aria-roledescription": "chart",
      onkeydown: (event) => this.#key(event), onpointermove: (event) => this.#hover(event),
      onpointerleave: () => this.#move(null), onclick: (event) => { this.#hover(event); this.#open(); },
      onblur: () => this.#move(null),
    });
    fill(this, this.chart, this.readout);
    this.#seen = new ResizeObserver(() => this.#draw());
    this.#seen.observe(this.chart);
  }

  disconnectedCallback() { this.#seen?.disconnect(); }

  /** {lines: [{run, index, x, y, step, smooth, beside, alerts, checkpoints}], bands, logX, logY, xName, yName,
   *  nothing: what to say where no line has a point} */
  set data(data) {
    const run = this.#at && this.#data.lines[this.#at.line]?.run;
    this.#data = data;
    const line = data.lines.findIndex((each) => each.run === run);
    this.#at = line < 0 ? null : { line, point: Math.min(this.#at.point, data.lines[line].x.length - 1) };
    this.#draw();
  }

  #draw() {
    const width = Math.round(this.chart?.clientWidth ?? 0);
    if (!this.#data || !width) return;
    const { lines, bands, logX, logY, xName, yName } = this.#data;
    if (!lines.some((line) => line.x.length) && !bands.length) { this.#nothing(); return; }
    const wide = width >= 640;
    const height = wide ? 380 : 280;
    const box = { left: 52, right: width - (wide && lines.length ? 128 : 12), top: 10, bottom: height - 40 };
    const xs = lines.flatMap((line) => line.x).concat(bands.flatMap((band) => band.x));
    // A loss that ran away would press the others flat: it leaves the chart, unless it is alone or y is log.
    const steady = lines.filter((line) => !line.diverged && line.y.length);
    const scaled = logY || !steady.length ? lines : steady;
    const ys = scaled.flatMap((line) => [...line.y, ...line.beside?.y ?? []])
      .concat(bands.flatMap((band) => [...band.low, ...band.high]));
    const x = axis(xs, { start: box.left, end: box.right, log: logX, wanted: wide ? 8 : 4, pad: 0 });
    const y = axis(ys, { start: box.bottom, end: box.top, log: logY, wanted: 6 });
    this.#axes = { x, y, box };
    const drawn = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": this.#summary() });
    drawn.append(...this.#grid(x, y, box, { xName, yName, logX, logY }));
    const clip = svg("clipPath", { id: "plot" },
      svg("rect", { x: box.left - 8, y: 0, width: box.right - box.left + 16, height: box.bottom + 6 }));
    const inside = svg("g", { "clip-path": "url(#plot)" });
    drawn.append(clip, inside);
    for (const band of bands) inside.append(...this.#band(band, x, y));
    const grouped = new Set(bands.flatMap((band) => band.runs));
    for (const line of lines) inside.append(...this.#line(line, x, y, grouped.has(line.run)));
    const named = [...lines.filter((line) => !grouped.has(line.run)),
      ...bands.map((band) => ({ run: band.name, index: band.index, x: band.x, y: band.mean }))];
    if (wide) drawn.append(...this.#labels(named, x, y, box));
    this.cursor = svg("g", { class: "cursor" });
    drawn.append(this.cursor);
    fill(this.chart, drawn);
    this.chart.setAttribute("aria-label",
      `${yName} over ${xName} of ${lines.length} runs: arrows move, Enter opens Inspect`);
    this.#move(this.#at, true);
  }

  /** Axes without a curve would claim a scale: say why there is none. */
  #nothing() {
    this.#axes = this.cursor = null;
    fill(this.chart, el("p", { class: "nothing muted" }, this.#data.nothing));
    this.chart.setAttribute("aria-label", this.#data.nothing);
    fill(this.readout);
  }

  #summary() {
    const { lines, yName } = this.#data;
    const told = lines.map((line) => `${line.run} ${short(line.y.at(-1))} at step ${count(line.step.at(-1))}`);
    return told.length ? `Last ${yName}: ${told.join("; ")}` : "Nothing to draw yet";
  }

  #grid(x, y, box, { xName, yName, logX, logY }) {
    const made = [];
    for (const value of y.ticks) {
      made.push(svg("line", { class: "rule", x1: box.left, x2: box.right, y1: y.at(value), y2: y.at(value) }),
        svg("text", { x: box.left - 8, y: y.at(value) + 4, "text-anchor": "end" }, label(value, y.ticks)));
    }
    for (const value of x.ticks) {
      const [at, text] = [x.at(value), label(value, x.ticks)];
      const end = at + 3.5 * text.length > box.right + 10 ? "end" : "middle"; // the last must not leave the picture
      made.push(svg("line", { class: "rule", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }),
        svg("text", { x: end === "end" ? box.right + 10 : at, y: box.bottom + 17, "text-anchor": end }, text));
    }
    made.push(svg("text", { x: box.right, y: box.bottom + 33, "text-anchor": "end" },
      `${xName}${logX ? " (log)" : ""}`),
      svg("text", { x: box.left, y: box.bottom + 33 }, `↑ ${yName}${logY ? " (log)" : ""}`));
    return made;
  }

  #line({ run, index, x: xs, y: ys, step, smooth, beside, alerts }, x, y, beneath) {
    const strong = !smooth && !beneath;
    const props = { class: `line ${colourOf(index)}${strong ? "" : " raw"}`, "data-run": run };
    const made = [svg("path", { ...props, d: path(xs, ys, x, y), "stroke-dasharray": strong ? dashOf(index) : null })];
    if (smooth && !beneath) {
      made.push(svg("path", { class: `line smooth ${colourOf(index)}`, d: path(smooth.x, smooth.y, x, y),
        "stroke-dasharray": dashOf(index) }));
    }
    if (beside) made.push(svg("path", { class: `line beside ${colourOf(index)}`, d: path(beside.x, beside.y, x, y) }));
    beside?.x.forEach((value, i) => Number.isFinite(beside.y[i] ?? NaN) && made.push(svg("circle",
      { class: `ring ${colourOf(index)}`, cx: x.at(value), cy: y.at(beside.y[i]), r: 2.5 })));
    const dot = { class: `dot ${colourOf(index)}`, cx: x.at(xs[0]), cy: y.at(ys[0]), r: 3 };
    if (xs.length === 1) made.push(svg("circle", dot));
    for (const alert of step.length ? alerts : []) {
      const at = nearest(step, alert.step);
      const [px, py] = [x.at(xs[at]), y.at(ys[at] ?? NaN)];
      if (!Number.isFinite(px)) continue;
      // one that is not finite has no height
      const top = Math.max(this.#axes.box.top + 6, Number.isFinite(py) ? py : 0);
      made.push(svg("path", { class: "alert-mark", d: `M${px - 5} ${top - 5}l10 10m0 -10l-10 10` },
        svg("title", {}, `${run}, step ${alert.step}: ${alert.kind}. ${alert.message}`)));
    }
    return made;
  }

  #band({ index, x: xs, mean, low, high }, x, y) {
    const back = path([...xs].reverse(), [...low].reverse(), x, y).replace(/^M/, "L");
    const area = xs.length > 1 ? `${path(xs, high, x, y)}${back}Z` : "";
    return [svg("path", { class: `band ${colourOf(index)}`, d: area }),
      svg("path", { class: `line mean ${colourOf(index)}`, d: path(xs, mean, x, y) })];
  }

  /** Each name where its line ends; those that end near each other make room. */
  #labels(lines, x, y, box) {
    const ends = lines.map((line) => {
      const drawn = line.smooth ?? line;
      const last = drawn.y.findLastIndex((value) => Number.isFinite(y.at(value ?? NaN)));
      return last < 0 ? null : { line, x: x.at(drawn.x[last]), y: Math.max(box.top, y.at(drawn.y[last])) };
    }).filter(Boolean).sort((a, b) => a.x - b.x);
    const places = ends.map((end) => end.y);
    for (let from = 0, to = 0; from < ends.length; from = to) {
      while (to < ends.length && ends[to].x < ends[from].x + NEAR) to += 1;
      apart(places.slice(from, to), 15, box.top + 4, box.bottom).forEach((at, i) => { places[from + i] = at; });
    }
    const named = ends.map((end, i) => ({ ...end, y: places[i] })).sort((a, b) => a.line.index - b.line.index);
    return named.map(({ line: { run, index }, x: px, y: py }) => svg("text",
      { class: `end ${colourOf(index)}`, x: px + 8, y: py + 4 },
      run.length > 17 ? `${run.slice(0, 16)}…` : run));
  }

  #hover(event) {
    if (!this.#axes || !this.#data.lines.length) return;
    const place = this.chart.getBoundingClientRect();
    const [px, py] = [event.clientX - place.left, event.clientY - place.top];
    const wanted = this.#axes.x.from(px);
    let best = null;
    this.#data.lines.forEach((line, index) => {
      if (!line.x.length) return;
      const point = nearest(line.x, wanted);
      const [x, y] = [this.#axes.x.at(line.x[point]), this.#axes.y.at(line.y[point] ?? NaN)];
      const far = Math.abs(y - py) + 0.001 * Math.abs(x - px);
      if (!best || far < best.far) best = { line: index, point, far };
    });
    this.#move(best);
  }

  #key(event) {
    const { lines } = this.#data ?? { lines: [] };
    if (!lines.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const now = this.#at ?? { line: 0, point: lines[0].x.length - 1 };
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [0, -20], PageDown: [0, 20], ArrowUp: [-1, 0],
      ArrowDown: [1, 0] };
    if (event.key === "Enter") { this.#open(); event.preventDefault(); return; }
    if (event.key === "Home") now.point = 0;
    else if (event.key === "End") now.point = Infinity;
    else if (!steps[event.key]) return;
    event.preventDefault();
    const [down, along] = steps[event.key] ?? [0, 0];
    const line = Math.max(0, Math.min(lines.length - 1, now.line + (this.#at ? down : 0)));
    const from = line === now.line ? now.point : nearest(lines[line].step, lines[now.line].step[now.point]);
    const point = Math.max(0, Math.min(lines[line].x.length - 1, from + (this.#at ? along : 0)));
    this.#move({ line, point });
    this.dispatchEvent(new CustomEvent("said", { detail: this.readout.textContent }));
  }

  #move(at, redrawn = false) {
    this.#at = at;
    if (!this.cursor) return;
    fill(this.cursor);
    const line = at && this.#data.lines[at.line];
    if (!line?.x.length) {
      if (!redrawn || !at) fill(this.readout, HOW);
      return;
    }
    const { x, y, box } = this.#axes;
    const [px, py] = [x.at(line.x[at.point]), y.at(line.y[at.point] ?? NaN)];
    this.cursor.append(svg("line", { x1: px, x2: px, y1: box.top, y2: box.bottom }));
    if (Number.isFinite(py)) this.cursor.append(svg("circle", { class: colourOf(line.index), cx: px, cy: py, r: 4.5 }));
    const near = this.#checkpoint(line, line.step[at.point]);
    const val = line.beside?.x.length && nearest(line.beside.step, line.step[at.point]);
    fill(this.readout, el("strong", {}, line.run), ` step ${count(line.step[at.point])}: `,
      el("span", { class: "value" }, short(line.y[at.point])),
      line.beside?.x.length > 0
        && ` · ○ validation at step ${count(line.beside.step[val])}: ${short(line.beside.y[val])}`,
      el("span", { class: "muted" }, near === null ? " · no checkpoint" : ` · opens checkpoint ${count(near)}`));
  }

  #checkpoint({ checkpoints }, step) { return checkpoints.length ? checkpoints[nearest(checkpoints, step)] : null; }

  #open() {
    const line = this.#at && this.#data.lines[this.#at.line];
    const step = line && this.#checkpoint(line, line.step[this.#at.point]);
    if ((step ?? null) === null) return;
    this.dispatchEvent(new CustomEvent("point", { detail: { run: line.run, step } }));
  }
});

/** As many decimals as the ticks need to differ. */
function label(value, all) {
  const size = Math.max(...all.map(Math.abs));
  if (value === 0) return "0";
  const [unit, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  if (unit > 1) return `${Number((value / unit).toPrecision(3))}${letter}`;
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(0).replace("e-", "e−");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}
