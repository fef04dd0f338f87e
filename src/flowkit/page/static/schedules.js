// The list of schedules: each is a row of squares, one for each nominal time.

import { h, replace, setText, update } from "./dom.js";
import { LiveList, PAGE } from "./polling.js";
import { instant, STATUSES } from "./words.js";

// What has become of a nominal time of a schedule that has no task, or whose task no engine has begun.
const TIMES = {
  refused: { symbol: "!", word: "refused" },
  taken: { symbol: "≠", word: "taken" },
  no_task: { symbol: "–", word: "no task" },
  started: { symbol: "▷", word: "waits for an engine" },
  waiting: { symbol: "◷", word: "waiting" },
  due: { symbol: "·", word: "due" },
};

const wordOf = (status) => (TIMES[status] || STATUSES[status])?.word || status;
const symbolOf = (status) => (TIMES[status] || STATUSES[status])?.symbol || "?";
const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

export class ScheduleList extends LiveList {
  async start() {
    this.rows = h("ul", { class: "schedules" });
    this.chosen = new Map(); // by schedule: the time whose square the Tab key reaches
    this.pointed = null; // the schedule and the time that have the focus or the mouse
    this.found = new Map();
    for (const [event, enter] of [["focusin", true], ["focusout", false], ["mouseover", true], ["mouseout", false]]) {
      this.rows.addEventListener(event, ({ target }) => this.point(enter ? target.closest(".square") : null));
    }
    this.rows.addEventListener("keydown", (event) => this.move(event));
    replace(
      this.main,
      h("h1", {}, "Schedules"),
      legend(),
      this.rows,
      this.note,
      this.pages,
      h("p", { class: "note" }, "No task: an earlier one ran, Temporal was down, the schedule was paused, or the task was purged. Such times are known since the last change of a schedule. Waiting: the task starts when an earlier one has ended. Refused: the graph or the params were not valid. Taken: something else than the schedule has started a workflow with the id of the task."),
    );
    await this.live.follow();
  }

  // Show what another address has. Return false if it is not a list of schedules.
  go(query) {
    if (query.has("task") || query.get("view") !== "schedules") return false;
    this.read(query);
    return true;
  }

  path() {
    return `schedules?${new URLSearchParams({ limit: PAGE, skip: this.query.get("skip") || 0 })}`;
  }

  show({ schedules, more }) {
    this.found = new Map(schedules.map((each) => [each.name, each]));
    update(this.rows, schedules.map((each) => this.row(each)));
    setText(this.note, schedules.length || this.query.has("skip") ? "" : "There are no schedules yet. `flowkit schedule create` creates one, and it appears here.");
    this.showPages(more, "back", "next");
  }

  row(schedule) {
    const { name, when, paused, note, times } = schedule;
    const chosen = times.find(({ at }) => at === this.chosen.get(name)) || times.findLast(({ status }) => status !== "due") || times[0];
    return h("li", { class: "schedule" },
      h("div", { class: "schedule-title" },
        h("h2", {}, name), h("span", { class: "note" }, when),
        paused && h("span", { class: "status deferred" }, "paused"), paused && note && h("span", { class: "note" }, note),
        h("a", { class: "all-tasks", "data-key": `tasks ${name}`, href: `?${new URLSearchParams({ id: `${name}-` })}`, "aria-label": `All tasks of ${name}` }, "all tasks")),
      times.length > 0 && h("ol", { class: "squares", "aria-label": `Nominal times of ${name}, oldest first` }, times.map((each) => h("li", {}, square(schedule, each, each === chosen)))),
      h("p", { class: "note about-time" }, this.sentence(schedule)));
  }

  // What is said below the squares: of the time with the focus or the mouse, or of all of them.
  sentence({ name, timezone, times }) {
    const pointed = this.pointed?.name === name && times.find(({ at }) => at === this.pointed.at);
    return pointed ? describe(pointed, timezone) : summary(times, timezone);
  }

  point(element) {
    element ??= document.activeElement?.closest(".square"); // the mouse has left, the focus is still there
    const before = this.pointed?.name;
    this.pointed = element ? { name: element.dataset.schedule, at: element.dataset.at } : null;
    for (const name of new Set([before, this.pointed?.name])) {
      const place = [...this.found.keys()].indexOf(name);
      if (place >= 0) setText(this.rows.children[place].querySelector(".about-time"), this.sentence(this.found.get(name)));
    }
  }

  // Arrow keys move the focus along the squares of a row, and to those of the rows above and below.
  move(event) {
    const from = event.target.closest(".square");
    if (!from || event.altKey || event.ctrlKey || event.metaKey) return;
    const row = from.closest(".schedule");
    const squares = [...row.querySelectorAll(".square")];
    const place = squares.indexOf(from);
    let to;
    if (event.key in STEPS) to = squares[Math.min(squares.length - 1, Math.max(0, place + STEPS[event.key]))];
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const other = row[event.key === "ArrowUp" ? "previousElementSibling" : "nextElementSibling"]?.querySelectorAll(".square") || [];
      to = other[Math.min(place, other.length - 1)];
    }
    if (!to) return;
    event.preventDefault();
    for (const each of to.closest(".squares").querySelectorAll(".square")) each.tabIndex = each === to ? 0 : -1;
    this.chosen.set(to.dataset.schedule, to.dataset.at);
    to.focus();
  }
}

function square({ name, timezone }, time, reached) {
  const attributes = {
    class: `square ${time.status}`, tabindex: reached ? "0" : "-1", "aria-label": describe(time, timezone),
    "data-key": `${name} ${time.at}`, "data-schedule": name, "data-at": time.at,
  };
  const symbol = h("span", { "aria-hidden": "true" }, symbolOf(time.status));
  return time.task_id && !["started", "taken"].includes(time.status) ? h("a", { ...attributes, href: `?${new URLSearchParams({ task: time.task_id })}` }, symbol) : h("span", { ...attributes, role: "img" }, symbol);
}

function describe({ at, status, reason }, timezone) {
  return `${instant(at, timezone)}: ${wordOf(status)}${reason ? `, ${reason}` : ""}`;
}

function summary(times, timezone) {
  const counts = new Map();
  for (const { status } of times) if (status !== "due") counts.set(status, (counts.get(status) || 0) + 1);
  const next = times.find(({ status }) => status === "due");
  return [...[...counts].map(([status, count]) => `${count} ${wordOf(status)}`), next && `next ${instant(next.at, timezone)}`].filter(Boolean).join(" · ") || "no time has come yet";
}

function legend() {
  const shown = ["finished", "failed", "refused", "taken", "cancelled", "running", "started", "waiting", "no_task", "due"];
  return h("ul", { class: "square-legend", "aria-label": "Legend" }, shown.map((status) => h("li", {},
    h("span", { class: `square ${status}`, "aria-hidden": "true" }, symbolOf(status)), wordOf(status))));
}
