// What is read again and again while it is shown, and whether what is shown is of now.

import { get, serverNow } from "./api.js";
import { byId, h, replace, setText } from "./dom.js";
import { clock } from "./words.js";

export const PAGE = 50;
const EVERY_SEC = 2;
const SILENT_SEC = 6; // Beyond this time without a response, what is shown is not live.
const RUNS_ON_SEC = 2; // For so long, clocks run on without news.

// Reads again and again, and says in the head of the page since when it is not live.
export class Live {
  // `read(signal)` makes a call, and `show(found)` shows its result. It may return {pause, problem}: the seconds until the
  // next call, and why the server itself cannot read. A page that nobody sees reads nothing, unless `inBackground`.
  constructor(read, show, inBackground = false) {
    this.read = read;
    this.show = show;
    this.inBackground = inBackground;
    this.element = byId("connection");
    this.heardAt = null; // By the clock of the server: when the latest response has arrived.
    this.pause = EVERY_SEC;
    this.lost = null; // Why there are no responses.
    this.problem = null;
    this.stopped = new AbortController();
    document.addEventListener("visibilitychange", () => document.hidden || this.next?.(), { signal: this.stopped.signal });
  }

  // Read until `stop`. Throw the ApiError of a refused token.
  async follow() {
    while (!this.stopped.signal.aborted) {
      await this.ask();
      await new Promise((resolve) => {
        this.next = resolve;
        if (!document.hidden || this.inBackground) setTimeout(resolve, this.asksAgain ? 0 : this.pause * 1000);
      });
    }
  }

  async ask() {
    const turn = (this.turn = new AbortController());
    this.asksAgain = false;
    const silent = setTimeout(() => this.lose(`the server has not responded for ${SILENT_SEC} s`), SILENT_SEC * 1000);
    let found;
    try {
      found = await this.read(AbortSignal.any([this.stopped.signal, turn.signal]));
    } catch (error) {
      if (turn.signal.aborted || this.stopped.signal.aborted) return;
      if (error.status === 401 || error.status === 403) throw error;
      this.lose(error.message);
      return;
    } finally {
      clearTimeout(silent);
    }
    if (turn.signal.aborted || this.stopped.signal.aborted) return;
    this.heardAt = serverNow();
    const { pause = EVERY_SEC, problem = null } = this.show(found) || {};
    Object.assign(this, { pause, problem, lost: null });
    this.mark();
  }

  // Read at once, and forget a call that is in flight.
  again() {
    this.asksAgain = true;
    this.turn?.abort();
    this.next?.();
  }

  lose(why) {
    this.lost = why;
    this.mark();
  }

  get isLive() {
    return this.heardAt !== null && this.lost === null && this.problem === null;
  }

  // The time by the clock of the server, which stands still where news end.
  get now() {
    return this.heardAt === null ? serverNow() : Math.min(serverNow(), this.heardAt + this.pause + RUNS_ON_SEC);
  }

  mark() {
    document.body.classList.toggle("lost", !this.isLive);
    const since = this.heardAt === null ? "" : ` since ${clock(this.heardAt)}`;
    const text = this.lost !== null ? `not live${since}: ${this.lost}` : this.problem !== null ? "not live" : "live";
    if (this.element.textContent !== text) setText(this.element, text);
  }

  stop() {
    this.stopped.abort();
    this.next?.();
    setText(this.element, "");
    document.body.classList.remove("lost");
  }
}

// A list has `path()`, the call that reads it, `rows`, the element with what was found, and `show(found)`.
export class LiveList {
  constructor(main, query, navigate) {
    this.main = main;
    this.query = query;
    this.navigate = navigate;
    this.note = h("p", { class: "note", role: "status" }, "loading…");
    this.pages = h("nav", { class: "pages", "aria-label": "Pages of the list" });
    this.live = new Live((signal) => get(this.path(), signal), (found) => {
      this.rows.removeAttribute("aria-busy");
      this.show(found);
    });
  }

  // Show what another address has. Until it is read, the rows of the earlier one are marked.
  read(query) {
    const before = this.path();
    this.query = query;
    if (this.path() === before) return;
    this.rows.setAttribute("aria-busy", "true");
    this.live.again();
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
    this.live.stop();
  }
}
