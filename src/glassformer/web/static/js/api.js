// The only door to the server: the token goes with every call, errors come back as {what, where, hint}.

const KEY = "glass-token";
const RETRIES = 20; // one heavy job at a time: "busy" is answered with 503 and a time to come back

export class ApiError extends Error {
  constructor({ what, where, hint }, status) {
    super(what);
    Object.assign(this, { what, where, hint, status });
  }
}

/** Take the token out of `#t=TOKEN` (or `#t=TOKEN/inspect?…`) and out of the address. */
export function adopt(location, history) {
  const found = /^#t=([A-Za-z0-9_-]+)(\/.*)?$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(KEY, found[1]);
  history.replaceState(null, "", location.pathname + (found[2] ? `#${found[2]}` : ""));
}

export const known = () => Boolean(sessionStorage.getItem(KEY));
export const remember = (token) => sessionStorage.setItem(KEY, token);

// Tabs of one server lend each other the token: a copied link opens, and nothing is kept on the disk.
const ASK = "which token?";
const tabs = new BroadcastChannel(KEY);
tabs.onmessage = ({ data }) => { if (data === ASK && known()) tabs.postMessage(sessionStorage.getItem(KEY)); };

/** Take over the token of another tab, if one has a token that the server accepts. */
export async function borrow() {
  const asking = new BroadcastChannel(KEY);
  const heard = new Promise((done) => {
    setTimeout(done, 250);
    asking.onmessage = ({ data }) => { if (data !== ASK && data !== sessionStorage.getItem(KEY)) done(data); };
  });
  asking.postMessage(ASK);
  const token = await heard;
  asking.close();
  if (!token) return false;
  const { ok } = await fetch("/api/about", { headers: { "X-Glass-Token": token } }).catch(() => ({ ok: false }));
  if (ok) remember(token);
  return ok;
}

const pause = (seconds, signal) => new Promise((done, stop) => {
  const timer = setTimeout(done, 1000 * seconds);
  signal?.addEventListener("abort", () => { clearTimeout(timer); stop(signal.reason); });
});

async function refusal(response) {
  let error = { what: `The server answered ${response.status}.` };
  try { error = (await response.json()).error ?? error; } catch { /* not JSON: the status says enough */ }
  return new ApiError(error, response.status);
}

async function call(path, { method = "GET", body, signal } = {}) {
  const headers = { "X-Glass-Token": sessionStorage.getItem(KEY) ?? "" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  for (let attempt = 0; ; attempt += 1) {
    let response;
    try {
      response = await fetch(path, { method, headers, signal, cache: "no-store", body: JSON.stringify(body) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError({ what: "The server does not answer.", hint: "Is glass explore still running?" }, 0);
    }
    if (response.ok) return response;
    if (response.status !== 503 || attempt >= RETRIES) throw await refusal(response);
    await pause(Math.min(2, Number(response.headers.get("Retry-After")) || 0.25), signal);
  }
}

/** Runs and models that can be opened, and where a page begins: the newest run that has a checkpoint. */
export async function models() {
  const { runs, folder, sweeps } = await get("/api/runs");
  const found = runs.filter(({ status }) => status !== "damaged");
  const trained = found.filter((run) => typeof run.best_step === "number").sort((a, b) => b.written - a.written);
  const first = trained[0] ?? found.find(({ kind }) => kind === "model") ?? found[0];
  const own = Object.fromEntries(found.map(({ id, path }) => [id, path]));
  const ofSweep = (id) => /^(.+)[.](c\d+-s\d+)$/.exec(id)?.slice(1).join("/runs/");
  const paths = new Proxy(own, { get: (_, id) => own[id] ?? (ofSweep(id) && `${sweeps}/${ofSweep(id)}`) });
  return { runs: found, folder, ids: found.map(({ id }) => id), first: first?.id ?? null, paths };
}

export const get = async (path, { signal } = {}) => (await call(path, { signal })).json();
export const post = async (path, body, { signal } = {}) => (await call(path, { method: "POST", body, signal })).json();

/** {buffer, shape, headers}: a plain array of bytes and the shape that X-Shape gives it. */
export async function bytes(path, { signal } = {}) {
  const response = await call(path, { signal });
  const shape = (response.headers.get("X-Shape") ?? "").split(",").filter(Boolean).map(Number);
  return { buffer: await response.arrayBuffer(), shape, headers: response.headers };
}

/** One JSON object a line; aborting the signal cancels the work on the other side. */
export async function stream(path, body, onLine, { signal } = {}) {
  const response = await call(path, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    const lines = (rest + (value ?? "")).split("\n");
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (!line.trim()) continue;
      const item = JSON.parse(line);
      if (item.error) throw new ApiError(item.error, response.status);
      onLine(item);
    }
    if (done) return;
  }
}

/** path + the parameters that have a value */
export function query(path, params) {
  const pairs = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return pairs.length ? `${path}?${new URLSearchParams(pairs)}` : path;
}
