// Model: the picture of a model, a part of it in detail, one token's way through it. The server draws all three.

import { query } from "./api.js";
import { build, busy, el, field, fill, isEnter, nothingYet, select } from "./dom.js";
import { modelPath, quoted } from "./inspect-commands.js";
import { latest, mounted } from "./state.js";

const wide = matchMedia("(min-width: 1180px)");

class Model {
  constructor(root, context, params) {
    Object.assign(this, { root, params, context, drawn: {} });
    this.get = ["picture", "way"].reduce((all, name) =>
      ({ ...all, [name]: latest((signal, path) => context.api.get(path, { signal })) }), {});
    const send = (event) => isEnter(event) && this.#go({ text: this.prompt.value, row: null, position: null });
    this.prompt = el("input", { type: "text", name: "prompt", spellcheck: "false", autocomplete: "off",
      maxlength: 16000, onkeydown: send });
    this.controls = el("div", { class: "controls" });
    const panel = (name, label) => el("section", { class: `panel ${name}`, "aria-label": label });
    this.picture = panel("picture", "Picture of the model");
    this.part = panel("part", "The chosen part");
    this.way = panel("way", "One token's way through the model");
    fill(root, this.controls, this.picture, this.part, this.way);
    root.addEventListener("click", ({ target }) => this.#follow(target.closest("[data-go]")));
    root.addEventListener("change", ({ target }) =>
      target.dataset.param && this.#go({ [target.dataset.param]: target.value }));
    root.addEventListener("keydown", (event) => {
      if (!["Enter", " "].includes(event.key) || !event.target.matches("g[data-go]")) return;
      event.preventDefault();
      this.#follow(event.target);
    });
    wide.addEventListener("change", this.resized = () => this.known && this.update(this.params).catch(context.alert));
  }

  get subject() { return this.run; }

  clear() {
    this.drawn = {};
    this.position = null;
    for (const part of [this.picture, this.part, this.way]) fill(part);
  }

  #go(change) { this.context.go({ ...this.params, run: this.run, ...change }); }

  #follow(node) { if (node) this.#go({ layer: null, ...JSON.parse(node.dataset.go) }); }

  async prepare() { this.known = await this.context.api.models(); }

  async update(params) {
    this.params = params;
    this.run = params.run ?? this.known.first;
    if (!this.run) { fill(this.root, nothingYet()); return; }
    const held = document.activeElement?.id;
    fill(this.controls, field("Model", select(this.known.ids, this.run, (run) => this.context.go({ run }),
      { id: "model-run", name: "run" })), field("Prompt", this.prompt));
    if (held && this.controls.contains(document.getElementById(held))) document.getElementById(held).focus();
    const { part, layer, step, text, split, row, position } = params;
    const path = `/api/runs/${encodeURIComponent(this.run)}/model`;
    const size = wide.matches ? 1 : null;
    await this.#show("picture", query(path, { part, layer, wide: size }), (found) => {
      this.root.classList.toggle("two", found.two);
      fill(this.picture, build(found.picture));
      fill(this.part, found.part.map((each) => build(each)));
    });
    await this.#show("way", query(`${path}/way`, { step, text, split, row, position, wide: size }), (found) => {
      this.prompt.value = this.text = found.text;
      fill(this.way, found.way.map((each) => build(each)));
      this.position = found.position;
    });
  }

  /** Fetch what is not shown yet, and draw it; the focus stays on what has the same id. */
  async #show(name, path, draw) {
    if (this.drawn[name] === path) return;
    busy(this[name], true);
    try {
      const found = await this.get[name](path);
      if (!found || this.gone) return;
      const held = document.activeElement?.id;
      draw(found);
      if (held) document.getElementById(held)?.focus({ preventScroll: true });
      this.drawn[name] = path;
      this.context.alert(null);
    } finally {
      busy(this[name], false);
    }
  }

  commands() {
    if (!this.drawn.way) return {};
    const place = modelPath({ run: this.run, step: this.params.step ?? "best" }, this.known.paths);
    return {
      cli: `glass show ${quoted(place)} --diagram -o model.svg`,
      python: `import glassformer as gf\n\nmodel = gf.load(${JSON.stringify(place)})\ngf.diagram(model)\n`
        + `model.inspect(${JSON.stringify(this.text)}).token_path(${this.position})`,
    };
  }

  unmount() {
    this.gone = true;
    wide.removeEventListener("change", this.resized);
  }
}

export const page = { title: "Model", styles: ["diagram.css", "model.css"], mount: mounted(Model) };
