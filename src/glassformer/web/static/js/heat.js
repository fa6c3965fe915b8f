// <glass-heat>: one attention map, large, with its tokens along both sides. Row = from, column = to.
// Masked cells are hatched: white would read as zero.

import { el } from "./dom.js";
import { fixed } from "./format.js";
import { ground, hatch, palette, shade } from "./ramp.js";
import * as theme from "./theme.js";

const FONT = 12;
const LARGEST = 72; // pixels of a cell
const LABEL = 92; // pixels of a row's label
const family = () => getComputedStyle(document.documentElement).getPropertyValue("--mono");

customElements.define("glass-heat", class extends HTMLElement {
  #data = null;
  #canvas = null;
  #box = null;
  #hover = null;
  #stop = [];

  connectedCallback() {
    if (!this.#canvas) {
      this.#canvas = el("canvas", { role: "img",
        onpointermove: (event) => this.#point(event), onpointerleave: () => this.#leave(),
        onclick: (event) => { const cell = this.#cell(event); if (cell) this.#tell("pick", cell); } });
      this.note = el("p", { class: "note every" });
      this.append(this.#canvas, this.note);
    }
    const resized = new ResizeObserver(() => this.draw());
    resized.observe(this);
    this.#stop = [theme.watch(() => this.draw()), () => resized.disconnect()];
  }

  disconnectedCallback() { for (const stop of this.#stop) stop(); }

  /** {values, shape: [T, S], rows, columns, row, top (value of the darkest colour), label} */
  set data(data) { this.#data = data; this.draw(); }
  get data() { return this.#data; }

  /** Mark a row and a column without choosing them. */
  set hover(cell) { this.#hover = cell; this.draw(); }

  /** The middle of a cell in CSS pixels of the canvas: for tests, and for whoever points at one. */
  place(row, column) {
    const { left, top, cell } = this.#box;
    return { x: left + (column + 0.5) * cell, y: top + (row + 0.5) * cell };
  }

  #tell(name, detail) { this.dispatchEvent(new CustomEvent(name, { detail })); }

  #cell(event) {
    const { left, top, cell } = this.#box;
    const at = this.#canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - at.left - left) / cell);
    const row = Math.floor((event.clientY - at.top - top) / cell);
    const [T, S] = this.#data.shape;
    return row >= 0 && row < T && column >= 0 && column < S ? { row, column } : null;
  }

  #point(event) {
    const cell = this.#cell(event);
    if (cell?.row === this.#hover?.row && cell?.column === this.#hover?.column) return;
    this.#tell("cell", cell);
  }

  #leave() { this.#tell("cell", null); }

  draw() {
    if (!this.#data || !this.#canvas || !this.clientWidth) return;
    const { shape: [T, S], rows, columns, label } = this.#data;
    const context = this.#canvas.getContext("2d");
    const font = `${FONT}px ${family()}`;
    context.font = font;
    const wide = (word) => context.measureText(word).width;
    const widest = (words) => Math.min(LABEL, Math.max(...words.slice(0, 256).map(wide)));
    const left = Math.ceil(widest(rows)) + 10;
    const room = this.clientWidth - left - 2;
    const cell = Math.max(1, Math.min(LARGEST, Math.floor(room / S)));
    const upright = widest(columns) > cell - 3;
    const top = (upright ? Math.ceil(widest(columns)) : FONT) + 10;
    const ratio = Math.min(2, devicePixelRatio || 1);
    this.#box = { left, top, cell };
    const [width, height] = [left + S * cell + 2, top + T * cell + 2];
    this.#canvas.width = width * ratio;
    this.#canvas.height = height * ratio;
    this.#canvas.style.width = `${width}px`;
    this.#canvas.style.height = `${height}px`;
    this.#canvas.setAttribute("aria-label", label);
    this.#paint(context, ratio);
    context.scale(ratio, ratio);
    this.#marks(context);
    this.#labels(context, font, upright);
  }

  #paint(context, ratio) {
    const { values, shape: [T, S], top: darkest = 1 } = this.#data;
    const { left, top, cell } = this.#box;
    const side = Math.round(cell * ratio);
    const gap = cell >= 14 ? Math.round(ratio) : 0;
    const image = context.createImageData(S * side, T * side);
    const pixels = new Uint32Array(image.data.buffer);
    const [colours, empty, line] = [palette(), ground(), hatch()];
    for (let i = 0; i < T; i += 1) {
      for (let j = 0; j < S; j += 1) {
        const value = values[i * S + j];
        const masked = Number.isNaN(value);
        const colour = masked ? empty : colours[shade(value / darkest)];
        for (let y = i * side; y < (i + 1) * side - gap; y += 1) {
          for (let x = j * side; x < (j + 1) * side - gap; x += 1) {
            pixels[y * S * side + x] = masked && (x + y) % (4 * ratio) < ratio ? line : colour;
          }
        }
      }
    }
    context.putImageData(image, left * ratio, top * ratio);
  }

  #marks(context) {
    const { shape: [T, S], row } = this.#data;
    const { left, top, cell } = this.#box;
    const frame = (y, x, height, width, token, wide) => {
      context.strokeStyle = `rgb(${theme.rgb(token)})`;
      context.lineWidth = wide;
      context.strokeRect(left + x * cell - 0.5, top + y * cell - 0.5, width * cell, height * cell);
    };
    frame(0, 0, T, S, "--line", 1);
    if (row !== null && row < T) frame(row, 0, 1, S, "--accent", 2);
    const over = this.#hover ?? { row: null, column: null };
    if (over.row !== null) frame(over.row, 0, 1, S, "--edge", 1);
    if (over.column !== null) frame(0, over.column, T, 1, "--edge", 1);
  }

  #labels(context, font, upright) {
    const { rows, columns, row } = this.#data;
    const { left, top, cell } = this.#box;
    const every = Math.max(1, Math.ceil((FONT + 2) / cell));
    this.note.hidden = every === 1;
    this.note.textContent = `One token in ${every} is named; point at a cell for the others.`;
    const over = this.#hover ?? {};
    const write = (word, x, y, chosen, turned) => {
      context.save();
      context.font = chosen ? `600 ${font}` : font;
      context.fillStyle = `rgb(${theme.rgb(chosen ? "--ink" : "--muted")})`;
      context.translate(x, y);
      if (turned) context.rotate(-Math.PI / 2);
      let text = word;
      while (text.length > 1 && context.measureText(text).width > LABEL) text = `${text.slice(0, -2)}…`;
      context.fillText(text, 0, 0);
      context.restore();
    };
    context.textBaseline = "middle";
    // Past a certain number only every k-th fits; the one that is chosen is always named.
    const named = (i, chosen) => i === chosen || (i % every === 0 && Math.abs(i - (chosen ?? -every)) >= every);
    const from = over.row ?? row;
    context.textAlign = "right";
    rows.forEach((word, i) => { if (named(i, from)) write(word, left - 6, top + (i + 0.5) * cell, i === from); });
    context.textAlign = upright ? "left" : "center";
    columns.forEach((word, j) => {
      const [x, y] = [left + (j + 0.5) * cell, top - (upright ? 6 : 10)];
      if (named(j, over.column)) write(word, x, y, j === over.column, upright);
    });
  }
});

/** The strongest cell of a row, in words: the text of the picture. */
export function strongest({ values, shape: [, S], rows, columns }, row) {
  let best = -1;
  for (let j = 0; j < S; j += 1) {
    const value = values[row * S + j];
    if (!Number.isNaN(value) && (best < 0 || Math.abs(value) > Math.abs(values[row * S + best]))) best = j;
  }
  if (best < 0) return `‘${rows[row]}’ (position ${row}) may attend to nothing`;
  return `‘${rows[row]}’ attends most to ‘${columns[best]}’ (position ${best}): ${fixed(values[row * S + best])}`;
}
