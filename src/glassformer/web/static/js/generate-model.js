// Which model, at which step, on which text: the form that Generate and Quantize share.

import { el, field, fill, isEnter, nothingYet, select } from "./dom.js";

const SHOWN = 60; // signs of an example in the list
/** The first text for a model of a server, whose tokens are not known here. */
const SERVED = "The quick brown fox jumps over the lazy";

/** Whether an id is that of a server's model. */
export const isServed = (run) => run?.startsWith("server:") ?? false;

export class ModelForm {
  /** change(patch): another model or step; submit(): the button, or Enter in the text. */
  constructor(context, { change, submit, verb, label = "Prompt" }) {
    Object.assign(this, { context, change });
    this.models = el("div", { class: "models" });
    this.examples = el("div", {});
    this.text = el("textarea", { rows: 3, name: "prompt", spellcheck: "false", autocomplete: "off", maxlength: 16000,
      onkeydown: (event) => { if (isEnter(event)) { event.preventDefault(); submit(); } } });
    this.inside = el("div", { class: "inside" });
    this.buttons = el("div", { class: "row actions" },
      el("button", { type: "submit", class: "primary", id: "go" }, verb));
    this.root = el("form", { onsubmit: (event) => { event.preventDefault(); submit(); } },
      this.models, this.examples, field(label, this.text), this.inside, this.buttons);
  }

  /** The runs of the folder, and what the one in view offers; the view's open ends are filled in.
      served: [id, label] of a server's models, which have neither steps nor examples. */
  async prepare(view, served = []) {
    const { api } = this.context;
    this.known ??= await api.models();
    this.served = served;
    view.run ??= this.known.first ?? served[0]?.[0] ?? null;
    if (view.run === null) return false;
    if (this.about?.run !== view.run) {
      this.#choose(view, []); // whatever becomes of its answer, another can be chosen
      this.text.value = view.text ?? "";
      this.about = isServed(view.run) ? { run: view.run, best: null, checkpoints: [], examples: [], prompt: SERVED }
        : await api.get(`/api/runs/${encodeURIComponent(view.run)}/inspect`);
    }
    view.text ??= this.about.prompt;
    this.#draw(view, this.about);
    return true;
  }

  #choose(view, checkpoints, best) {
    const steps = [["best", best ? `best (${best})` : "best"], "last", ...checkpoints.map(String)];
    const another = (run) => this.change({ run, step: "best", text: null });
    fill(this.models,
      field("Model", select([...this.known.ids, ...this.served], view.run, another, { name: "run" })),
      checkpoints.length > 0
        && field("Step", select(steps, view.step, (step) => this.change({ step }), { name: "step" })));
  }

  #draw(view, { best, checkpoints, examples }) {
    const focused = document.activeElement?.name;
    this.#choose(view, checkpoints, best);
    const listed = new Map(examples.filter(({ prompt }) => prompt).map(({ prompt, text }) => [prompt, text]));
    const own = !listed.has(view.text);
    const options = [...listed].map(([prompt, text]) =>
      [prompt, text.length > SHOWN ? `${text.slice(0, SHOWN - 1)}…` : text]);
    if (own) options.unshift(["", "your own text"]);
    const choose = (text) => text && this.change({ text });
    fill(this.examples, listed.size > 0
      && field("Example of the task", select(options, own ? "" : view.text, choose, { name: "example" })));
    this.text.value = view.text;
    if (["run", "step", "example"].includes(focused)) this.root.querySelector(`[name="${focused}"]`)?.focus();
  }

  empty() { return nothingYet(); }
}
