// The selected node: its state in one sentence, its attempts, inputs, result, batches, and its actions.

import { get, ofTask } from "./api.js";
import { NodeActions } from "./actions.js";
import { copyButton, h, replace, update } from "./dom.js";
import { AttemptLines } from "./lines.js";
import { duration, moment, secondsOf, sentenceOf, STATUSES, symbolOf } from "./words.js";

const PAGE = 20;
const ATTEMPTS = 100;
const REFRESH_MS = 2000;

export class NodePanel {
  constructor(side, taskId, session, onClose) {
    this.side = side;
    this.taskId = taskId;
    this.session = session;
    this.onClose = onClose;
    this.empty();
  }

  empty() {
    this.node = null;
    clearTimeout(this.timer);
    this.actions?.stop();
    this.lines?.stop();
    replace(this.side, h("p", { class: "note" }, "Select a node to see its attempts, inputs and batches."));
  }

  open(node, row, now, closed) {
    this.empty();
    this.node = node;
    this.known = null;
    this.skip = 0;
    this.shown = null;
    this.row = null;
    this.loaded = null;
    this.debug = null;
    this.failedOnly = false;
    this.state = h("div", { class: "node-state" });
    this.question = h("div", {});
    this.attempts = h("div", {}, h("p", { class: "note" }, "loading…"));
    this.details = h("div", {});
    this.batches = h("div", {}, h("p", { class: "note" }, "loading…"));
    this.actions = new NodeActions(this.taskId, node, this.session, () => ({ input_inline: this.io?.input_inline }));
    this.lines = new AttemptLines(this.taskId, node);
    this.io = null;
    const about = [node.role, node.function, node.parallel > 1 ? `up to ${node.parallel} shards` : "", node.is_map ? "maps items" : ""].filter(Boolean).join(" · ");
    replace(this.side,
      h("div", { class: "side-title" }, h("h2", { "data-scrolls": true }, node.node_id), copyButton(node.node_id, "the id of the node"), h("button", { "aria-label": "Close", onclick: () => { this.empty(); this.onClose(); } }, "×")),
      h("p", { class: "note" }, about),
      node.when && h("p", { class: "note" }, "starts when ", h("code", {}, node.when)),
      this.state, this.question, this.actions.element,
      h("h3", {}, "Attempts"), this.attempts,
      h("h3", {}, "Log"), this.lines.element,
      this.details,
      h("h3", {}, "Batches"), this.batches);
    if (row) this.update(row, now, closed);
    else this.load();
  }

  // Put the focus on the first action, or on their group while it is not known which ones there are.
  enter() {
    const actions = this.actions.element;
    actions.tabIndex = -1;
    (actions.querySelector("button") ?? actions).focus();
  }

  update(row, now, closed = false) {
    if (!this.node || !row) return;
    this.tick(row, now);
    this.actions.update(row, closed);
    this.lines.update(row);
    this.row = row;
    const loaded = `${row.status} ${row.attempt}`;
    if (this.loaded !== loaded) {
      this.loaded = loaded;
      this.load();
    }
    const shown = `${row.status} ${row.batches || 0} ${row.failed_batches || 0}`;
    if (this.shown === shown) return;
    this.shown = shown;
    this.refreshBatches();
  }

  tick(row, now) {
    if (!this.node || !row) return;
    this.now = now;
    const sentence = sentenceOf(row, now);
    const took = secondsOf(row, now);
    update(this.state,
      h("p", {}, h("span", { class: `status ${row.status}` }, `${symbolOf(row.status)} ${STATUSES[row.status]?.word || row.status}`),
        row.attempt ? ` attempt ${row.attempt}` : "", took === null ? "" : `, ${duration(took)}`, row.version ? `, version ${row.version}` : ""),
      sentence && h("p", { class: row.status === "failed" ? "reason" : "sentence", "data-scrolls": true }, sentence),
      row.status === "failed" && this.debug && command("Debug it with", this.debug, "the command that debugs the node"));
    if (this.known?.attempts.some((each) => each.outcome === "running")) this.showAttempts(this.known.attempts, this.known.complete, now);
  }

  showAttempts(attempts, complete, now) {
    if (!this.node) return;
    this.known = { attempts, complete };
    update(this.attempts,
      attempts.length > ATTEMPTS && h("p", { class: "note" }, `The latest ${ATTEMPTS} of ${attempts.length.toLocaleString()}:`),
      attempts.length ? h("ol", { class: "attempts" }, attempts.slice(-ATTEMPTS).map((each) => h("li", {},
        h("strong", {}, `${each.attempt}`), ` ${each.outcome}`,
        each.began_at && [", ", moment(each.began_at)],
        secondsOf(each, now) === null ? "" : `, ${duration(secondsOf(each, now))}`,
        each.worker ? `, ${each.worker}` : "",
        attempts.length > 1 && [" ", h("button", { class: "link", "data-key": `log ${each.attempt}`, onclick: () => this.lines.choose(each.attempt) }, "log")],
        (each.code || each.error) && h("pre", {}, [each.code, each.error].filter(Boolean).join(": "))))) : h("p", { class: "note" }, "none yet"),
      !complete && h("p", { class: "note" }, "Temporal no longer has the history of this task, so attempts may be missing."));
  }

