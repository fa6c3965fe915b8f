// Keys of the page in view, and the dialog that lists them. Single letters can be switched off (WCAG 2.1.4).

import { check, el, fill, table } from "./dom.js";

const KEY = "glass-keys";
const GLYPHS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc", " ": "Space" };
const bound = new Map();
let dialog = null;

const FIELDS = "input:not([type=checkbox]), select, textarea, [contenteditable]";
const typing = (target) => target instanceof Element && target.closest(FIELDS);
const enabled = () => localStorage.getItem(KEY) !== "off";

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (document.querySelector("dialog[open]") || typing(event.target)) return;
  if (event.key.length === 1 && !enabled() && event.key !== "?") return;
  const binding = bound.get(event.key);
  if (!binding) return;
  event.preventDefault();
  binding.run(event);
});

/** bind({x: ["ablate this head", run], …}) -> a function that unbinds them. Ours while the page is in view. */
export function bind(table_) {
  for (const [key, [label, run]] of Object.entries(table_)) bound.set(key, { label, run });
  return () => { for (const key of Object.keys(table_)) bound.delete(key); };
}

export function help() {
  dialog?.remove();
  const page = [...bound].filter(([key]) => key !== "?"); // ours first, this list last
  const rows = [...page, ["?", bound.get("?")]].map(([key, { label }]) => [el("kbd", {}, GLYPHS[key] ?? key), label]);
  const close = el("button", { type: "button", class: "primary", onclick: () => dialog.close() }, "Close");
  dialog = el("dialog", { "aria-labelledby": "keys-title", class: "keys" });
  fill(dialog, el("h2", { id: "keys-title" }, "Keys"),
    table({ caption: "Keys of this page", head: ["key", "does"], rows }),
    el("div", { class: "row spread" },
      check("single-letter keys", enabled(), (on) => localStorage.setItem(KEY, on ? "on" : "off")), close));
  document.body.append(dialog);
  dialog.showModal();
  close.focus();
}
