// Generate: text as it is made. Each token with its probability, what else could have come, and branches from there.
// The controls are the options that the server lists by mode: name, flag, label, kind, limits and default.

import { alertBox, busy, check, el, field, fill, meter, panel, right, scrolled, select, silent, table } from "./dom.js";
import { fixed, four, short } from "./format.js";
import { isServed, ModelForm } from "./generate-model.js";
import "./generate-tokens.js";
import "./generate-tree.js";
import { command, modelPath, quoted } from "./inspect-commands.js";
import * as keys from "./keys.js";
import { mounted, perFrame } from "./state.js";

const MODES = [["greedy", "greedy: always the likeliest token"], ["sample", "sample: at random, by probability"],
  ["beam", "beam: search for the likeliest sequence"]];
const FINISH = { eos: "the model ended it", length: "the maximum number of tokens", stop: "a stop string",
  constraint: "the constraint" };
/** Options that a command and Python always show, whatever their value. */
const SHOWN = ["max_new_tokens", "width", "temperature"];

const initial = ({ default: value }) => (value === null ? "" : String(value));

function parse(params, options) {
  const mode = options[params.mode] ? params.mode : "greedy";
  return { run: params.run ?? null, step: params.step ?? "best", text: params.text ?? null, mode,
    forced: params.forced ?? "", cached: params.cache !== "0",
    values: Object.fromEntries(options[mode].map((one) => [one.name, params[one.name] ?? initial(one)])) };
}

/** The options of the view that differ from where they begin. */
const changed = ({ mode, values }, options) =>
  options[mode].filter((one) => one.name in values && values[one.name] !== initial(one));

function address(view, options) {
  const { run, step, text, mode, forced, cached, values } = view;
  const own = changed(view, options).map(({ name }) => [name, values[name]]);
  return { run, step: step === "best" ? null : step, text, mode: mode === "greedy" ? null : mode,
    ...Object.fromEntries(own), forced: mode === "beam" ? null : forced, cache: cached ? null : 0 };
}

function question({ run, step, text: prompt, mode, forced, values, cached: caches }, options, cached = caches) {
  const given = options[mode].filter(({ name }) => values[name] !== "")
    .map(({ name, kind }) => [name, kind === "choice" ? values[name] : Number(values[name])]);
  return { run, step, prompt, mode, cached, ...Object.fromEntries(given),
    ...(forced && mode !== "beam" ? { forced } : {}) };
}

/** Tokens with their probabilities; branch(id): what a button beside each does. */
function choices(caption, answers, { chosen, branch } = {}) {
  return table({ caption, props: { id: "alternatives", class: "data choices" },
    head: ["token", { text: "probability", n: true }, silent("bar"), ...(branch ? [silent("branch")] : [])],
    rows: answers.map(({ id, word, probability }) => [
      [el("code", {}, word), id === chosen && el("span", { class: "muted" }, " chosen")],
      four(probability), meter(probability),
      ...(branch ? [id !== chosen && el("button", { type: "button", class: "small",
        "aria-label": `Branch from here with ${word}`, onclick: branch(id) }, "branch")] : [])]) });
}

/** A request to a server, as a command and as Python. */
function asked(address, request) {
  const { model, prompt, ...rest } = request;
  return { cli: `curl ${address}/completions -H 'content-type: application/json' -d ${quoted(JSON.stringify(request))}`,
    python: ["from openai import OpenAI", "", `client = OpenAI(base_url=${JSON.stringify(address)}, api_key="none")`,
      `made = client.completions.create(model=${JSON.stringify(model)}, prompt=${JSON.stringify(prompt)},`,
      `    extra_body=${JSON.stringify(rest)})`, "print(made.choices[0].text)"].join("\n") };
}

class Generate {
  running = null;
  tokens = [];
  nodes = [];

