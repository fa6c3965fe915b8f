// <glass-grid>: every head at a glance, a line of thumbnails a layer; masked cells hatched, ablated heads crossed.

import { el, fill } from "./dom.js";
import { ground, hatch, palette, shade } from "./ramp.js";
import * as theme from "./theme.js";

const MASKED = 255; // of a thumbnail's bytes; 0..254 are weights

customElements.define("glass-grid", class extends HTMLElement {
  #data = null;
  #buttons = new Map();
  #stop = null;

  connectedCallback() { this.#stop = theme.watch(() => this.#paint()); }
  disconnectedCallback() { this.#stop(); }

  /** {bytes, shape: [L, N, h, w], heads: heads of each layer, kind, top: brightest weight} */
  set data(data) {
    const old = this.#data;
    this.#data = data;
    const same = old && old.kind === data.kind && String(old.heads) === String(data.heads);
    if (!same) this.#build();
    this.#paint();
  }

  /** {layer, head (or "mean"), ablated: Set of "L.H"} */
  set chosen({ layer, head, ablated }) {
    for (const [name, button] of this.#buttons) {
      const [l, h] = name.split(".").map(Number);
      const out = ablated.has(name);
      button.setAttribute("aria-pressed", l === layer && (head === "mean" || h === head));
      button.setAttribute("aria-label", `Layer ${l}, head ${h}${out ? ", ablated" : ""}`);
      button.classList.toggle("ablated", out);
    }
  }

  /** Make one layer stand out, as the lens does for the layer it is pointed at. */
  set hover(layer) {
    for (const line of this.children) line.classList.toggle("over", line.dataset.layer === String(layer));
  }

  #build() {
    this.#buttons.clear();
    fill(this, this.#data.heads.map((heads, layer) =>
      el("div", { class: "layer", role: "group", "aria-label": `Layer ${layer}`, "data-layer": layer },
        el("span", { class: "name", "aria-hidden": true }, `L${layer}`),
        [...Array(heads).keys()].map((head) => this.#button(layer, head)))));
  }

  #button(layer, head) {
    const tell = (event) => this.dispatchEvent(
      new CustomEvent(event.shiftKey ? "toggle" : "pick", { detail: { layer, head } }));
    const button = el("button", { type: "button", class: "head", "aria-pressed": false, onclick: tell },
      el("canvas", { "aria-hidden": true }), el("span", { "aria-hidden": true }, `H${head}`));
    this.#buttons.set(`${layer}.${head}`, button);
    return button;
  }

  #paint() {
    if (!this.#data) return;
    const { bytes, shape: [, N, height, width], heads, top = 1 } = this.#data;
    const [colours, empty, line] = [palette(), ground(), hatch()];
    const zoom = Math.max(1, Math.floor(64 / Math.max(width, height)));
    heads.forEach((count, layer) => {
      for (let head = 0; head < count; head += 1) {
        const canvas = this.#buttons.get(`${layer}.${head}`).querySelector("canvas");
        canvas.width = width * zoom;
        canvas.height = height * zoom;
        const context = canvas.getContext("2d");
        const image = context.createImageData(canvas.width, canvas.height);
        const pixels = new Uint32Array(image.data.buffer);
        const from = (layer * N + head) * height * width;
        for (let y = 0; y < canvas.height; y += 1) {
          for (let x = 0; x < canvas.width; x += 1) {
            const byte = bytes[from + Math.floor(y / zoom) * width + Math.floor(x / zoom)];
            const blank = (x + y) % 6 ? empty : line;
            pixels[y * canvas.width + x] = byte === MASKED ? blank : colours[shade(byte / 254 / top)];
          }
        }
        context.putImageData(image, 0, 0);
      }
    });
  }
});
