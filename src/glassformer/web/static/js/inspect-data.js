// What the Inspect page requests from the server, and the results it keeps.

import { query } from "./api.js";

const KEPT = 12; // inspections kept here; the server keeps 32 results

/** digits@80:int8, and back. */
export const modelName = ({ run, step, precision: bits }) => `${run}@${step}${bits === "float32" ? "" : `:${bits}`}`;
export function parseModel(text) {
  const [, run, step, precision] = /^([^@:]+)(?:@([^:]+))?(?::(.+))?$/.exec(text ?? "") ?? [];
  return run ? { run, step: step ?? "best", precision: precision ?? "float32" } : null;
}

/** The view, from the parameters of the address. */
export function parse(params) {
  const number = (text, otherwise) => (/^\d{1,6}$/.test(text ?? "") ? Number(text) : otherwise);
  return {
    run: params.run ?? null, step: params.step ?? "best", precision: params.precision ?? "float32",
    text: params.text ?? null, target: params.target ?? null,
    split: params.split ?? null, row: params.text === undefined ? number(params.row, null) : null,
    ablate: params.ablate ? params.ablate.split(",") : [],
    // Without a head in the address, the one whose ablation changes most is shown: see Inspect's #choose.
    kind: params.kind ?? (params.L || params.H ? "self" : null), layer: number(params.L, params.H ? 0 : null),
    head: params.H === "mean" ? "mean" : number(params.H, params.L ? 0 : null),
    pos: number(params.pos, null), src: number(params.src, 0),
    table: params.table === "1",
    auto: { auto: true, one: false }[params.scale] ?? null, difference: params.view === "difference",
    other: parseModel(params.with),
  };
}

/** The address of a view: only what is not as it would be anyway. */
export function address(view) {
  return {
    run: view.run, step: view.step === "best" ? null : view.step,
    precision: view.precision === "float32" ? null : view.precision,
    text: view.text, target: view.text === null ? null : view.target,
    split: view.text === null ? view.split : null, row: view.text === null ? view.row : null,
    ablate: view.ablate.join(","), kind: view.kind === "self" && view.head !== null ? null : view.kind,
    L: view.layer, H: view.head, pos: view.pos,
    src: view.kind === "self" || view.kind === null ? null : view.src,
    table: view.table ? 1 : null,
    scale: { true: "auto", false: "one" }[view.auto], view: view.difference ? "difference" : null,
    with: view.other && modelName(view.other),
  };
}

export const headName = (kind, layer, head) => `${kind === "self" ? "" : `${kind}.`}L${layer}H${head}`;
export const placeOf = (name) => {
  const [, kind, layer, head] = /^(?:(\w+)\.)?L(\d+)H(\d+)$/.exec(name);
  return { kind: kind ?? "self", layer: Number(layer), head: Number(head) };
};

/** Bytes as numbers: float32, float16, or whole ones. */
function numbers({ buffer, headers }) {
  const kind = headers.get("X-Dtype");
  if (kind === "uint8") return new Uint8Array(buffer);
  return kind === "float32" ? new Float32Array(buffer) : halves(new Uint16Array(buffer));
}

function halves(words) {
  return Float32Array.from(words, (word) => {
    const [sign, exponent, fraction] = [word >> 15 ? -1 : 1, word >> 10 & 31, word & 1023];
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * fraction / 1024);
  });
}

/** One inspection of one text: its header at once, its parts on request, each once. */
export class Look {
  #api;
  #parts = new Map();

  constructor(api, header) {
    this.#api = api;
    Object.assign(this, header);
  }

  #part(path, how) {
    if (!this.#parts.has(path)) {
      const asked = how(`/api/inspect/${this.key}/${path}`);
      this.#parts.set(path, asked);
      asked.catch(() => this.#parts.delete(path));
    }
    return this.#parts.get(path);
  }

  async #array(path) {
    return this.#part(path, async (full) => {
      const answer = await this.#api.bytes(full);
      return { values: numbers(answer), shape: answer.shape, exact: answer.headers.get("X-Dtype") !== "float16" };
    });
  }

  position(position, against) {
    return this.#part(query("position", { position, against: against?.key }), this.#api.get);
  }

  map(kind, layer, head, minus) { return this.#array(query("attention", { kind, layer, head, minus: minus?.key })); }
  thumbnails(kind) { return this.#array(query("thumbnails", { kind })); }
  ranking() { return this.#part("ranking", this.#api.get); }

  get headCount() {
    return Object.values(this.kinds).flatMap(({ heads }) => heads).reduce((sum, heads) => sum + heads, 0);
  }

  wordsOf(kind) {
    const { words, source_words: source } = this;
    return { rows: kind === "encoder" ? source : words, columns: kind === "self" ? words : source };
  }
}

/** Inspections by their question; the least recently used is dropped. */
export class Looks {
  #kept = new Map();

  constructor(api) { this.api = api; }

  async ask(question, signal) {
    const name = JSON.stringify(question);
    if (!this.#kept.has(name)) {
      const { ablate, ...rest } = question; // an ablation is one more pass over a kept inspection
      const path = ablate ? `/api/inspect/${(await this.ask(rest, signal)).key}/ablate` : "/api/inspect";
      const look = new Look(this.api, await this.api.post(path, ablate ? { ablate } : rest, { signal }));
      this.#kept.set(name, look);
      if (this.#kept.size > KEPT) this.#kept.delete(this.#kept.keys().next().value);
    }
    const look = this.#kept.get(name);
    this.#kept.delete(name), this.#kept.set(name, look); // to the end: used last
    return look;
  }

  forget() { this.#kept.clear(); }
}

/** The question that a view asks of one model. */
export function question(view, model = view) {
  const asked = { run: model.run, step: model.step, precision: model.precision };
  if (view.text !== null) Object.assign(asked, { text: view.text }, view.target ? { target: view.target } : {});
  else Object.assign(asked, { split: view.split, row: view.row });
  if (model === view && view.ablate.length) asked.ablate = view.ablate;
  return asked;
}
