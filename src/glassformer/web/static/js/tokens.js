// <glass-tokens>: the text as the model has it, a button a token. One tab stop; arrows move.

import { el, fill } from "./dom.js";

customElements.define("glass-tokens", class extends HTMLElement {
  #words = null;

  connectedCallback() {
    this.addEventListener("click", (event) => this.#tell("pick", event.target.closest("button")));
    this.addEventListener("pointerover", (event) => this.#tell("over", event.target.closest("button")));
    this.addEventListener("pointerleave", () => this.#tell("over", null));
  }

  #tell(name, button) {
    if (name === "pick" && !button) return;
    this.dispatchEvent(new CustomEvent(name, { detail: button ? Number(button.dataset.at) : null }));
  }

  /** {words, selected, label} */
  set data({ words, selected, label }) {
    if (words !== this.#words) {
      this.#words = words;
      fill(this, words.map((word, at) => el("button", { type: "button", class: "token", "data-at": at }, word)));
    }
    this.setAttribute("role", "group");
    this.setAttribute("aria-label", label);
    [...this.children].forEach((button, at) => {
      button.setAttribute("aria-pressed", at === selected);
      button.tabIndex = at === selected || (selected === null && at === 0) ? 0 : -1;
    });
    const chosen = this.children[selected];
    if (!chosen) return;
    if (this.contains(document.activeElement)) chosen.focus({ preventScroll: true });
    const away = chosen.offsetTop - this.offsetTop; // scroll the strip, never the page
    if (away < this.scrollTop || away > this.scrollTop + this.clientHeight - 29) this.scrollTop = away - 61; // two rows
  }

  /** Tokens that another view points at. */
  set hover(places) {
    [...this.children].forEach((button, at) => button.classList.toggle("over", places.includes(at)));
  }
});
