// The page of one task: its graph or list of nodes, the timeline of attempts, the selected node, and the actions.

import { ApiError, get, ofTask, stream } from "./api.js";
import { ActionBar } from "./actions.js";
import { byId, h, replace } from "./dom.js";
import { GraphPicture } from "./graph.js";
import { collapse, isLarge } from "./groups.js";
import { NodePanel } from "./panel.js";
import { TaskState } from "./state.js";
import { Timeline } from "./timeline.js";
import { clock, duration, ENDED, sentenceOf, STATUSES, symbolOf } from "./words.js";

const ATTEMPTS_MS = 2000;
const TICK_MS = 1000;
const SHORTEST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 10_000;
const LISTED = 500;

export class TaskPage {
  constructor(main, taskId, query, session, keep) {
    this.main = main;
    this.taskId = taskId;
    this.query = query;
    this.session = session;
    this.keep = keep;
    this.state = new TaskState();
    this.expanded = new Set();
    this.selected = null;
    this.connected = null;
    this.lostAt = null;
    this.stopped = new AbortController();
  }

  async start() {
    this.frame();
    const structure = await get(ofTask("graph", this.taskId), this.stopped.signal);
    if (this.stopped.signal.aborted) return;
    this.adopt(structure);
    this.timer = setInterval(() => this.tick(), TICK_MS);
    this.follow();
    this.followAttempts();
    const chosen = this.places.get(this.query.get("node"));
    if (chosen !== undefined) this.expanded.add(chosen);
    const drawing = this.draw();
    if (chosen !== undefined) this.select(chosen);
    await drawing;
  }

  adopt(structure) {
    this.structure = structure;
    this.places = new Map(structure.nodes.map((node, index) => [node.node_id, index]));
    this.parents = [];
    for (const [from, to] of structure.edges) (this.parents[to] ||= []).push(from);
    this.large = isLarge(structure.nodes, structure.edges);
    const link = this.session.web_ui && structure.run_id
      ? `${this.session.web_ui}/namespaces/${encodeURIComponent(this.session.namespace)}/workflows/${encodeURIComponent(this.taskId)}/${structure.run_id}`
      : null;
    replace(this.links, link && h("a", { href: link, target: "_blank", rel: "noopener" }, "Temporal Web UI ↗"));
  }

  frame() {
    this.headline = h("div", { class: "headline" });
    this.links = h("span", { class: "links" });
    this.picture = h("div", { class: "picture" });
    this.nodeList = h("div", { class: "node-list" });
    this.side = h("aside", { class: "side", "aria-label": "Selected node" });
    this.timelineBox = h("div", { class: "timeline-box" });
    this.variables = h("div", { class: "node-list", role: "region", "aria-label": "Variables" });
    this.actions = new ActionBar(this.taskId, this.session, () => this.state);
    const view = this.query.get("view") || "graph";
    const tab = (name, label) => h("button", { type: "button", "aria-pressed": String(view === name), "data-view": name, onclick: () => this.showView(name) }, label);
    this.tabs = h("div", { class: "choices", role: "group", "aria-label": "View" }, tab("graph", "Graph"), tab("list", "List"), tab("timeline", "Timeline"), tab("variables", "Variables"));
    const find = h("input", { type: "search", list: "node-ids", placeholder: "node id", onchange: (event) => this.find(event.target.value) });
    this.ids = h("datalist", { id: "node-ids" });
    const toggle = (name, label, change) => h("label", { class: "toggle" }, h("input", { type: "checkbox", checked: this.query.get(name) === "1", onchange: (event) => { this.keep({ [name]: event.target.checked ? "1" : null }); change(event.target.checked); } }), label);
    this.tools = h("div", { class: "tools" },
      this.tabs, h("label", {}, "Find", find), this.ids,
      toggle("hide", "hide what has finished", (on) => this.hide(on)),
      toggle("idle", "show idle time", (on) => { this.timeline.collapsed = !on; this.showAttempts(); }),
      h("span", { class: "zoom" },
        h("button", { type: "button", "aria-label": "Zoom in", onclick: () => this.graph?.zoom(1.25) }, "+"),
        h("button", { type: "button", "aria-label": "Zoom out", onclick: () => this.graph?.zoom(0.8) }, "−"),
        h("button", { type: "button", onclick: () => this.graph?.fit() }, "Fit"),
        this.collapseButton = h("button", { type: "button", hidden: true, onclick: () => { this.expanded.clear(); this.draw(); } }, "Collapse")),
      h("details", { class: "legend" }, h("summary", {}, "Legend"), legend()));
    replace(this.main,
      h("div", { class: "title" }, h("h1", {}, this.taskId), this.links),
      this.headline, this.actions.element, this.tools,
      h("div", { class: "columns" }, h("div", { class: "stage" }, this.picture, this.nodeList, this.timelineBox, this.variables), this.side));
    this.graph = new GraphPicture(this.picture, { onSelect: (index) => this.select(index), onExpand: (members) => this.expand(members) });
    this.timeline = new Timeline(this.timelineBox, (node) => this.places.has(node) && this.select(this.places.get(node)));
    this.timeline.collapsed = this.query.get("idle") !== "1";
    this.panel = new NodePanel(this.side, this.taskId, this.session, () => this.deselect());
    this.showView(view);
  }

