// The selected node: its state in one sentence, its attempts, inputs, result, batches, and its actions.

import { get, ofTask } from "./api.js";
import { NodeActions } from "./actions.js";
import { h, replace } from "./dom.js";
import { clock, duration, sentenceOf, STATUSES, symbolOf } from "./words.js";

const PAGE = 20;

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
    replace(this.side, h("p", { class: "note" }, "Select a node to see its attempts, inputs and batches."));
  }

  open(node, row, now) {
    this.node = node;
    this.skip = 0;
    this.failedOnly = false;
    this.state = h("div", { class: "node-state" });
    this.attempts = h("div", {});
    this.details = h("div", {});
    this.batches = h("div", {});
    this.actions = new NodeActions(this.taskId, node, this.session);
    const about = [node.role, node.function, node.parallel > 1 ? `up to ${node.parallel} shards` : "", node.is_map ? "maps items" : ""].filter(Boolean).join(" · ");
    replace(this.side,
      h("div", { class: "side-title" }, h("h2", {}, node.node_id), h("button", { "aria-label": "Close", onclick: () => { this.empty(); this.onClose(); } }, "×")),
      h("p", { class: "note" }, about),
      node.when && h("p", { class: "note" }, "starts when ", h("code", {}, node.when)),
      this.state, this.actions.element,
      h("h3", {}, "Attempts"), this.attempts,
      this.details,
      h("h3", {}, "Batches"), this.batches);
    this.update(row, now);
    this.load();
  }

  update(row, now = Date.now() / 1000) {
    if (!this.node || !row) return;
    this.tick(row, now);
    this.actions.update(row);
    if (this.shownStatus !== row.status || this.shownBatches !== row.batches) {
      this.shownStatus = row.status;
      this.shownBatches = row.batches;
      this.loadBatches();
    }
  }

  tick(row, now) {
    if (!this.node || !row) return;
    const sentence = sentenceOf(row, now);
    replace(this.state,
      h("p", {}, h("span", { class: `status ${row.status}` }, `${symbolOf(row.status)} ${STATUSES[row.status]?.word || row.status}`),
        row.attempt ? ` attempt ${row.attempt}` : "", row.seconds ? `, ${duration(row.seconds)}` : "", row.version ? `, version ${row.version}` : ""),
      sentence && h("p", { class: row.status === "failed" ? "reason" : "sentence" }, sentence));
  }

  showAttempts(attempts, complete) {
    if (!this.node) return;
    replace(this.attempts,
      attempts.length ? h("ol", { class: "attempts" }, attempts.slice(-100).map((each) => h("li", {},
        h("strong", {}, `${each.attempt}`), ` ${each.outcome}`,
        each.started_at ? `, ${clock(each.started_at)}` : "",
        each.started_at && each.ended_at ? `, ${duration(each.ended_at - each.started_at)}` : "",
        each.worker ? `, ${each.worker}` : "",
        (each.code || each.error) && h("pre", {}, [each.code, each.error].filter(Boolean).join(": "))))) : h("p", { class: "note" }, "none yet"),
      !complete && h("p", { class: "note" }, "Temporal no longer has the history of this task, so attempts may be missing."));
  }

  async load() {
    const node = this.node;
    try {
      const found = await get(ofTask("node", this.taskId, { node: node.node_id }));
      if (node !== this.node) return;
      const { io = {}, ...definition } = found.definition;
      replace(this.details,
        value("Inputs", io),
        value("Result", found.result),
        value("Definition", definition));
    } catch (error) {
      if (node === this.node) replace(this.details, h("p", { class: "note" }, error.message));
    }
  }

  async loadBatches() {
    const node = this.node;
    const asked = { node: node.node_id, limit: PAGE, skip: this.skip, failed: this.failedOnly };
    try {
      const { batches, total, skip } = await get(ofTask("batches", this.taskId, asked));
      if (node !== this.node) return;
      const turn = (to) => { this.skip = to; this.loadBatches(); };
      replace(this.batches,
        h("label", { class: "toggle" }, h("input", { type: "checkbox", checked: this.failedOnly, onchange: (event) => { this.failedOnly = event.target.checked; turn(0); } }), "only failed ones"),
        batches.length ? h("table", { class: "batches" }, h("tbody", {}, batches.map((each) => h("tr", {},
          h("td", {}, h("span", { class: `status ${each.status === "ok" ? "finished" : each.status}` }, each.status)),
          h("td", {}, each.uid),
          h("td", {}, h("code", {}, each.error || JSON.stringify(each.metrics))))))) : h("p", { class: "note" }, "none"),
        total > PAGE && h("p", {}, `${skip + 1} to ${skip + batches.length} of ${total.toLocaleString()} `,
          skip > 0 && h("button", { onclick: () => turn(Math.max(0, skip - PAGE)) }, "back"),
          skip + batches.length < total && h("button", { onclick: () => turn(skip + PAGE) }, "next")));
    } catch (error) {
      if (node === this.node) replace(this.batches, h("p", { class: "note" }, error.message));
    }
  }
}

function value(title, given) {
  const kept = Object.fromEntries(Object.entries(given || {}).filter(([, each]) => each !== null && !(typeof each === "object" && !Object.keys(each).length)));
  return Object.keys(kept).length ? h("details", { open: title !== "Definition" }, h("summary", {}, title), h("pre", {}, JSON.stringify(kept, null, 2))) : null;
}