  // Show why the attempts are not known, as far as none are shown.
  refuseAttempts(why) {
    if (this.node && !this.attempts.querySelector("ol")) update(this.attempts, h("p", { class: "note" }, why));
  }

  async load() {
    const { node } = this;
    const turn = (this.loads = (this.loads || 0) + 1);
    try {
      const found = await get(ofTask("node", this.taskId, { node: node.node_id }));
      if (node !== this.node || turn !== this.loads) return;
      const { io = {}, ...definition } = found.definition;
      this.io = io;
      this.debug = found.debug;
      update(this.question, found.asks ? h("p", { class: "question", "data-scrolls": true }, h("b", {}, "Asks: "), found.asks) : null);
      const isOpen = new Map([...this.details.children].map((each) => [each.dataset.key, each.open]));
      update(this.details, value("Inputs", io, isOpen), value("Result", found.result, isOpen), value("Definition", definition, isOpen));
      this.tick(this.row, this.now);
    } catch (error) {
      if (node !== this.node || turn !== this.loads) return;
      this.loaded = null; // the next update tries again
      if (!this.io) update(this.details, h("p", { class: "note" }, error.message));
    }
  }

  // Batches may arrive all the time, so what they change is read once in a while.
  refreshBatches() {
    clearTimeout(this.timer);
    const left = (this.loadedAt || 0) + REFRESH_MS - Date.now();
    if (left > 0 && this.loadedNode === this.node) this.timer = setTimeout(() => this.loadBatches(), left);
    else this.loadBatches();
  }

  async loadBatches() {
    const { node } = this;
    if (!node) return;
    const turn = (this.turns = (this.turns || 0) + 1);
    this.loadedAt = Date.now();
    this.loadedNode = node;
    try {
      const found = await get(ofTask("batches", this.taskId, { node: node.node_id, limit: PAGE, skip: this.skip, failed: this.failedOnly }));
      if (node === this.node && turn === this.turns) this.showBatches(found);
    } catch (error) {
      if (node !== this.node || turn !== this.turns) return;
      this.shown = null; // the next update tries again
      update(this.batches, h("p", { class: "note" }, error.message));
    }
  }

  showBatches({ batches, total, skip }) {
    const open = (to) => { this.skip = to; this.loadBatches(); };
    const last = Math.floor(Math.max(0, total - 1) / PAGE) * PAGE;
    const page = (label, to, possible) => h("button", { "data-key": label, disabled: !possible, onclick: () => open(to) }, label);
    update(this.batches,
      h("label", { class: "toggle" }, h("input", { type: "checkbox", "data-key": "failed", checked: this.failedOnly, onchange: (event) => { this.failedOnly = event.target.checked; open(0); } }), "only failed ones"),
      batches.length ? h("table", { class: "batches" }, h("tbody", {}, batches.map((each) => h("tr", {},
        h("td", {}, h("span", { class: `status ${each.status === "ok" ? "finished" : each.status}` }, each.status)),
        h("td", {}, each.uid),
        h("td", {}, h("code", {}, each.error || JSON.stringify(each.metrics)),
          each.debug && command("Debug it with", each.debug, `the command that debugs ${each.uid}`)))))) : h("p", { class: "note" }, "none"),
      total > PAGE && h("p", { class: "pages" },
        page("first", 0, skip > 0), page("back", Math.max(0, skip - PAGE), skip > 0),
        h("span", {}, `${(skip + 1).toLocaleString()} to ${(skip + batches.length).toLocaleString()} of ${total.toLocaleString()}`),
        page("next", skip + PAGE, skip < last), page("last", last, skip < last)));
  }
}

// A command for the user's own terminal, with a button that copies it.
const command = (label, text, what) => h("p", { class: "command" }, `${label} `, h("code", {}, text), " ", copyButton(text, what));

function value(title, given, isOpen) {
  const kept = Object.fromEntries(Object.entries(given || {}).filter(([, each]) => each !== null && !(typeof each === "object" && !Object.keys(each).length)));
  return Object.keys(kept).length ? h("details", { open: isOpen.get(title) ?? title !== "Definition", "data-key": title }, h("summary", {}, title), h("pre", {}, JSON.stringify(kept, null, 2))) : null;
}
