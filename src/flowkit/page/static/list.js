// The list of tasks, with filters that are in the address.

import { ApiError, get } from "./api.js";
import { h, replace, update } from "./dom.js";
import { clock, duration, STATUSES, symbolOf } from "./words.js";

const PAGE = 50;
const EVERY_MS = 2000;
const CHOICES = [
  ["", "all"],
  ["status=running", "running"],
  ["show=held", "waiting for a decision"],
  ["show=failed_last_hour", "failed in the last hour"],
  ["status=failed", "failed"],
  ["status=finished", "finished"],
];

export class TaskList {
  constructor(main, query, navigate) {
    this.main = main;
    this.query = query;
    this.navigate = navigate;
    this.stopped = new AbortController();
  }

  async start() {
    this.table = h("tbody", {});
    this.note = h("p", { class: "note", role: "status" }, "loading…");
    this.pages = h("nav", { class: "pages", "aria-label": "Pages of the list" });
    replace(
      this.main,
      h("h1", {}, "Tasks"),
      this.filters(),
      h("div", { class: "tasks-scroll", role: "region", tabindex: "0", "aria-label": "Tasks" }, h("table", { class: "tasks" },
        h("thead", {}, h("tr", {}, ["status", "task", "name", "started", "time", "reason"].map((each) => h("th", { scope: "col" }, each)))),
        this.table)),
      this.note,
      this.pages,
      h("p", { class: "note" }, "Everybody who may open this page sees all tasks of the database: tasks are not separated by tenant."),
    );
    for (;;) {
      await this.refresh();
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
      if (this.stopped.signal.aborted) return;
      if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    }
  }

  // Show what another address has, without taking the focus. Return false if it is not a list.
  go(query) {
    if (query.has("task")) return false;
    this.query = query;
    this.showFilters();
    this.refresh().catch(() => {}); // a refused token is reported when the list is read again
    return true;
  }

  filters() {
    const change = (changes) => {
      const next = new URLSearchParams(this.query);
      next.delete("skip");
      for (const [key, value] of Object.entries(changes)) {
        if (value) next.set(key, value);
        else next.delete(key);
      }
      this.navigate(next);
    };
    this.choices = CHOICES.map(([text, label]) => h("button", {
      type: "button", "data-filter": text,
      onclick: () => change({ status: null, show: null, ...Object.fromEntries(new URLSearchParams(text)) }),
    }, label));
    this.searches = [["id", "Id", "begins with"], ["name", "Name", "exactly"]].map(([name, label, placeholder]) => h("label", {}, label, h("input", {
      type: "search", name, placeholder, onchange: (event) => change({ [name]: event.target.value.trim() }),
    })));
    this.showFilters();
    return h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
      h("div", { class: "choices", role: "group", "aria-label": "Which tasks" }, this.choices), this.searches);
  }

  showFilters() {
    const active = new URLSearchParams([...this.query].filter(([key]) => key === "status" || key === "show")).toString();
    for (const button of this.choices) button.setAttribute("aria-pressed", String(button.dataset.filter === active));
    for (const { lastElementChild: field } of this.searches) field.value = this.query.get(field.name) || "";
  }

  async refresh() {
    const turn = (this.turns = (this.turns || 0) + 1);
    const skip = Number(this.query.get("skip") || 0);
    const asked = new URLSearchParams([...this.query].filter(([key]) => ["status", "show", "name", "id", "skip"].includes(key)));
    asked.set("limit", PAGE);
    try {
      const { tasks, more } = await get(`tasks?${asked}`, this.stopped.signal);
      if (turn !== this.turns) return;
      this.lostAt = null;
      update(this.table, tasks.map((task) => this.row(task)));
      this.note.textContent = tasks.length ? "" : this.nothing();
      const page = (to, label) => {
        const next = new URLSearchParams(this.query);
        if (to) next.set("skip", to);
        else next.delete("skip");
        return h("button", { "data-key": label, onclick: () => this.navigate(next) }, label);
      };
      replace(this.pages, skip > 0 && page(Math.max(0, skip - PAGE), "newer"), more && page(skip + PAGE, "older"));
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) throw error;
      if (turn !== this.turns) return;
      this.lostAt ??= Date.now() / 1000;
      this.note.textContent = `Not live since ${clock(this.lostAt)}: ${error.message}; trying again.`;
    }
  }

  nothing() {
    const filtered = ["status", "show", "name", "id", "skip"].some((key) => this.query.has(key));
    return filtered ? "No task matches." : "There are no tasks yet. `flowkit run graph.json` starts one, and it appears here.";
  }

  row(task) {
    const ended = task.finished_at ? new Date(task.finished_at) : new Date();
    const took = task.started_at ? (ended - new Date(task.started_at)) / 1000 : null;
    const target = new URLSearchParams({ task: task.task_id });
    return h("tr", {},
      h("td", {}, h("span", { class: `status ${task.status}` }, `${symbolOf(task.status)} ${STATUSES[task.status]?.word || task.status}`)),
      h("td", { class: "id" }, h("a", { href: `?${target}` }, task.task_id)),
      h("td", { class: "id" }, task.name || ""),
      h("td", { class: "when" }, clock(task.started_at)),
      h("td", { class: "number" }, duration(took)),
      h("td", { class: "reason", title: task.reason }, task.reason && h("span", {}, task.reason)));
  }

  stop() {
    this.stopped.abort();
  }
}
