// The shell: pages by name, one in view; theme, keys, copying; the place where errors are shown.

import * as api from "./api.js";
import { alertBox, el, fill } from "./dom.js";
import * as keys from "./keys.js";
import { Router, href } from "./router.js";
import * as theme from "./theme.js";

/** Title, module, and the parameter that names what a page is about: for another one the page is made anew. */
const PAGES = {
  inspect: ["Inspect", () => import("./inspect.js"), "run"],
  model: ["Model", () => import("./model.js"), "run"],
  runs: ["Runs", () => import("./runs.js")],
  sweeps: ["Sweeps", () => import("./sweeps.js"), "sweep"],
  errors: ["Errors", () => import("./errors.js"), "run"],
  design: ["Design", () => import("./design.js")],
  generate: ["Generate", () => import("./generate.js"), "run"],
  quantize: ["Quantize", () => import("./quantize.js"), "run"],
};
const $ = (id) => document.getElementById(id);
let shown = null; // {name, subject, handle}: one page about one run; what it draws later than the next page is lost

function announce(text) {
  $("announce").textContent = "";
  requestAnimationFrame(() => { $("announce").textContent = text; });
}

let hiding;
function toast(text) {
  fill($("toast"), text);
  $("toast").hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { $("toast").hidden = true; }, 4000);
  announce(text);
}

let told = null; // of the error in view
/** Show an error above the page; null takes it away. */
function alert(error) {
  if (error?.name === "AbortError") return;
  if (error?.status === 403 && /token/.test(error.what)) { enter(); return; }
  if (error && error.what === told) return; // a page that asks every second says it once
  told = error?.what ?? null;
  fill($("alerts"), error && alertBox(error, () => alert(null)));
  if (error && error.what === undefined) console.error(error); // ours, not the server's: a fault of the page
}

/** Without a token, or with that of a server that is gone: another tab may know it, else the reader does. */
async function enter() {
  if (entering) return;
  entering = true;
  shown?.handle?.unmount(); // it must not go on asking
  shown = null;
  $("copies").hidden = true;
  if (await api.borrow()) location.reload();
  else askForToken();
}
let entering = false;

