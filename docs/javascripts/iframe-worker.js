/* The search runs in a worker, and a browser starts none for a page that was opened from a folder.
   There the worker's script runs in a hidden frame instead, with the same two sides of a post box. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #waiting = [];
    #ready = false;

    constructor(url) {
      super();
      this.onmessage = null;
      this.#frame.hidden = true;
      document.documentElement.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.#load(each)), Promise.resolve());
      this.#load(url).then(() => {
        this.#ready = true;
        this.#waiting.splice(0).forEach((data) => this.#deliver(data));
      });
    }

    postMessage(data) {
      if (this.#ready) this.#deliver(data);
      else this.#waiting.push(data);
    }

    terminate() {
      this.#frame.remove();
    }

    #load(url) {
      return new Promise((resolve, reject) => {
        const script = this.#frame.contentDocument.createElement("script");
        script.src = String(url);
        script.onload = resolve;
        script.onerror = reject;
        this.#frame.contentDocument.body.append(script);
      });
    }

    #deliver(data) {
      const inside = this.#frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
  };
}
