// A list that is read again and again while it is shown.

import { ApiError, get } from "./api.js";
import { h, replace, setText } from "./dom.js";
import { clock } from "./words.js";

export const PAGE = 50;
const EVERY_MS = 2000;

// A list has `path()`, the call that reads it, and `show(found)`.
export class LiveList {
  constructor(main, query, navigate) {
    this.main = main;
    this.query = query;
    this.navigate = navigate;
    this.stopped = new AbortController();
    this.turns = 0;
    this.note = h("p", { class: "note", role: "status" }, "loading…");
    this.pages = h("nav", { class: "pages", "aria-label": "Pages of the list" });
  }

  async follow() {
    for (;;) {
      await this.refresh();
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
      if (this.stopped.signal.aborted) return;
      if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    }
  }

  async refresh() {
    const turn = (this.turns += 1);
    try {
      const found = await get(this.path(), this.stopped.signal);
      if (turn !== this.turns) return;
      this.lostAt = null;
      this.show(found);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) throw error;
      if (turn !== this.turns) return;
      this.lostAt ??= Date.now() / 1000;
      setText(this.note, `Not live since ${clock(this.lostAt)}: ${error.message}; trying again.`);
    }
  }

  showPages(more, before, after) {
    const skip = Number(this.query.get("skip") || 0);
    const page = (to, label) => {
      const next = new URLSearchParams(this.query);
      if (to) next.set("skip", to);
      else next.delete("skip");
      return h("button", { "data-key": label, onclick: () => this.navigate(next) }, label);
    };
    replace(this.pages, skip > 0 && page(Math.max(0, skip - PAGE), before), more && page(skip + PAGE, after));
  }

  stop() {
    this.stopped.abort();
  }
}