  constructor(root, context) {
    Object.assign(this, { root, context });
    const change = (patch) => this.#change(patch);
    this.form = new ModelForm(context, { change, submit: () => this.#submit(), verb: "Generate" });
    this.stop = el("button", { type: "button", id: "stop", hidden: true, onclick: () => this.cease() }, "Stop",
      el("kbd", { "aria-hidden": "true" }, "Esc"));
    this.form.buttons.append(this.stop);
    this.what = el("p", { class: "muted what" });
    this.said = el("div", { class: "said" });
    this.strip = el("glass-spoken");
    this.strip.addEventListener("pick", ({ detail }) => this.#alternatives(detail));
    this.tree = el("glass-tree");
    this.beside = el("div", { class: "beside" });
    this.timing = el("div", { class: "timing" });
    this.asTable = el("div", {});
    this.made = panel("made", "Generated", this.what, this.said, this.strip, this.tree, this.timing);
    fill(root, el("div", { class: "two" }, panel("ask", "Prompt", this.form.root),
      el("div", { class: "stack" }, this.made,
        panel("else", "What else could have come", this.beside, this.asTable))));
    this.drawSoon = perFrame(() => this.#draw());
    this.unbind = keys.bind({ Escape: ["stop", () => this.cease()],
      "/": ["write a prompt", () => this.form.text.focus()] });
  }

  get subject() { return this.view?.run; }

  /** Nothing of what a model wrote is left. */
  clear() {
    const { running } = this;
    Object.assign(this, { running: null, ready: false });
    running?.abort();
    this.#idle();
    this.#clear();
    for (const part of [this.what, this.form.inside]) fill(part);
  }

  async update(params) {
    const begin = params.text !== undefined;
    this.own ??= await this.context.api.get("/api/generate/options");
    this.server ??= await this.#served();
    this.options = isServed(params.run) && this.server.address ? this.server.options : this.own;
    const view = parse(params, this.options);
    this.view = view;
    const served = this.server.models.map((name) => [`server:${name}`, `${name} (${this.server.address})`]);
    if (!await this.form.prepare(view, served)) { fill(this.root, this.form.empty()); return; }
    if (this.gone || this.view !== view) return;
    this.ready = true;
    this.#settings();
    if (begin) await this.#run();
    else { this.cease(); this.#clear(); fill(this.what, "Press Generate, or Enter in the prompt."); }
    this.root.dataset.ready = "true";
  }

  /** The models of the server that the explorer points at; a server that is silent is none. */
  async #served() {
    try { return await this.context.api.get("/api/generate/server"); } catch (error) {
      this.context.alert(error);
      return { address: null, models: [] };
    }
  }

  #change(patch) {
    const view = { ...this.view, text: this.form.text.value, forced: "", ...patch };
    if (patch.run || patch.step) view.text = patch.text === null ? undefined : view.text;
    this.context.go(address(view, this.options));
  }

  #submit() {
    const view = { ...this.view, text: this.form.text.value, values: { ...this.view.values } };
    for (const { name } of this.options[view.mode]) {
      view.values[name] = this.form.inside.querySelector(`[name="${name}"]`)?.value.trim() ?? view.values[name];
    }
    if (view.text !== this.view.text) view.forced = "";
    const before = location.hash;
    this.context.go(address(view, this.options));
    if (location.hash === before) this.#run(); // the same question once more: the router keeps still
  }

  #settings() {
    const { view } = this;
    const control = ({ name, label, help, kind, optional, choices, min, max }) => {
      const value = view.values[name];
      if (kind === "choice") return field(label, select(choices, value, () => {}, { name, title: help }));
      return field(label, el("input", { type: "number", name, step: kind === "integer" ? 1 : "any", min, max, value,
        title: help, inputmode: "decimal", placeholder: optional ? "all" : null }));
    };
    const held = document.activeElement?.name;
    fill(this.form.inside,
      field("How", select(MODES.filter(([mode]) => mode in this.options), view.mode, (mode) => this.#change({ mode }),
        { name: "mode" })),
      el("div", { class: "numbers" }, this.options[view.mode].map(control)),
      !isServed(view.run) && check("KV cache", view.cached,
        (cached) => this.#change({ cached, forced: view.forced }), { name: "cached" }),
      view.forced && view.mode !== "beam"
        && el("p", { class: "branch" }, `A branch: ${view.forced.split(",").length} tokens are given. `,
        el("button", { type: "button", class: "small", id: "unbranch", onclick: () => this.#change({}) }, "drop it")));
    if (["mode", "cached"].includes(held)) this.form.inside.querySelector(`[name="${held}"]`)?.focus();
  }

  #clear() {
    this.tokens = [];
    this.nodes = [];
    this.start = this.end = this.answer = null;
    this.rates = {};
    this.picked = null;
    fill(this.said); fill(this.timing); fill(this.beside); fill(this.asTable);
    this.strip.data = { prompt: [], tokens: [] };
    this.tree.data = { nodes: [], best: [] };
  }

  cease() { this.running?.abort(); }

  async #run() {
    this.cease();
    const mine = new AbortController();
    this.running = mine;
    this.#clear();
    this.stop.hidden = false;
    busy(this.made, true);
    this.root.dataset.running = "true";
    this.context.alert(null);
    const asked = question(this.view, this.options);
    try {
      await this.context.api.stream("/api/generate", asked,
        (line) => { if (!mine.signal.aborted) { this.#take(line); this.drawSoon(); } }, { signal: mine.signal });
    } catch (error) {
      if (!mine.signal.aborted) { this.#clear(); fill(this.what, alertBox(error)); }
      else if (this.running === mine) this.#stopped();
    } finally {
      if (this.running === mine) {
        this.running = null;
        this.#idle();
        this.root.dataset.done = JSON.stringify(asked);
      }
    }
  }

  #idle() {
    this.stop.hidden = true;
    busy(this.made, false);
    delete this.root.dataset.running;
  }

  #stopped() {
    this.end = { finish: "stopped here", stopped: true };
    this.context.announce("Stopped");
    this.drawSoon();
  }

  #take(line) {
    if (line.kind === "start") this.start = line;
    else if (line.kind === "token") this.tokens.push(line);
    else if (line.kind === "tree") this.nodes.push(...line.nodes);
    else if (line.kind === "answer") this.answer = line;
    else if (line.kind === "end") {
      this.end = line;
      if (this.start) this.rates[this.start.cached] = line;
      this.context.announce(line.hypotheses ? `${line.hypotheses.length} hypotheses`
        : `Generated ${this.tokens.length} tokens: ${FINISH[line.finish] ?? line.finish}`);
    }
  }

  #draw() {
    if (this.answer) { this.#answered(); return; }
    if (!this.start) { if (this.end) fill(this.what, "Stopped before the first token."); return; }
    const { prompt, source, what } = this.start;
    const begun = prompt.map(({ word }) => el("code", {}, word));
    fill(this.what, what, source && [" The decoder began with ", begun, "."]);
    if (this.start.mode === "beam") { this.#beams(); return; }
    this.#spoken();
    if (this.end) this.#ended();
    if (this.tokens.length && this.picked === null) this.#alternatives(0, { quietly: true });
  }

  #spoken() {
    const { prompt, source } = this.start;
    this.strip.data = { prompt: source ?? prompt, arrow: Boolean(source), tokens: this.tokens, picked: this.picked };
  }

  #ended() {
    const { end, tokens } = this;
    const text = end.stopped ? tokens.map(({ text: piece }) => piece).join("") : end.text;
    fill(this.said, el("pre", { id: "text", tabindex: 0, role: "group", "aria-label": "The text" },
      !this.start.source && el("span", { class: "muted" }, this.view.text),
        el("span", { id: "new" }, text || "(none)")));
    const facts = [["ended", FINISH[end.finish] ?? end.finish], ["tokens", tokens.length],
      ["mean log-probability", short(tokens.reduce((sum, { logprob }) => sum + logprob, 0) / tokens.length)]];
    const listed = facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
    fill(this.timing, el("dl", { class: "facts" }, listed), this.#speed());
    fill(this.asTable, el("details", {}, el("summary", {}, "All tokens as a table"), this.#table()));
  }

  #table() {
    return scrolled("Table of tokens", table({ caption: "Generated tokens", props: { id: "tokens-table" },
      head: [right("position"), "token", right("id"), right("probability"), right("log")],
      rows: this.tokens.map(({ position, word, id, probability, logprob, forced }) =>
        [position, [el("code", {}, word), forced && " (given)"], this.start.served ? "–" : id,
          four(probability), fixed(logprob, 4)]) }));
  }

  /** Measured where the page runs: with the cache, and on demand without it. */
  #speed() {
    const rate = (cached) => this.rates[cached]?.tokens_per_second;
    const told = (cached) => {
      const { first_seconds: first, positions } = this.rates[cached];
      return el("p", {}, el("strong", {}, rate(cached) ? `${short(rate(cached))} tokens/s` : "–"),
        cached ? " with the KV cache" : " without", el("span", { class: "muted" },
          ` · ${short(1000 * first)} ms to the first token, ${positions} positions read`));
    };
    const rows = [true, false].filter((cached) => this.rates[cached]).map(told);
    if (!rows.length || this.start.served) return rows.length > 0 && el("div", { id: "speed" }, rows);
    const measure = el("button",
      { type: "button", class: "small", id: "measure", onclick: () => this.#measure(measure) },
      `measure ${this.start.cached ? "without" : "with"} the cache`);
    const ratio = rate(true) && rate(false) ? rate(true) / rate(false) : null;
    const verdict = ratio < 1 ? `The cache is slower here: ${fixed(1 / ratio, 2)}× the time.`
      : `${fixed(ratio, 2)}× as fast with it, on these tokens.`;
    return el("div", { id: "speed" }, rows,
      ratio ? el("p", { class: ratio < 1 ? "warn" : "muted" }, verdict) : measure);
  }

  async #measure(button) {
    button.disabled = true;
    const { rates } = this;
    try {
      await this.context.api.stream("/api/generate", question(this.view, this.options, !this.start.cached),
        (line) => { if (line.kind === "end") rates[!this.start.cached] = line; });
      if (this.rates === rates) this.#ended();
    } catch (error) { this.context.alert(error); }
  }

  #alternatives(index, { quietly = false } = {}) {
    const token = this.tokens[index];
    if (!token) return;
    this.picked = index;
    const ids = this.tokens.slice(0, index).map(({ id }) => id);
    const branch = (id) => () => this.context.go(
      address({ ...this.view, forced: [...ids, id].join(",") }, this.options));
    const known = token.alternatives.some(({ id }) => id === token.id);
    const rows = [...token.alternatives, ...(known ? [] : [token])];
    fill(this.beside, el("p", {}, `Position ${token.position}: `, el("code", {}, token.word),
      ` had probability ${four(token.probability)}`, token.forced && ", and was given by the branch", "."),
      choices(`The likeliest tokens at position ${token.position}, by the model's own distribution`, rows,
        { chosen: token.id, branch: this.start.served ? null : branch }));
    if (!quietly) this.#spoken();
  }

  #answered() {
    const { what, prompt, answers, seconds } = this.answer;
    fill(this.what, what);
    this.strip.data = { prompt, tokens: [] };
    const [{ word, probability }] = answers;
    const told = ` with probability ${four(probability)}, in ${short(1000 * seconds)} ms`;
    fill(this.said, el("p", { class: "lead" }, "Answer ", el("strong", { id: "answer" }, word),
      el("span", { class: "muted" }, told)));
    fill(this.beside, choices("The likeliest answers", answers));
    fill(this.form.inside); // nothing of it changes an answer
  }

  #beams() {
    const { end } = this;
    this.tree.data = { nodes: this.nodes, best: (end?.hypotheses ?? []).map(({ node }) => node) };
    if (!end || end.stopped) return;
    fill(this.said, scrolled("Hypotheses", table({ caption: "Hypotheses, best first", props: { id: "hypotheses" },
      head: ["text", { text: "score", n: true }, { text: "log-probability", n: true }, "ended by"],
      rows: end.hypotheses.map(({ text, score, logprob, finish }) =>
        [el("code", {}, text || "(nothing)"), fixed(score, 4), fixed(logprob, 4), finish]) })));
    const told = `${this.nodes.length} tokens kept by the search, in ${fixed(end.seconds, 2)} s.`;
    fill(this.timing, el("p", { class: "muted" }, told));
    fill(this.beside, el("p", { class: "muted" }, "A search keeps several continuations at once: ",
      "its tree is what else could have come. Branching is for greedy and sample."));
  }

  commands() {
    const { view } = this;
    if (!this.ready || !view.run) return {};
    if (isServed(view.run)) return this.start ? asked(this.server.address, this.start.served) : { cli: "", python: "" };
    const path = modelPath(view, this.form.known.paths);
    const listed = this.options[view.mode].filter((one) =>
      (SHOWN.includes(one.name) || changed(view, this.options).includes(one)) && view.values[one.name] !== "");
    const flags = listed.map(({ name, flag }) => `${flag} ${view.values[name]}`);
    const given = listed.map(({ name, kind }) =>
      `, ${name}=${kind === "choice" ? JSON.stringify(view.values[name]) : view.values[name]}`).join("");
    const text = this.form.text.value;
    const begun = this.tokens.filter(({ forced }) => forced).map((token) => token.text).join("");
    const cli = command(`glass generate ${quoted(path)}`, text, flags, begun && `--force ${quoted(begun)}`,
      !view.cached && "--no-cache");
    const load = `import glassformer as gf\n\nmodel = gf.load(${JSON.stringify(path)})\n`;
    const prompt = JSON.stringify(text);
    if (this.answer) {
      return { cli: command(`glass inspect ${quoted(path)}`, text), python: `${load}print(model.generate(${prompt}))` };
    }
    if (view.mode === "beam") {
      return { cli, python: [`${load}from glassformer.adapters.generate import beam_search`, "",
        `print(beam_search(model, ${prompt}${given}))`].join("\n") };
    }
    return { cli, python: `${load}print(model.generate(${prompt}${given}))` };
  }

  unmount() {
    this.gone = true;
    this.cease();
    this.unbind();
  }
}

export const page = { title: "Generate", styles: "generate.css", mount: mounted(Generate) };
