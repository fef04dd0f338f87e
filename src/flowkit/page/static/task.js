// The page of one task: its graph or list of nodes, the timeline of attempts, the selected node, and the actions.

import { ApiError, get, ofTask, stream } from "./api.js";
import { ActionBar, noteChange } from "./actions.js";
import { byId, copyButton, h, replace, setText, setTitle, toast, update } from "./dom.js";
import { Explanation, pathOf } from "./explain.js";
import { GraphPicture } from "./graph.js";
import { collapse, isLarge } from "./groups.js";
import { NodePanel } from "./panel.js";
import { TaskState } from "./state.js";
import { Timeline } from "./timeline.js";
import { clock, duration, ENDED, percent, sentenceOf, STATUSES, symbolOf, totalOf } from "./words.js";

const ATTEMPTS_MS = 2000;
const TICK_MS = 1000;
const SHORTEST_PAUSE_MS = 200; // between two streams, of which the first was complete
const SHORTEST_RETRY_MS = 500;
const LONGEST_PAUSE_MS = 10_000;
const LISTED = 500;

export class TaskPage {
  // `keep` changes the address, and `onRefused(error)` follows when the token is no longer valid.
  constructor(main, taskId, query, session, keep, onRefused) {
    this.main = main;
    this.taskId = taskId;
    this.query = query;
    this.session = session;
    this.keep = keep;
    this.onRefused = onRefused;
    this.state = new TaskState();
    this.expanded = new Set();
    this.selected = null;
    this.connected = null;
    this.lostAt = null;
    this.stopped = new AbortController();
  }

  // Show the task, whose structure is on its way.
  async start(structure) {
    this.frame();
    this.follow();
    this.adopt(await structure);
    if (this.stopped.signal.aborted) return;
    this.timer = setInterval(() => this.tick(), TICK_MS);
    this.followAttempts();
    const wanted = this.query.get("node");
    const chosen = this.places.get(wanted);
    if (chosen !== undefined) this.expanded.add(chosen);
    else if (wanted) toast(`The task has no node “${wanted}”.`, "error");
    const drawing = this.draw();
    if (chosen !== undefined) this.select(chosen);
    this.showAgain();
    await drawing;
  }

  // Show what was read before the structure, or with another one.
  showAgain() {
    if (this.state.task) this.show(null);
    if (this.view === "variables") this.loadVariables();
    if (this.view === "list") this.listNodes();
    if (this.explanation.found) this.explanation.show();
    else if (this.view === "explain" || this.query.get("path") === "1") this.explanation.read();
    this.showPath();
  }

  adopt(structure) {
    this.structure = structure;
    this.places = new Map(structure.nodes.map((node, index) => [node.node_id, index]));
    this.parents = [];
    for (const [from, to] of structure.edges) (this.parents[to] ||= []).push(from);
    this.large = isLarge(structure.nodes, structure.edges);
    this.showTitle();
    update(this.about,
      [["graph", structure.name], ["queue", structure.queue], ["namespace", this.session.namespace], ["database", this.session.database]]
        .map(([label, text]) => text && h("span", {}, `${label} `, h("b", {}, text))));
    const link = this.session.web_ui && structure.run_id
      ? `${this.session.web_ui}/namespaces/${encodeURIComponent(this.session.namespace)}/workflows/${encodeURIComponent(this.taskId)}/${structure.run_id}`
      : null;
    replace(this.links, link && h("a", { href: link, target: "_blank", rel: "noopener" }, "Temporal Web UI ↗"));
  }

