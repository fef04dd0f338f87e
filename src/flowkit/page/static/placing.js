// Computes where the nodes and edges of a graph lie, in a worker that lives as long as the page.
// It starts with the page, so it is ready when the first graph arrives.

class Placing {
  constructor() {
    this.start();
  }

  start() {
    this.worker = new Worker(new URL("./layout.js", import.meta.url), { type: "module" });
    this.worker.addEventListener("message", ({ data }) => {
      this.answer?.(data);
      this.answer = null;
    });
  }

  // Return {placed} or {error}. A later call ends one that still runs, which then returns null.
  place(graph) {
    this.cancel();
    return new Promise((resolve) => {
      this.answer = resolve;
      this.worker.postMessage(graph);
    });
  }

  cancel() {
    if (!this.answer) return;
    this.worker.terminate();
    this.answer(null);
    this.answer = null;
    this.start();
  }
}

export const placing = new Placing();
