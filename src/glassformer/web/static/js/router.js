// The view is the address: #/inspect?run=digits&L=1&H=3. Back, forward and a copied link all come through here.

import { query } from "./api.js";

export function parse(hash) {
  const found = /^#\/([a-z]*)(?:\?(.*))?$/.exec(hash);
  return { name: found?.[1] || null, params: Object.fromEntries(new URLSearchParams(found?.[2] ?? "")) };
}

/** Parameters without a value are left out; the order is the order given. */
export const href = (name, params = {}) => query(`#/${name}`, params);

export class Router {
  /** show({name, params}) is called for every change of view, however it came. */
  constructor(show) {
    this.show = show;
    addEventListener("hashchange", () => this.render());
  }

  get current() { return parse(location.hash); }

  render() { return this.show(this.current); }

  /** A new view: the back button returns from it. */
  go(name, params) { this.#move("pushState", name, params); }

  /** The same view, told more exactly. */
  replace(name, params) { this.#move("replaceState", name, params); }

  #move(how, name, params) {
    const target = href(name, params);
    if (target === location.hash) return;
    history[how](null, "", target);
    this.render();
  }
}