  showView(name) {
    this.view = name;
    this.keep({ view: name === "graph" ? null : name });
    for (const button of this.tabs.children) button.setAttribute("aria-pressed", String(button.dataset.view === name));
    this.picture.hidden = name !== "graph";
    this.nodeList.hidden = name !== "list";
    this.timelineBox.hidden = name !== "timeline";
    this.variables.hidden = name !== "variables";
    if (name === "variables") this.loadVariables();
    if (name === "list") this.listNodes();
    if (name === "timeline") { this.showAttempts(); }
    if (name === "graph") requestAnimationFrame(() => this.graph.placed && this.graph.fit());
  }

  async loadVariables() {
    this.variablesStale = false;
    try {
      const { variables } = await get(ofTask("variables", this.taskId), this.stopped.signal);
      replace(this.variables, values("Params", this.structure?.params), values("Variables", variables));
    } catch (error) {
      if (error.name !== "AbortError") replace(this.variables, h("p", { class: "note" }, error.message));
    }
  }

  async draw() {
    const { nodes, edges } = this.structure;
    const grouped = this.large
      ? collapse(nodes, edges, this.expanded)
      : { groups: nodes.map((_, index) => [index]), edges };
    this.collapseButton.hidden = !this.large || !this.expanded.size;
    replace(this.ids, nodes.slice(0, LISTED).map((node) => h("option", { value: node.node_id })));
    const problem = await this.graph.draw(this.structure, grouped.groups, grouped.edges, nodes.length > 12);
    if (problem) {
      this.picture.append(h("p", { class: "note" }, `The graph cannot be drawn (${problem}). The list has all nodes.`));
      this.showView("list");
    }
    if (this.state.task) this.graph.update(this.state.rows, null);
    if (this.query.get("hide") === "1") this.graph.hideEnded(true);
  }

  expand(members) {
    for (const member of members.slice(0, 1000)) this.expanded.add(member);
    this.draw();
  }

  // --- updates

  async follow() {
    let pause = 500;
    while (!this.stopped.signal.aborted) {
      try {
        for await (const message of stream(ofTask("stream", this.taskId), this.stopped.signal)) {
          pause = 500;
          this.setConnected(true);
          this.take(message);
        }
        if (this.stopped.signal.aborted) return;
        this.state.server = null; // what follows must be whole
        await new Promise((resolve) => setTimeout(resolve, SHORTEST_PAUSE_MS));
      } catch (error) {
        if (this.stopped.signal.aborted) return;
        this.setConnected(false, error.name === "AbortError" ? "the server is silent" : error.message);
        if (error instanceof ApiError && (error.status === 401 || error.status === 403 || error.status === 404)) {
          this.gone = error;
          return;
        }
        this.state.server = null;
        await new Promise((resolve) => setTimeout(resolve, pause));
        pause = Math.min(LONGEST_PAUSE_MS, pause * 2);
      }
    }
  }

  take(message) {
    const { task: before, origin } = this.state;
    const changed = this.state.take(message);
    if (changed === null) return;
    const isOther = before !== null && message.origin !== origin;
    if (isOther || message.count && message.count !== this.structure.nodes.length) this.refreshStructure();
    this.graph.update(this.state.rows, message.whole ? null : changed);
    if (this.query.get("hide") === "1") this.graph.hideEnded(true);
    this.showHeadline();
    if (this.view === "list") this.listNodes();
    if (this.selected !== null && (message.whole || changed.includes(this.selected))) this.panel.update(this.described(this.selected), this.now);
    if (!before || before.status !== this.state.task.status || changed.length) this.actions.update();
    this.attemptsStale = true;
    this.variablesStale = true;
  }

