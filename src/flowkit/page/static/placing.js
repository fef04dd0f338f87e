// Computes where the nodes and edges of a graph lie, in a worker that lives as long as the page.
// It starts with the page, so it is ready when the first graph arrives.

class Placing {
  constructor() {
    this.start();
  }

  start() {
    this.worker = new Worker(new URL("./layout.js", import.meta.url), { type: "module" });
    this.worker.addEventListener("message", ({ data }) => this.finish(data));
    this.worker.addEventListener("error", ({ message }) => {
      this.broken = message || "the program that places the nodes cannot be loaded";
      this.finish({ error: this.broken });
    });
  }

  finish(found) {
    this.answer?.(found);
    this.answer = null;
    if (found.error) this.broken = found.error;
  }

  // Return {placed} or {error}. A later call ends one that still runs, which then returns null.
  place(graph) {
    this.cancel();
    if (this.broken) this.restart();
    return new Promise((resolve) => {
      this.answer = resolve;
      this.worker.postMessage(graph);
    });
  }

  cancel() {
    if (!this.answer) return;
    this.answer(null);
    this.answer = null;
    this.restart();
  }

  restart() {
    this.worker.terminate();
    this.broken = null;
    this.start();
  }
}

export const placing = new Placing();