  frame() {
    this.headline = h("div", { class: "headline" });
    this.links = h("span", { class: "links" });
    this.about = h("p", { class: "about note" });
    this.picture = h("div", { class: "picture" });
    this.listRows = h("tbody", {});
    this.listNote = h("p", { class: "note" });
    this.nodeList = h("div", { class: "node-list", role: "region", tabindex: "0", "aria-label": "Nodes" },
      h("table", { class: "nodes" },
        h("thead", {}, h("tr", {}, ["status", "node", "role", "attempt", "batches", "time"].map((each) => h("th", { scope: "col" }, each)),
          this.shareHead = h("th", { scope: "col", hidden: true }, "share"),
          h("th", { scope: "col" }, "what it does or waits for"))),
        this.listRows),
      this.listNote);
    this.side = h("aside", { class: "side", "aria-label": "Selected node" });
    this.timelineBox = h("div", { class: "timeline-box" });
    this.variables = h("div", { class: "node-list", role: "region", tabindex: "0", "aria-label": "Variables" }, h("p", { class: "note" }, "loading…"));
    this.explainBox = h("div", { class: "node-list explanation", role: "region", tabindex: "0", "aria-label": "Explanation" });
    this.explanation = new Explanation(this.explainBox, this.taskId, this.stopped.signal, {
      onSelect: (id) => this.choose(this.places.get(id)), isKnown: (id) => Boolean(this.places?.has(id)), onRead: () => this.showPath(),
    });
    this.actions = new ActionBar(this.taskId, this.session, () => this.state, () => ({ params: this.structure?.params }));
    const tab = (name, label) => h("button", { type: "button", "data-view": name, onclick: () => { this.address({ view: name === "graph" ? null : name }, true); this.showView(name); } }, label);
    this.tabs = h("div", { class: "choices", role: "group", "aria-label": "View" }, tab("graph", "Graph"), tab("list", "List"), tab("timeline", "Timeline"), tab("explain", "Explain"), tab("variables", "Variables"));
    const find = h("input", { type: "search", list: "node-ids", placeholder: "node id", onchange: (event) => this.find(event.target.value) });
    this.ids = h("datalist", { id: "node-ids" });
    this.toggles = new Map();
    const toggle = (name, label, change) => {
      const input = h("input", { type: "checkbox", checked: this.query.get(name) === "1", onchange: () => { this.address({ [name]: input.checked ? "1" : null }); change(input.checked); } });
      this.toggles.set(name, { input, change });
      return h("label", { class: "toggle" }, input, label);
    };
    this.tools = h("div", { class: "tools" },
      this.tabs, h("label", {}, "Find", find), this.ids,
      toggle("hide", "hide what has finished", (on) => this.hide(on)),
      toggle("path", "critical path", (on) => (on ? this.explanation.open() : this.showPath())),
      this.idle = toggle("idle", "show idle time", (on) => { this.timeline.collapsed = !on; this.showAttempts(); }),
      this.zoom = h("span", { class: "zoom" },
        h("button", { type: "button", "aria-label": "Zoom in", onclick: () => this.graph?.zoom(1.25) }, "+"),
        h("button", { type: "button", "aria-label": "Zoom out", onclick: () => this.graph?.zoom(0.8) }, "−"),
        h("button", { type: "button", onclick: () => this.graph?.fit() }, "Fit"),
        this.collapseButton = h("button", { type: "button", hidden: true, onclick: () => { this.expanded.clear(); this.draw(); } }, "Collapse")),
      h("details", { class: "legend" }, h("summary", {}, "Legend"), legend()));
    replace(this.main,
      h("div", { class: "title" }, h("h1", {}, this.taskId), copyButton(this.taskId, "the id of the task"), this.links),
      this.about, this.headline, this.actions.element, this.tools,
      h("div", { class: "columns" }, h("div", { class: "stage" }, this.picture, this.nodeList, this.timelineBox, this.explainBox, this.variables), this.side));
    this.graph = new GraphPicture(this.picture, { onSelect: (index) => this.choose(index), onExpand: (members) => this.expand(members) });
    this.timeline = new Timeline(this.timelineBox, (node) => this.places.has(node) && this.choose(this.places.get(node)));
    this.timeline.collapsed = this.query.get("idle") !== "1";
    this.panel = new NodePanel(this.side, this.taskId, this.session, () => { this.address({ node: null }, true); this.leaveNode(); });
    this.showView(this.query.get("view"));
    addEventListener("visibilitychange", () => this.showHidden(), { signal: this.stopped.signal });
  }