  async refreshStructure() {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      this.adopt(await get(ofTask("graph", this.taskId), this.stopped.signal));
      await this.draw();
    } catch { /* the next update tries again */ } finally {
      this.refreshing = false;
    }
  }

  setConnected(connected, why = "") {
    if (connected === this.connected) return;
    this.connected = connected;
    this.lostAt = connected ? null : Date.now() / 1000;
    this.lostWhy = why;
    document.body.classList.toggle("lost", !connected);
    byId("connection").textContent = connected ? "live" : `not live since ${clock(this.lostAt)}: ${why}`;
  }

  // Clocks stand still without a connection, or while the server cannot read: nobody knows what happens meanwhile.
  get now() {
    if (this.state.problem) return this.state.at;
    return (this.lostAt ?? Date.now() / 1000) + this.state.ahead;
  }

  tick() {
    if (!this.state.task || !this.connected) return;
    this.showHeadline();
    if (this.selected !== null) this.panel.tick(this.described(this.selected), this.now);
    if (this.view === "timeline") this.timeline.show(this.shownAttempts(), this.now);
    if (this.view === "variables" && this.variablesStale) this.loadVariables();
  }

  showHeadline() {
    const { task, rows, problem, at } = this.state;
    const counts = new Map();
    for (const row of rows) counts.set(row.status, (counts.get(row.status) || 0) + 1);
    const seconds = task.seconds === null ? null : task.seconds + (task.closed ? 0 : Math.max(0, this.now - at));
    const waiting = rows.filter((row) => row.awaits_decision);
    replace(this.headline,
      h("p", { class: "summary" },
        h("span", { class: `status ${task.status}` }, `${symbolOf(task.status)} ${STATUSES[task.status]?.word || task.status}`),
        h("span", {}, task.closed ? `took ${duration(seconds)}` : `for ${duration(seconds)}`),
        [...counts].map(([status, count]) => h("span", { class: `count ${status}` }, `${symbolOf(status)} ${count.toLocaleString()} ${STATUSES[status]?.word || status}`)),
        task.source === "document" && !task.closed && h("span", { class: "note" }, "from the document: no engine responds")),
      task.reason && h("p", { class: "reason" }, task.reason),
      task.paused?.length ? h("p", { class: "paused" }, `‖ paused: ${task.paused.join("; ")}`) : null,
      waiting.length ? h("p", { class: "decides" }, `◆ ${waiting.length === 1 ? "one node waits" : `${waiting.length} nodes wait`} for a decision: `,
        waiting.slice(0, 5).map((row, place) => [place ? ", " : "", h("button", { class: "link", onclick: () => this.select(this.places.get(row.node_id)) }, row.node_id)]),
        waiting.length > 5 && `, and ${waiting.length - 5} more`) : null,
      problem && h("p", { class: "reason", role: "alert" }, `Not live since ${clock(at)}: ${problem}`));
  }

  // --- attempts

  async followAttempts() {
    this.attemptsStale = true;
    while (!this.stopped.signal.aborted) {
      if (this.attemptsStale && (this.view === "timeline" || this.selected !== null)) {
        this.attemptsStale = false;
        try {
          const { attempts, complete } = await get(ofTask("attempts", this.taskId), this.stopped.signal);
          this.attempts = attempts;
          this.complete = complete;
          this.showAttempts();
          if (this.selected !== null) this.panel.showAttempts(this.attemptsOf(this.selected), complete);
        } catch (error) {
          if (error.name === "AbortError") return;
          this.attemptsStale = true;
        }
      }
      await new Promise((resolve) => setTimeout(resolve, ATTEMPTS_MS));
    }
  }

  shownAttempts() {
    const hide = this.query.get("hide") === "1";
    return (this.attempts || []).filter((each) => !hide || each.outcome !== "finished");
  }

  showAttempts() {
    if (this.view === "timeline") this.timeline.show(this.shownAttempts(), this.now);
  }

  attemptsOf(index) {
    const id = this.structure.nodes[index].node_id;
    return (this.attempts || []).filter((each) => each.node_id === id);
  }

  // --- nodes

  // The state of a node. A queued one for which the server knows no other reason waits for parents.
  described(index) {
    const row = this.state.rows[index];
    if (!row || row.status !== "queued" || row.waits_for) return row;
    const open = (this.parents[index] || []).filter((parent) => !ENDED.has(this.state.rows[parent]?.status));
    if (!open.length) return row;
    const names = open.slice(0, 3).map((parent) => this.structure.nodes[parent].node_id).join(", ");
    return { ...row, waits_for: open.length > 3 ? `${names} and ${(open.length - 3).toLocaleString()} more` : names };
  }

  listNodes() {
    const hide = this.query.get("hide") === "1";
    const rows = this.structure ? this.structure.nodes.map((node, index) => [node, index, this.described(index)]) : [];
    const wanted = rows.filter(([, , row]) => !hide || !row || !ENDED.has(row.status));
    const order = { failed: 0, running: 1, cancelling: 1, deferred: 2, queued: 3 };
    const sorted = wanted.length > LISTED ? wanted.sort((a, b) => (order[a[2]?.status] ?? 4) - (order[b[2]?.status] ?? 4)) : wanted;
    replace(this.nodeList,
      h("table", { class: "nodes" },
        h("thead", {}, h("tr", {}, ["status", "node", "role", "attempt", "batches", "time", "what it does or waits for"].map((each) => h("th", { scope: "col" }, each)))),
        h("tbody", {}, sorted.slice(0, LISTED).map(([node, index, row]) => h("tr", {},
          h("td", {}, h("span", { class: `status ${row?.status || "queued"}` }, `${symbolOf(row?.status)} ${STATUSES[row?.status]?.word || ""}`)),
          h("td", {}, h("button", { class: "link", onclick: () => this.select(index) }, node.node_id)),
          h("td", {}, node.function ? `${node.role} ${node.function}` : node.role),
          h("td", { class: "number" }, row?.attempt || ""),
          h("td", { class: "number" }, row?.batches?.toLocaleString() || ""),
          h("td", { class: "number" }, duration(row?.seconds)),
          h("td", {}, sentenceOf(row, this.now)))))),
      wanted.length > LISTED && h("p", { class: "note" }, `${(wanted.length - LISTED).toLocaleString()} more nodes; use Find to open one.`));
  }

  find(id) {
    const exact = this.places.get(id);
    const index = exact ?? this.structure.nodes.findIndex((node) => node.node_id.includes(id));
    if (index >= 0) this.select(index);
  }

  select(index) {
    this.selected = index;
    const node = this.structure.nodes[index];
    this.keep({ node: node.node_id });
    if (this.graph.groups?.[this.graph.groupAt.get(index)]?.length > 1) this.expand([index]);
    this.graph.select(index);
    this.panel.open(node, this.described(index), this.now);
    if (this.attempts) this.panel.showAttempts(this.attemptsOf(index), this.complete);
    this.attemptsStale = true;
  }

  deselect() {
    this.selected = null;
    this.keep({ node: null });
    this.graph.select(-1);
  }

  hide(on) {
    this.query.set("hide", on ? "1" : "0");
    this.graph.hideEnded(on);
    this.listNodes();
    this.showAttempts();
  }

  stop() {
    this.stopped.abort();
    clearInterval(this.timer);
    this.graph.close();
    byId("connection").textContent = "";
    document.body.classList.remove("lost");
  }
}

function values(title, given) {
  const entries = Object.entries(given || {}).sort(([a], [b]) => (a < b ? -1 : 1));
  return [h("h3", {}, title), entries.length
    ? h("table", {}, h("tbody", {}, entries.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, h("code", {}, JSON.stringify(value)))))))
    : h("p", { class: "note" }, "none")];
}

function legend() {
  const edges = { plain: "starts when the other has finished", streaming: "starts on its first batch", conditional: "a condition decides", success: "after success", failure: "after a failure", "not-taken": "not taken" };
  return h("div", {},
    h("ul", {}, Object.entries(STATUSES).map(([status, { symbol, word }]) => h("li", {}, h("span", { class: `status ${status}` }, `${symbol} ${word}`)))),
    h("ul", {}, Object.entries(edges).map(([kind, text]) => h("li", {}, h("span", { class: `swatch ${kind}` }), `${kind.replace("-", " ")}: ${text}`))));
}
