// Which model, at which step, on which text: the form that Generate and Quantize share.

import { el, field, fill, select } from "./dom.js";

const KEPT = new Map(); // what a run offers: asked once

export class ModelForm {
  /** change(patch): another model or step; submit(): the button, or Enter in the text. */
  constructor(context, { change, submit, verb, label = "Prompt" }) {
    Object.assign(this, { context, change });
    this.models = el("div", { class: "models" });
    this.examples = el("div", {});
    this.text = el("textarea", { rows: 3, name: "prompt", spellcheck: "false", autocomplete: "off", maxlength: 16000,
      onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); submit(); } } });
    this.go = el("button", { type: "submit", class: "primary", id: "go" }, verb);
    this.inside = el("div", { class: "inside" });
    this.buttons = el("div", { class: "row actions" }, this.go);
    this.root = el("form", { onsubmit: (event) => { event.preventDefault(); submit(); } },
      this.models, this.examples, field(label, this.text), this.inside, this.buttons);
  }

  /** The runs of the folder, and what the one in view offers; the view's open ends are filled in. */
  async prepare(view) {
    const { api } = this.context;
    if (!this.runs) {
      const { runs } = await api.get("/api/runs");
      this.runs = runs.filter(({ status }) => status !== "damaged").map(({ id }) => id);
    }
    view.run ??= this.runs[0] ?? null;
    if (view.run === null) return false;
    if (!KEPT.has(view.run)) KEPT.set(view.run, await api.get(`/api/runs/${encodeURIComponent(view.run)}/inspect`));
    const about = KEPT.get(view.run);
    view.text ??= about.examples[0]?.text ?? "";
    this.#draw(view, about);
    return true;
  }

  #draw(view, about) {
    const steps = [["best", about.best ? `best (${about.best})` : "best"], "last", ...about.checkpoints.map(String)];
    const focused = document.activeElement?.name;
    fill(this.models,
      field("Model", select(this.runs, view.run, (run) => this.change({ run, step: "best", text: null }), { name: "run" })),
      about.checkpoints.length > 0 && field("Step", select(steps, view.step, (step) => this.change({ step }), { name: "step" })));
    const listed = about.examples.map(({ text }) => text).filter((text, i, all) => text && all.indexOf(text) === i).slice(0, 40);
    fill(this.examples, listed.length > 0 && field("Example of the task", select([["", listed.includes(view.text) ? "…" : "your own text"],
      ...listed.map((text) => [text, text.length > 60 ? `${text.slice(0, 59)}…` : text])], listed.includes(view.text) ? view.text : "",
    (text) => text && this.change({ text }), { name: "example" })));
    this.text.value = view.text;
    if (["run", "step", "example"].includes(focused)) this.root.querySelector(`[name="${focused}"]`)?.focus();
  }

  empty() { return el("p", { class: "empty" }, "No run is here yet. ", el("code", {}, "glass train digits"), " makes one."); }
}

export const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
export const modelPath = ({ run, step }) => (step === "best" ? `runs/${run}` : `runs/${run}@${step}`);
/** A box that scrolls, and that a keyboard can reach. */
export const scrolled = (label, ...children) => el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, children);
