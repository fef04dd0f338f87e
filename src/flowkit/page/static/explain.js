// Where the time of a task went. It is read when someone asks for it, and never by itself: each read costs Temporal a history.

import { get, ofTask } from "./api.js";
import { h, replace } from "./dom.js";
import { clock, duration, percent, STATUSES, symbolOf, totalOf } from "./words.js";

export const PARTS = {
  work: "work",
  failed_work: "failed attempts",
  queue: "queue",
  retry_waits: "retry waits",
  slots: "slots",
  people: "people",
  scheduled: "delays and prerequisites",
  database_and_temporal: "database and Temporal",
};
const MOST_LEGS = 25; // Rows of the critical path. Of a longer one, the shortest legs are left out.
const LEAST_SHARE = 0.01; // Smallest share of a leg that its row names.

// Return {nodes, shares}: the ids on the critical path in its order, and by id the share of the time of the task.
export function pathOf({ path, seconds }) {
  const nodes = [];
  const shares = new Map();
  for (const { node_id: id, since, until } of path) {
    if (id === null) continue;
    if (nodes[nodes.length - 1] !== id) nodes.push(id);
    shares.set(id, (shares.get(id) || 0) + (seconds ? (until - since) / seconds : 0));
  }
  return { nodes, shares };
}

// Return the legs that are shown, in their order, and those that are not.
export function longest(path) {
  if (path.length <= MOST_LEGS) return { shown: path, hidden: [] };
  const seconds = (leg) => leg.until - leg.since;
  const kept = new Set([...path].sort((a, b) => seconds(b) - seconds(a)).slice(0, MOST_LEGS));
  return { shown: path.filter((leg) => kept.has(leg)), hidden: path.filter((leg) => !kept.has(leg)) };
}

export class Explanation {
  // `onSelect(id)` opens a node, `isKnown(id)` says whether there is one, and `onRead()` follows each read.
  constructor(container, taskId, signal, { onSelect, isKnown, onRead }) {
    Object.assign(this, { container, taskId, signal, onSelect, isKnown, onRead });
    this.found = null;
  }

  // Read it if it is not known, or if it may be another one since: the task had not ended.
  async open() {
    if (!this.found || this.found.open) await this.read();
  }

  forget() {
    this.found = null;
  }

  // Read it. Calls while a read runs wait for that one.
  read() {
    this.reading ??= this.fetch().finally(() => { this.reading = null; });
    return this.reading;
  }

  async fetch() {
    if (!this.found) replace(this.container, h("p", { class: "note", role: "status" }, "reading the history of the task…"));
    try {
      this.found = await get(ofTask("explanation", this.taskId), this.signal);
      this.show();
    } catch (error) {
      if (error.name === "AbortError") return;
      replace(this.container, h("p", { class: "reason", role: "alert" }, error.message), this.again("Try again"));
      this.found = null;
    }
    this.onRead();
  }

  again(label) {
    return h("button", { type: "button", "data-key": "refresh", onclick: () => this.read() }, label);
  }

  show() {
    const { found } = this;
    const all = totalOf(found);
    const focused = this.container.contains(document.activeElement) && document.activeElement.dataset.key;
    replace(this.container,
      h("p", { class: "summary" },
        h("span", { class: `status ${found.status}` }, `${symbolOf(found.status)} ${STATUSES[found.status]?.word || found.status}`),
        h("span", {}, `${all && "latest run "}${found.open ? "for" : "took"} ${duration(found.seconds)}`),
        all && h("span", { class: "note" }, all),
        found.open && [h("span", { class: "note" }, `as of ${clock(found.read_at)}`), this.again("Refresh")]),
      found.reason && h("p", { class: "reason" }, found.reason),
      found.set_aside.map((each) => h("p", { class: "sentence" }, each)),
      found.waits_for && [h("h3", {}, "What it waits for"), h("p", { class: "sentence" }, this.linked(found.waits_for))],
      h("h3", {}, "Where the time went"), ...partsOf(found),
      found.path.some((leg) => leg.node_id !== null) && [h("h3", {}, "Critical path"), this.legs(found)],
      found.speed_ups.length > 0 && [h("h3", {}, "Speed up first"), this.speedUps(found)],
      found.missing.length > 0 && [h("h3", {}, "What is missing"), h("ul", {}, found.missing.map((each) => h("li", {}, each)))]);
    if (focused) this.container.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  node(id) {
    return this.isKnown(id) ? h("button", { type: "button", class: "link", "data-key": `node ${id}`, onclick: () => this.onSelect(id) }, id) : id;
  }

  // The sentences name nodes as "Node ID is STATUS".
  linked(text) {
    return text.split(/(?<=(?:^|\. )Node )(\S+)(?= is )/).map((part, place) => (place % 2 ? this.node(part) : part));
  }

  legs({ path }) {
    const { shown, hidden } = longest(path);
    const rest = hidden.reduce((sum, leg) => sum + leg.until - leg.since, 0);
    return table(["node", "from", "time", "spent on"],
      shown.map((leg) => [leg.node_id === null ? "no node" : this.node(leg.node_id), duration(leg.since), duration(leg.until - leg.since), spentOn(leg)])
        .concat(hidden.length ? [[`${hidden.length.toLocaleString()} more, shorter ones`, "", duration(rest), ""]] : []));
  }

  speedUps({ speed_ups: found }) {
    return table(["node", "gains at most", "its attempts took"], found.map((each) => [this.node(each.node_id), duration(each.gain), duration(each.work)]));
  }
}

function spentOn({ parts, since, until }) {
  return Object.entries(parts)
    .sort((a, b) => b[1] - a[1])
    .filter(([, seconds]) => seconds >= (until - since) * LEAST_SHARE)
    .map(([part, seconds]) => `${PARTS[part] || part} ${duration(seconds)}`)
    .join(", ");
}

// The bar repeats what the table says.
function partsOf({ parts, seconds }) {
  const found = Object.entries(parts).filter(([, each]) => each > 0);
  const bar = h("div", { class: "parts-bar", "aria-hidden": "true" }, found.map(([part, each]) => {
    const piece = h("span", { class: `part ${part}`, title: `${PARTS[part] || part}: ${duration(each)}` });
    piece.style.flexGrow = String(each);
    return piece;
  }));
  const rows = found.map(([part, each]) => [[h("span", { class: `part ${part}`, "aria-hidden": "true" }), PARTS[part] || part], duration(each), percent(seconds ? each / seconds : 0)]);
  return [bar, table(["part", "time", "share"], rows)];
}

const NUMBERS = new Set(["time", "share", "from", "gains at most", "its attempts took"]);

function table(heads, rows) {
  const kind = (head) => (NUMBERS.has(head) ? "number" : head === "spent on" ? "what" : "id");
  return h("table", { class: "explained" },
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: NUMBERS.has(head) && "number" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, place) => h("td", { class: kind(heads[place]) }, cell))))));
}