  // Note changes in the address. A step is one from which the browser leads back.
  address(changes, step = false) {
    this.query = this.keep(changes, step);
    return this.query;
  }

  // Show what another address of this task has. Return false if it is not one.
  go(query) {
    if (query.get("task") !== this.taskId || !this.structure) return false;
    this.query = query;
    this.showView(query.get("view"));
    for (const [name, { input, change }] of this.toggles) {
      const on = query.get(name) === "1";
      if (input.checked !== on) change((input.checked = on));
    }
    const index = this.places.get(query.get("node"));
    if (index === undefined) {
      this.panel.empty();
      this.deselect();
    } else if (index !== this.selected) this.select(index);
    return true;
  }

  showTitle() {
    const { task } = this.state;
    setTitle(`${task ? `${symbolOf(task.status)} ` : ""}${this.structure?.name || this.taskId} – FlowKit`);
  }

  // Show a view; the graph if there is none of this name.
  showView(wanted) {
    const name = [...this.tabs.children].some((button) => button.dataset.view === wanted) ? wanted : "graph";
    this.view = name;
    for (const button of this.tabs.children) button.setAttribute("aria-pressed", String(button.dataset.view === name));
    this.picture.hidden = this.zoom.hidden = name !== "graph";
    this.idle.hidden = name !== "timeline";
    this.nodeList.hidden = name !== "list";
    this.timelineBox.hidden = name !== "timeline";
    this.explainBox.hidden = name !== "explain";
    this.variables.hidden = name !== "variables";
    if (name === "explain") this.explanation.open();
    if (name === "variables") this.loadVariables();
    if (name === "list") this.listNodes();
    if (name === "timeline") {
      this.showAttempts();
      this.attemptsStale = true;
      this.wake?.();
    }
    if (name === "graph") requestAnimationFrame(() => this.graph.placed && this.graph.fit());
  }

