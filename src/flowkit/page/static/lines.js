// What the handler has logged in an attempt of a node: the last lines, earlier ones on request, and new ones while it runs.

import { get, ofTask } from "./api.js";
import { copyButton, h, replace, setText } from "./dom.js";
import { clock } from "./words.js";

const PAGE = 200;
const MOST = 2000; // More lines in one page would make it slow; the command prints them all.
const LIVE_MS = 1500;
const POLLS_AFTER_END = 3; // The lines of the last second arrive after the end of the attempt.
const LEVELS = ["debug", "info", "warning", "error"];
const RUNS = new Set(["running", "cancelling"]);

export class AttemptLines {
  constructor(taskId, node) {
    this.taskId = taskId;
    this.node = node;
    this.chosen = null; // The attempt that the reader has chosen; the latest one if there is none.
    this.attempt = 0;
    this.level = "debug";
    this.left = 0;
    this.title = h("span", { class: "note" });
    this.note = h("p", { class: "note" });
    this.list = h("ol", { class: "lines", tabindex: "0", "aria-label": "Lines of the log" });
    this.older = h("button", { hidden: true, onclick: () => this.loadEarlier() }, "earlier lines");
    this.latest = h("button", { class: "link", hidden: true, onclick: () => this.choose(null) }, "show the latest attempt");
    this.levels = h("select", { "aria-label": "Least level", onchange: () => { this.level = this.levels.value; this.begin(); } },
      LEVELS.map((each) => h("option", { value: each }, each === "debug" ? "all levels" : `${each} and above`)));
    this.element = h("div", {}, h("p", { class: "line-tools" }, this.title, this.latest, this.levels), this.older, this.note, this.list);
  }

  stop() {
    this.stopped = true;
    clearTimeout(this.timer);
  }

  // The state of the node has changed.
  update(row) {
    this.runs = RUNS.has(row.status);
    this.newest = row.attempt || 0;
    if (this.runs) this.left = POLLS_AFTER_END;
    if (this.chosen === null && this.attempt !== this.newest) this.show(this.newest);
    else if (this.runs && !this.timer && !this.busy) this.poll();
  }

  // Show an attempt, or the latest one from now on.
  choose(attempt) {
    this.chosen = attempt === this.newest ? null : attempt;
    this.show(attempt ?? this.newest);
  }

  show(attempt) {
    this.attempt = attempt;
    this.begin();
  }

  begin() {
    replace(this.list);
    this.first = this.last = "";
    this.older.hidden = true;
    this.latest.hidden = this.chosen === null;
    setText(this.title, this.attempt ? `attempt ${this.attempt}` : "");
    setText(this.note, this.attempt ? "loading…" : "none yet");
    clearTimeout(this.timer);
    this.timer = null;
    this.left = POLLS_AFTER_END;
    if (this.attempt) this.poll();
  }

  read(place) {
    return get(ofTask("logs", this.taskId, { node: this.node.node_id, attempt: this.attempt, level: this.level, limit: PAGE, ...place }));
  }

  isShown(attempt, level) {
    return !this.stopped && attempt === this.attempt && level === this.level;
  }

  // Read new lines; again after a while, as long as there may be more.
  async poll() {
    const { attempt, level } = this;
    clearTimeout(this.timer);
    this.timer = null;
    this.busy = true;
    let more = false;
    try {
      const found = await this.read(this.last ? { after: this.last } : {});
      if (!this.isShown(attempt, level)) return;
      this.append(found);
      more = found.later;
    } catch (error) {
      if (!this.isShown(attempt, level)) return;
      setText(this.note, error.message);
    } finally {
      this.busy = false;
    }
    if (!this.runs && !more) this.left -= 1;
    if (this.left > 0) this.timer = setTimeout(() => this.poll(), more ? 0 : LIVE_MS);
  }

  append({ kept, lines, earlier, end, command }) {
    const atEnd = this.list.scrollTop + this.list.clientHeight >= this.list.scrollHeight - 4;
    if (!this.last) this.older.hidden = !earlier;
    this.last = end;
    if (lines.length) {
      this.first ||= lines[0].place;
      this.list.append(...lines.flatMap(rows));
      while (this.list.childElementCount > MOST) {
        this.list.firstElementChild.remove();
        this.older.hidden = true;
        this.cut = true;
      }
    }
    if (!kept) setText(this.note, "Lines of handlers are not kept here: the page runs without the product observe.");
    else if (this.cut) replace(this.note, `The last ${MOST.toLocaleString()} lines; `, h("code", {}, command), " ", copyButton(command, "the command that prints all lines"), " prints all.");
    else setText(this.note, this.first ? "" : "nothing was logged");
    if (atEnd) this.list.scrollTop = this.list.scrollHeight;
  }

  async loadEarlier() {
    const { attempt, level } = this;
    try {
      const { lines, earlier } = await this.read({ before: this.first });
      if (!this.isShown(attempt, level) || !lines.length) return;
      const height = this.list.scrollHeight;
      this.first = lines[0].place;
      this.list.prepend(...lines.flatMap(rows));
      this.list.scrollTop += this.list.scrollHeight - height;
      this.older.hidden = !earlier || this.list.childElementCount >= MOST;
    } catch (error) {
      if (this.isShown(attempt, level)) setText(this.note, error.message);
    }
  }
}

const two = (number) => String(number).padStart(2, "0");

function timeOf(at) {
  const time = new Date(at * 1000);
  return `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}.${String(time.getMilliseconds()).padStart(3, "0")}`;
}

function rows(line) {
  const gap = line.left_out ? [h("li", { class: "gap" }, `… ${line.left_out.toLocaleString()} lines left out …`)] : [];
  const about = [line.logger, line.worker_id, line.shard ? `shard ${line.shard}` : ""].filter(Boolean).join(", ");
  return [...gap, h("li", { class: line.level.toLowerCase(), title: `${clock(line.at)}, ${about}` },
    h("time", {}, timeOf(line.at)), " ", h("b", {}, line.level), " ", line.batch_uid ? h("span", { class: "batch" }, line.batch_uid, " ") : null, h("span", { class: "text" }, line.text))];
}
