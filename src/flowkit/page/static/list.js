// The list of tasks, with filters that are in the address.

import { h, replace, setText, update } from "./dom.js";
import { LiveList, PAGE } from "./polling.js";
import { duration, moment, STATUSES, symbolOf, totalOf } from "./words.js";

const CHOICES = [
  ["", "all"],
  ["show=decision", "waiting for a decision"],
  ["show=event", "waiting for an event"],
  ["show=failed_last_hour", "failed in the last hour"],
  ...["queued", "running", "deferred", "failed", "finished", "cancelled"].map((status) => [`status=${status}`, STATUSES[status].word]),
];

export class TaskList extends LiveList {
  async start() {
    this.rows = h("tbody", {});
    replace(
      this.main,
      h("h1", {}, "Tasks"),
      this.filters(),
      h("div", { class: "tasks-scroll", role: "region", tabindex: "0", "aria-label": "Tasks" }, h("table", { class: "tasks" },
        h("thead", {}, h("tr", {}, ["status", "task", "name", "created", "latest run", "reason"].map((each) => h("th", { scope: "col" }, each)))),
        this.rows)),
      this.note,
      this.pages,
      h("p", { class: "note" }, "Everybody who may open this page sees all tasks of the database: tasks are not separated by tenant."),
    );
    await this.live.follow();
  }

  // Show what another address has, without taking the focus. Return false if it is not a list.
  go(query) {
    if (query.has("task") || query.has("view")) return false;
    this.read(query);
    this.showFilters();
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

  path() {
    const asked = new URLSearchParams([...this.query].filter(([key]) => ["status", "show", "name", "id", "skip"].includes(key)));
    asked.set("limit", PAGE);
    return `tasks?${asked}`;
  }

  show({ tasks, more }) {
    update(this.rows, tasks.map((task) => this.row(task)));
    setText(this.note, tasks.length ? "" : this.nothing());
    this.showPages(more, "newer", "older");
  }

  nothing() {
    const filtered = ["status", "show", "name", "id", "skip"].some((key) => this.query.has(key));
    return filtered ? "No task matches." : "There are no tasks yet. `flowkit run graph.json` starts one, and it appears here.";
  }

  row(task) {
    const target = new URLSearchParams({ task: task.task_id });
    return h("tr", {},
      h("td", {}, h("span", { class: `status ${task.status}` }, `${symbolOf(task.status)} ${STATUSES[task.status]?.word || task.status}`)),
      h("td", { class: "id" }, h("a", { href: `?${target}` }, task.task_id)),
      h("td", { class: "id" }, task.name || ""),
      h("td", { class: "when" }, moment(task.started_at)),
      h("td", { class: "number" }, duration(task.seconds), totalOf(task) && h("div", { class: "note" }, totalOf(task))),
      h("td", { class: "reason", title: task.reason }, task.reason && h("span", {}, task.reason)));
  }
}
