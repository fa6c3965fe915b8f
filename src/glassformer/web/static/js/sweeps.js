// Sweeps: the progress of a sweep while it runs, its ranking, and the way from a cell to its runs. The server draws it.

import { build, busy, el, field, fill, select } from "./dom.js";
import { latest, mounted } from "./state.js";

const SECONDS = 2; // between two looks at a sweep that runs

class Sweeps {
  constructor(root, context, params) {
    Object.assign(this, { root, context, params, drawn: "" });
    this.get = latest((signal, path) => context.api.get(path, { signal }));
    this.controls = el("div", { class: "controls" });
    this.parts = el("div", { class: "parts" });
    fill(root, this.controls, this.parts);
  }

  get subject() { return this.name; }

  clear() {
    clearTimeout(this.timer);
    Object.assign(this, { found: null, drawn: "", shown: null });
    fill(this.parts);
  }

  async update(params) {
    this.params = params;
    const { sweeps, folder } = await this.context.api.get("/api/sweeps");
    const name = params.sweep ?? sweeps[0];
    if (!name) {
      fill(this.root, el("p", { class: "empty" }, `No sweep is in ${folder} yet. `,
        el("code", {}, "glass sweep digits train.lr=1e-3,3e-3 --seeds 5"), " makes one."));
      return;
    }
    if (this.name !== name) {
      this.name = name;
      const chooser = select(sweeps, name, (sweep) => this.context.go({ sweep }), { name: "sweep" });
      fill(this.controls, field("Sweep", chooser));
    }
    await this.#draw();
  }

  async #draw() {
    clearTimeout(this.timer);
    const first = this.shown !== this.name;
    if (first) busy(this.parts, true);
    try {
      const found = await this.get(`/api/sweeps/${encodeURIComponent(this.name)}`);
      if (!found || this.gone) return;
      this.found = found;
      const text = JSON.stringify(found.parts);
      if (text !== this.drawn) fill(this.parts, found.parts.map((each) => build(each)));
      Object.assign(this, { drawn: text, shown: this.name });
      if (found.live) this.timer = setTimeout(() => this.#draw().catch(this.context.alert), 1000 * SECONDS);
    } finally {
      busy(this.parts, false);
    }
  }

  commands() { return { cli: this.found?.cli, python: this.found?.python }; }

  unmount() {
    this.gone = true;
    clearTimeout(this.timer);
  }
}

export const page = { title: "Sweeps", styles: "sweeps.css", mount: mounted(Sweeps) };