  async loadVariables() {
    this.variablesStale = false;
    try {
      const { variables } = await get(ofTask("variables", this.taskId), this.stopped.signal);
      update(this.variables, values("Params", this.structure?.params), values("Variables", variables));
    } catch (error) {
      if (error.name !== "AbortError") update(this.variables, h("p", { class: "note" }, error.message));
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
    this.unplaced?.remove();
    if (problem) {
      this.tools.after((this.unplaced = h("p", { class: "reason", role: "alert" }, `The graph cannot be drawn (${problem}). The list has all nodes.`)));
      if (this.view === "graph") this.showView("list");
    }
    if (this.state.task) this.graph.update(this.state.rows, null);
    if (this.query.get("hide") === "1") this.graph.hideEnded(true);
  }

  // Show the critical path in the graph and the list, if that is wanted and an explanation has been read.
  showPath() {
    const { found } = this.explanation;
    if (!this.structure) return;
    const path = this.query.get("path") === "1" && found ? pathOf(found) : null;
    this.shares = path?.shares ?? null;
    this.shareHead.hidden = !path;
    const placed = (ids) => ids.map((id) => this.places.get(id)).filter((index) => index !== undefined);
    this.graph.markPath(path && { nodes: placed(path.nodes), shares: new Map([...path.shares].flatMap(([id, share]) => (this.places.has(id) ? [[this.places.get(id), share]] : []))) });
    this.listNodes();
  }

  expand(members) {
    for (const member of members.slice(0, 1000)) this.expanded.add(member);
    this.draw();
  }

  // --- updates

  async follow() {
    let pause = SHORTEST_RETRY_MS;
    while (!this.stopped.signal.aborted) {
      try {
        let empty = true;
        for await (const message of stream(ofTask("stream", this.taskId), this.stopped.signal)) {
          empty = false;
          pause = SHORTEST_RETRY_MS;
          this.setConnected(true);
          this.take(message);
        }
        if (this.stopped.signal.aborted) return;
        if (empty) throw new ApiError(0, "unreachable", "the server ends the updates at once");
        this.state.server = null; // what follows must be whole
        await new Promise((resolve) => setTimeout(resolve, SHORTEST_PAUSE_MS));
      } catch (error) {
        if (this.stopped.signal.aborted) return;
        this.setConnected(false, error.name === "AbortError" ? "the server is silent" : error.message);
        if (error.status === 401) this.onRefused(error);
        if (error.status === 401 || error.status === 403 || error.status === 404) return;
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
    noteChange();
    if (!this.structure) return;
    const isOther = before !== null && message.origin !== origin;
    const runsAgain = before?.closed && !this.state.task.closed;
    const isMore = message.count && message.count !== this.structure.nodes.length;
    const isRenamed = changed.some((index) => this.state.rows[index].node_id !== this.structure.nodes[index]?.node_id);
    if (isOther || runsAgain || isMore || isRenamed) this.structureStale = true;
    if (this.structureStale) this.refreshStructure();
    this.attemptsStale = true;
    this.variablesStale = true;
    if (before?.status !== this.state.task.status) this.showTitle();
    this.showConnection();
    if (document.hidden) this.stale = true;
    else this.show(message.whole ? null : changed);
  }

  // Show the state. `changed` are positions of nodes; null means all.
  show(changed) {
    this.graph.update(this.state.rows, changed);
    if (this.query.get("hide") === "1") this.graph.hideEnded(true);
    this.showHeadline();
    if (this.view === "list") this.listNodes();
    if (this.selected !== null && (changed === null || changed.includes(this.selected))) this.panel.update(this.described(this.selected), this.now);
    this.actions.update();
  }

  // A page in the background takes states without drawing them, and draws the last one when it is seen again.
  showHidden() {
    if (document.hidden || !this.stale) return;
    this.stale = false;
    this.show(null);
    this.wake?.();
  }

  // Read the structure again. The selected node may have another place then, or none.
  async refreshStructure() {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      const structure = await get(ofTask("graph", this.taskId), this.stopped.signal);
      this.structureStale = false;
      const node = this.selected === null ? null : this.structure.nodes[this.selected].node_id;
      this.adopt(structure);
      this.reselect(node);
      this.explanation.forget();
      const drawing = this.draw();
      this.showAgain();
      await drawing;
    } catch { /* the next update or second tries again */ } finally {
      this.refreshing = false;
    }
  }

  reselect(node) {
    this.expanded.clear();
    this.attempts = null;
    this.selected = this.places.get(node) ?? null;
    this.graph.chosen = this.selected ?? -1;
    if (this.selected !== null) {
      this.expanded.add(this.selected);
      this.panel.open(this.structure.nodes[this.selected], this.described(this.selected), this.now);
    } else if (node !== null) {
      toast(`The task has no node “${node}” any more.`);
      this.address({ node: null });
      this.panel.empty();
    }
  }

  setConnected(connected, why = "") {
    if (connected === this.connected) return;
    this.connected = connected;
    this.lostAt = connected ? null : Date.now() / 1000;
    this.lostWhy = why;
    this.showConnection();
  }

  // A connection to a server that cannot read the state shows nothing live either; the headline says why.
  showConnection() {
    const problem = this.connected && this.state.problem;
    const text = this.connected ? "live" : `not live since ${clock(this.lostAt)}: ${this.lostWhy}`;
    document.body.classList.toggle("lost", !this.connected || Boolean(problem));
    const shown = problem ? "not live" : text;
    if (byId("connection").textContent !== shown) setText(byId("connection"), shown);
  }

  // Clocks stand still without a connection, or while the server cannot read: nobody knows what happens meanwhile.
  get now() {
    if (this.state.problem) return this.state.at;
    return (this.lostAt ?? Date.now() / 1000) + this.state.ahead;
  }

  tick() {
    if (!this.state.task || !this.connected || document.hidden) return;
    if (this.structureStale) this.refreshStructure();
    this.showHeadline();
    if (this.selected !== null) this.panel.tick(this.described(this.selected), this.now);
    this.showAttempts();
    if (this.view === "variables" && this.variablesStale) this.loadVariables();
  }

  showHeadline() {
    const { task, rows, problem, at } = this.state;
    const counts = new Map();
    for (const row of rows.filter(Boolean)) counts.set(row.status, (counts.get(row.status) || 0) + 1);
    const since = task.closed ? 0 : Math.max(0, this.now - at);
    const [seconds, total] = [task.seconds, task.total_seconds].map((each) => (each === null ? null : each + since));
    const all = totalOf({ seconds, total_seconds: total });
    const latest = all ? "latest run " : "";
    const waiting = rows.filter((row) => row?.awaits_decision);
    const aside = rows.reduce((sum, row) => sum + (row?.failed_batches || 0), 0);
    update(this.headline,
      h("p", { class: "summary" },
        h("span", { class: `status ${task.status}` }, `${symbolOf(task.status)} ${STATUSES[task.status]?.word || task.status}`),
        seconds !== null && h("span", {}, `${latest}${task.closed ? "took" : "for"} ${duration(seconds)}`),
        all && h("span", { class: "note" }, all),
        [...counts].map(([status, count]) => h("span", { class: `count ${status}` }, `${symbolOf(status)} ${count.toLocaleString()} ${STATUSES[status]?.word || status}`)),
        aside > 0 && h("span", { class: "count aside" }, `⊟ ${aside.toLocaleString()} ${aside === 1 ? "batch" : "batches"} set aside`),
        task.source === "document" && !task.closed && h("span", { class: "note" }, "from the document: no engine responds")),
      task.reason && h("p", { class: "reason" }, task.reason),
      task.paused?.length ? h("p", { class: "paused" }, `‖ paused: ${task.paused.join("; ")}`) : null,
      waiting.length ? h("p", { class: "decides" }, `◆ ${waiting.length === 1 ? "one node waits" : `${waiting.length} nodes wait`} for a decision: `,
        waiting.slice(0, 5).map((row, place) => [place ? ", " : "", h("button", { class: "link", "data-key": row.node_id, onclick: () => this.choose(this.places.get(row.node_id)) }, row.node_id)]),
        waiting.length > 5 && `, and ${waiting.length - 5} more`) : null,
      problem && h("p", { class: "reason", role: "alert" }, `Not live since ${clock(at)}: ${problem}`));
  }

  // --- attempts

  // Attempts are read when something has changed, for the timeline or for the selected node, and rarely if that takes long.
  async followAttempts() {
    this.attemptsStale = true;
    while (!this.stopped.signal.aborted) {
      const began = performance.now();
      const node = this.selected === null ? null : this.structure.nodes[this.selected].node_id;
      if (this.attemptsStale && !document.hidden && (this.view === "timeline" || node)) {
        this.attemptsStale = false;
        try {
          await this.loadAttempts(this.view === "timeline" ? null : node);
        } catch (error) {
          if (error.name === "AbortError") return;
          this.attemptsStale = true;
          if (node) this.panel.refuseAttempts(error.message);
          if (this.view === "timeline") this.timeline.refuse(error.message);
        }
      }
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, Math.max(ATTEMPTS_MS, 5 * (performance.now() - began)));
      });
    }
  }

  async loadAttempts(node) {
    const { attempts, complete } = await get(ofTask("attempts", this.taskId, node ? { node } : {}), this.stopped.signal);
    this.attempts = { node, list: attempts, complete };
    this.showAttempts();
    this.showNodeAttempts();
  }

  showAttempts() {
    if (this.view !== "timeline" || !this.attempts || this.attempts.node) return;
    const hide = this.query.get("hide") === "1";
    this.timeline.show(hide ? this.attempts.list.filter((each) => each.outcome !== "finished") : this.attempts.list, this.now);
  }

  showNodeAttempts() {
    if (this.selected === null || !this.attempts) return;
    const { node, list, complete } = this.attempts;
    const id = this.structure.nodes[this.selected].node_id;
    if (!node || node === id) this.panel.showAttempts(node ? list : list.filter((each) => each.node_id === id), complete);
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
    setText(this.listNote, wanted.length > LISTED
      ? `${(wanted.length - LISTED).toLocaleString()} more nodes; use Find to open one.`
      : wanted.length || !this.structure ? "" : "All nodes have finished.");
    update(this.listRows, sorted.slice(0, LISTED).map(([node, , row]) => h("tr", {},
      h("td", {}, h("span", { class: `status ${row?.status || "queued"}` }, `${symbolOf(row?.status)} ${STATUSES[row?.status]?.word || ""}`)),
      h("td", { class: "id" }, h("button", { class: "link", "data-key": node.node_id, onclick: () => this.choose(this.places.get(node.node_id)) }, node.node_id)),
      h("td", {}, node.function ? `${node.role} ${node.function}` : node.role),
      h("td", { class: "number" }, row?.attempt || ""),
      h("td", { class: "number" }, row?.batches?.toLocaleString() || ""),
      h("td", { class: "number" }, duration(row?.seconds)),
      this.shares && h("td", { class: "number" }, this.shares.has(node.node_id) && `★ ${percent(this.shares.get(node.node_id))}`),
      h("td", { class: "what" }, h("div", {}, sentenceOf(row, this.now))))));
  }

  find(id) {
    if (!id || !this.structure) return;
    const exact = this.places.get(id);
    const index = exact ?? this.structure.nodes.findIndex((node) => node.node_id.includes(id));
    if (index >= 0) this.choose(index);
    else toast(`No node has “${id}” in its id.`, "error");
  }

  // Select a node as a step of the user.
  choose(index) {
    this.address({ node: this.structure.nodes[index].node_id }, true);
    this.select(index);
  }

  select(index) {
    this.selected = index;
    const node = this.structure.nodes[index];
    if (this.graph.groups?.[this.graph.groupAt.get(index)]?.length > 1) this.expand([index]);
    this.graph.select(index);
    this.panel.open(node, this.described(index), this.now);
    this.showNodeAttempts();
    this.attemptsStale = true;
    this.wake?.();
  }

  // Close the panel, and put the focus where the node is shown.
  leaveNode() {
    const node = this.structure.nodes[this.selected];
    const index = this.selected;
    this.deselect();
    if (this.view === "graph") this.graph.focus(index);
    else this.main.querySelector(`.stage [data-key="${CSS.escape(node.node_id)}"]`)?.focus();
  }

  deselect() {
    this.selected = null;
    this.graph.select(-1);
  }

  hide(on) {
    this.graph.hideEnded(on);
    this.listNodes();
    this.showAttempts();
  }

  stop() {
    this.stopped.abort();
    clearInterval(this.timer);
    this.graph.close();
    this.actions.stop();
    this.panel.empty();
    setText(byId("connection"), "");
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
  const edges = { plain: "starts when the other has finished", streaming: "starts on its first batch", conditional: "a condition decides", success: "after success", failure: "after a failure", "not-taken": "will not start its target", critical: "★ on the critical path, with the share of the time of the task" };
  return h("div", {},
    h("ul", {}, Object.entries(STATUSES).map(([status, { symbol, word }]) => h("li", {}, h("span", { class: `status ${status}` }, `${symbol} ${word}`)))),
    h("ul", {}, Object.entries(edges).map(([kind, text]) => h("li", {}, h("span", { class: `swatch ${kind}` }), `${kind.replace("-", " ")}: ${text}`))));
}