function askForToken() {
  const box = el("input", { type: "text", id: "address", autocomplete: "off", spellcheck: "false" });
  const wrong = el("p", { class: "bad", role: "alert" });
  const take = (event) => {
    event.preventDefault();
    const token = /(?:#t=)?([A-Za-z0-9_-]{8,})(?:\/.*)?$/.exec(box.value.trim())?.[1];
    if (token) { api.remember(token); location.reload(); } else fill(wrong, "That holds no token: it stands after #t=");
  };
  const why = api.known()
    ? "The server was started again since this page was opened, and each start has a token of its own."
    : "This page is open without the token of the server it came from.";
  fill($("alerts"));
  fill($("page"), el("form", { class: "panel narrow", onsubmit: take },
    el("h2", {}, api.known() ? "The server has a new token" : "Which explorer is this?"),
    el("p", {}, why, " Paste the address that ", el("code", {}, "glass explore"), " printed; this view comes back."),
    el("div", { class: "field" }, el("label", { for: "address" }, "Address or token"), box), wrong,
    el("button", { type: "submit", class: "primary" }, "Open")));
  box.focus();
}

async function show({ name, params }) {
  if (!PAGES[name]) { router.replace("inspect", {}); return; }
  carry(params.run);
  const [label, load, about] = PAGES[name];
  const subject = params[about] ?? null;
  const again = shown?.name === name;
  if (again && shown.handle) {
    shown.subject ??= shown.handle.subject ?? null; // of an address without a run, the page has chosen one
    if (shown.subject === subject) { await renew(shown, params); return; }
  }
  const first = shown === null;
  const held = again ? document.activeElement?.name : null;
  shown?.handle?.unmount();
  const mine = { name, subject, handle: null };
  shown = mine;
  for (const link of $("pages").children) {
    if (link.dataset.page !== name) { link.removeAttribute("aria-current"); continue; }
    link.setAttribute("aria-current", "page");
    const [bar, own] = [$("pages"), link].map((node) => node.getBoundingClientRect()); // a narrow bar scrolls to it
    $("pages").scrollLeft += own.left + own.width / 2 - bar.left - bar.width / 2;
  }
  $("title").textContent = label;
  document.title = `${label} · glass explorer`;
  $("copies").hidden = true;
  alert(null);
  fill($("page"));
  if (entering) return; // whoever pastes the token gets the page
  if (!api.known()) { enter(); return; }
  const root = el("div", { class: `page ${name}` });
  fill($("page"), root);
  try {
    const { page } = await load();
    await Promise.all([page.styles].flat().map(dress));
    if (mine !== shown) return;
    document.title = `${page.title} · glass explorer`;
    $("title").textContent = page.title;
    const handle = await page.mount(root, params, contextFor(mine));
    if (mine !== shown) { handle.unmount(); return; }
    mine.handle = handle;
    $("copies").hidden = !mine.handle.commands;
    if (!again && !first) arrive(page.title);
    await mine.handle.begun;
    if (mine !== shown) return;
    if (document.querySelector("#page .empty")) $("copies").hidden = true; // there is nothing here to copy
    if (again) refocus(held);
  } catch (error) {
    if (mine === shown) alert(error);
  }
}

/** Another view of the same page about the same run. */
async function renew(mine, params) {
  alert(null);
  try { await mine.handle.update(params); } catch (error) { if (mine === shown) alert(error); }
}

/** The control that led to another run is made anew with the page: the keyboard goes on from there. */
function refocus(held) {
  if (!held || document.activeElement !== document.body) return;
  document.querySelector(`#page [name="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

/** The run in view goes along to the other pages that show one. */
function carry(run) {
  if (!run) return;
  for (const link of $("pages").children) {
    const { page } = link.dataset;
    if (PAGES[page][2] === "run") link.href = href(page, { run });
  }
}

/** On another page: said aloud, from its top, and the keyboard goes on where the old page left nothing. */
function arrive(title) {
  announce(title);
  scrollTo(0, 0);
  if (document.activeElement === document.body) $("main").focus({ preventScroll: true });
}

/** What a page may do outside its own nodes: nothing, once another page is in its place. */
function contextFor(mine) {
  const own = (act) => (...args) => { if (mine === shown) act(...args); };
  return { api, theme, href, announce: own(announce), alert: own(alert), toast: own(toast),
    go: own((params, page = mine.name) => router.go(page, params)),
    replace: own((params) => router.replace(mine.name, params)) };
}

async function copy(kind) {
  const text = kind === "link" ? location.href : shown?.handle?.commands?.()[kind];
  if (!text) { toast("No command gives what is shown here."); return; }
  try {
    await navigator.clipboard.writeText(text);
    toast(`Copied: ${text}`);
  } catch {
    const box = el("textarea", { readonly: true, rows: 3, "aria-label": "Text to copy" }, text);
    const dialog = el("dialog", { "aria-label": "Copy by hand", onclose: () => dialog.remove() },
      el("p", {}, "The browser does not let this page write to the clipboard:"), box,
      el("button", { type: "button", class: "primary", onclick: () => dialog.close() }, "Close"));
    document.body.append(dialog);
    dialog.showModal();
    box.select();
  }
}

/** A page may bring a style sheet of its own, or several: page.styles = "runs.css". */
function dress(sheet) {
  const href = `/static/${sheet}`;
  if (!sheet || document.querySelector(`link[href="${href}"]`)) return null;
  const link = el("link", { rel: "stylesheet", href });
  document.head.append(link);
  return new Promise((done) => { link.onload = link.onerror = done; });
}

const sayTheme = () => { $("theme").textContent = `Theme: ${theme.choice()}`; };

api.adopt(location, history);
theme.choose(theme.choice());
sayTheme();
fill($("pages"), Object.entries(PAGES).map(([name, [label]]) =>
  el("a", { href: href(name), "data-page": name }, label)));
$("theme").addEventListener("click", () => {
  theme.choose(theme.following());
  sayTheme();
  announce(`Theme: ${theme.choice()}`);
});
$("help").addEventListener("click", keys.help);
$("skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
for (const button of $("copies").querySelectorAll("button")) {
  button.addEventListener("click", () => copy(button.dataset.copy));
}
keys.bind({ "?": ["this list", keys.help] });
const router = new Router(show);
router.render();
