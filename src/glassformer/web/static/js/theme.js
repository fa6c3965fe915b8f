// Auto, light or dark; kept in localStorage, told to the canvases, which must repaint.

const KEY = "glass-theme";
const CHOICES = ["auto", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();
const cache = new Map();

function changed() {
  cache.clear();
  for (const listener of [...listeners]) listener();
}
dark.addEventListener("change", changed);

export function choice() {
  const kept = localStorage.getItem(KEY);
  return CHOICES.includes(kept) ? kept : "auto";
}

export function choose(value) {
  if (value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
  localStorage.setItem(KEY, value);
  changed();
}

export const following = () => CHOICES[(CHOICES.indexOf(choice()) + 1) % CHOICES.length];
export const current = () => (choice() === "auto" ? (dark.matches ? "dark" : "light") : choice());

/** Call listener at every change; the answer ends that. */
export function watch(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** A colour token of app.css as [red, green, blue] in the theme now shown. */
export function rgb(token) {
  if (!cache.has(token)) {
    const probe = document.createElement("i");
    probe.style.color = `var(${token})`;
    document.body.append(probe);
    cache.set(token, getComputedStyle(probe).color.match(/\d+/g).slice(0, 3).map(Number));
    probe.remove();
  }
  return cache.get(token);
}
