// Draws a graph as SVG. The structure is drawn once; updates change classes and texts.

import { s, replace, setLabel, setText } from "./dom.js";
import { placing } from "./placing.js";
import { ENDED, percent, symbolOf } from "./words.js";

const HEIGHT = 44;
const CHAR = 7.2;
const SMALL_CHAR = 6.2;
const MIN_WIDTH = 120;
const MAX_CHARS = 32;
const ASIDE = 60; // Room for the number of batches that are set aside.
const READABLE = 0.35; // Below this scale, boxes show only their symbol.
const TINY = 0.12;
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, -1], ArrowDown: [1, 1] }; // an axis, and a direction on it
const SETTLED = ["failed", "cancelling", "running", "deferred", "queued", "cancelled", "skipped", "finished"];

// The end is cut between two characters, not within one.
const short = (text, most = MAX_CHARS) => (text.length > most ? `${text.slice(0, Math.max(0, most - 1)).replace(/[\uD800-\uDBFF]$/, "")}…` : text);

const titleOf = (nodes, members) => (members.length === 1 ? nodes[members[0]].node_id : `${members.length.toLocaleString()} × ${nodes[members[0]].role}`);

function widthOf(node, title, count, streams) {
  const below = count > 1 ? 24 : short(node.role).length + (streams ? 24 : 15);
  const aside = node.sets_aside ? ASIDE : 0;
  return Math.max(MIN_WIDTH, Math.round((short(title).length + 3) * CHAR) + 24 + aside, Math.round(below * SMALL_CHAR) + 24);
}

// The status of a group is the one of its nodes that needs most attention.
export function statusOf(rows) {
  const found = new Set(rows.map((row) => row.status));
  return SETTLED.find((status) => found.has(status)) || "queued";
}

export function countsOf(rows) {
  const counts = new Map();
  for (const row of rows) counts.set(row.status, (counts.get(row.status) || 0) + 1);
  return SETTLED.filter((status) => counts.has(status)).map((status) => [status, counts.get(status)]);
}

// Return the box to which an arrow key leads, as the picture shows it: the nearest one along the edges, or the next one of the
// same rank. Undefined if there is none.
export function neighbour(key, index, { placed, edges, sideways }) {
  const [axis, direction] = ARROWS[key];
  const along = sideways ? 0 : 1;
  const across = 1 - along;
  const from = placed.nodes[index];
  const ends = ([source, target]) => (direction > 0 ? [source, target] : [target, source]);
  const isBeside = (at) => Math.abs(at[along] - from[along]) < 1 && direction * (at[across] - from[across]) > 0;
  const found = axis === along
    ? edges.map(ends).filter(([begin]) => begin === index).map(([, end]) => end)
    : placed.nodes.flatMap((at, other) => (isBeside(at) ? [other] : []));
  const distance = (other) => Math.abs(placed.nodes[other][across] - from[across]);
  return found.sort((a, b) => distance(a) - distance(b))[0];
}

export class GraphPicture {
  // `onSelect(index)` opens a node, and `onExpand(members)` shows the nodes of a group.
  constructor(container, { onSelect, onExpand }) {
    this.container = container;
    this.onSelect = onSelect;
    this.onExpand = onExpand;
    this.boxes = [];
    this.groupAt = new Map();
    this.chosen = -1;
    this.reached = 0; // The node whose box the Tab key reaches; arrow keys lead to the others.
    this.view = { x: 0, y: 0, scale: 1 };
    this.size = { width: 0, height: 0 };
    this.svg = s("svg", { class: "graph", role: "group", "aria-label": "Graph of the task", tabindex: "-1" });
    this.layer = s("g", {});
    this.svg.append(arrowheads(), this.layer);
    replace(container, this.svg);
    container.classList.add("placing"); // until there is a graph
    this.listen();
  }

  // Draw `groups` (lists of positions in `nodes`) and the edges between them. Return why that fails, if it does.
  async draw(structure, groups, edges, sideways) {
    const streams = new Map();
    for (const [from, to, kind] of structure.edges) {
      if (kind !== "streaming") continue;
      if (!streams.has(to)) streams.set(to, []);
      streams.get(to).push(from);
    }
    const titles = groups.map((members) => titleOf(structure.nodes, members));
    const sizes = groups.map((members, index) => [widthOf(structure.nodes[members[0]], titles[index], members.length, streams.has(members[0])), HEIGHT]);
    this.container.classList.add("placing");
    const found = await placing.place({ sizes, edges, sideways });
    if (!found) return null;
    this.container.classList.remove("placing");
    if (found.error) return found.error;
    Object.assign(this, { nodes: structure.nodes, groups, edges, sideways, streams, titles, sizes, placed: found.placed });
    this.show();
    return null;
  }

  show() {
    const { placed, reached } = this;
    const hasFocus = this.layer.contains(document.activeElement);
    this.groupAt = new Map();
    const edges = this.edges.map(([from, to, kind], index) => edgeShape(placed.paths[index], kind));
    this.boxes = this.groups.map((members, index) => this.box(members, index, placed.nodes[index]));
    this.fit();
    replace(this.layer, s("g", { class: "edges", "aria-hidden": "true" }, edges), s("g", { class: "nodes" }, this.boxes.map((box) => box.element)));
    this.edgeShapes = edges;
    this.drawPath();
    if (this.rows) this.update(this.rows, null);
    if (this.chosen >= 0) this.select(this.chosen);
    this.reach(reached);
    if (hasFocus) this.focus(this.reached);
  }

  // Let the Tab key reach the box of a node, and no other box: the panel is one step away, whatever the size of the graph.
  reach(index) {
    const box = this.boxes[this.groupAt.get(index)] ?? this.boxes[0];
    if (!box) return;
    this.reachable?.setAttribute("tabindex", "-1");
    this.reachable = box.element;
    this.reachable.setAttribute("tabindex", "0");
    this.reached = box.members.includes(index) ? index : box.members[0];
  }

  box(members, index, [x, y]) {
    const [width, height] = this.sizes[index];
    const symbol = s("text", { class: "symbol", x: 10, y: 18 });
    const aside = s("text", { class: "aside-mark", x: width - 6, y: 18, "text-anchor": "end" });
    const tip = s("title", {});
    const element = s(
      "g",
      {
        class: "node queued",
        transform: `translate(${(x - width / 2).toFixed(1)} ${(y - height / 2).toFixed(1)})`,
        tabindex: "-1",
        role: "button",
        "data-group": index,
      },
      members.length > 1 ? s("rect", { class: "behind", x: 4, y: -4, width, height, rx: 6 }) : null,
      s("rect", { class: "body", width, height, rx: 6 }),
      symbol,
      aside,
    );
    for (const member of members) this.groupAt.set(member, index);
    // The tooltip exists only under the pointer: it would be a second text beside the label.
    element.addEventListener("pointerenter", () => element.prepend(tip));
    element.addEventListener("pointerleave", () => tip.remove());
    return { element, symbol, aside, tip, width, height, members, title: this.titles[index], share: null };
  }

  // Add the texts of a box. A box that is too small to read them, or out of view, has none.
  addTexts(box) {
    box.bar = s("rect", { class: "bar", x: 1, y: box.height - 4, width: 0, height: 3 });
    box.state = s("text", { class: "state", x: box.width - 8, y: 35, "text-anchor": "end" });
    const role = box.members.length > 1 ? "" : short(this.nodes[box.members[0]].role);
    // The blanks keep the words apart for programs that read them in a row.
    box.role = s("text", { class: "role", x: 10, y: 35 }, role);
    box.roleText = role;
    box.element.append(" ", s("text", { class: "name", x: 28, y: 18 }, short(box.title)), " ", box.role, " ", box.state, " ", box.aside, box.bar);
    if (this.rows) this.updateBox(box);
  }

  addVisibleTexts() {
    const { x: dx, y: dy, scale } = this.view;
    if (scale < READABLE) return;
    const [left, top] = [-dx / scale, -dy / scale];
    const [right, bottom] = [left + this.size.width / scale, top + this.size.height / scale];
    this.placed.nodes.forEach(([x, y], index) => {
      const box = this.boxes[index];
      const isOut = x + box.width / 2 < left || x - box.width / 2 > right || y + HEIGHT < top || y - HEIGHT > bottom;
      if (!box.state && !isOut) this.addTexts(box);
    });
  }

  open(index) {
    const { members } = this.boxes[index];
    this.reach(members[0]);
    if (members.length === 1) this.onSelect(members[0]);
    else this.onExpand(members);
  }

  // Show the states of nodes. `changed` are positions; null means all.
  update(rows, changed, batches = null) {
    this.rows = rows;
    if (!this.boxes.length) return;
    const groups = changed === null ? this.boxes.keys() : new Set(changed.map((index) => this.groupAt.get(index)));
    for (const index of groups) {
      if (index !== undefined) this.updateBox(this.boxes[index]);
    }
    this.updateEdges();
  }

  updateBox(box) {
    const rows = box.members.map((member) => this.rows[member]).filter(Boolean);
    if (!rows.length) return;
    const status = statusOf(rows);
    const decides = rows.some((row) => row.awaits_decision);
    box.element.setAttribute("class", `node ${status}${decides ? " decides" : ""}${box.selected ? " selected" : ""}${box.hidden ? " gone" : ""}${box.share === null ? "" : " on-path"}`);
    setText(box.symbol, decides ? "◆" : symbolOf(status));
    const counts = countsOf(rows);
    const [row] = rows;
    const single = box.members.length === 1;
    const above = single ? this.batchesAbove(box.members[0]) : 0;
    const aside = rows.reduce((sum, each) => sum + (each.failed_batches || 0), 0).toLocaleString();
    const parts = single ? [row.attempt > 1 ? `attempt ${row.attempt}` : "", batchesText(row, above)] : counts.map(([name, count]) => `${symbolOf(name)} ${count.toLocaleString()}`);
    const text = short(parts.filter(Boolean).join(single ? ", " : "  "), Math.floor((box.width - 16) / SMALL_CHAR));
    setText(box.aside, aside === "0" ? "" : `⊟ ${aside}`);
    const inWords = [...(single ? parts : counts.map(([name, count]) => `${count} ${name}`)), aside !== "0" && `${aside} set aside`].filter(Boolean);
    const words = [...(single ? [row.status] : []), ...inWords].join(", ");
    const path = box.share === null ? "" : `on the critical path, ${percent(box.share)} of the time`;
    setText(box.tip, [`${box.title}: ${words}`, single && (row.set_aside_text || row.note), path].filter(Boolean).join("\n"));
    const label = single ? [short(box.title), short(this.nodes[box.members[0]].role), ...inWords, row.status] : [box.title, words];
    setLabel(box.element, [...label, decides && "waits for a decision", path].filter(Boolean).join(", "));
    if (!box.state) return;
    setText(box.state, text);
    setText(box.role, short(box.roleText, Math.floor((box.width - 24) / SMALL_CHAR) - text.length));
    const done = rows.filter((each) => ENDED.has(each.status)).length / box.members.length;
    const part = single ? progressOf(row, above) : done;
    box.bar.setAttribute("width", String(Math.max(0, Math.min(1, part)) * (box.width - 2)));
  }

  // Mark the critical path: the positions of its nodes in its order, with shares of the time by position. Null removes it.
  markPath(path) {
    this.path = path;
    this.drawPath();
    if (this.rows) this.update(this.rows, null);
  }

  drawPath() {
    const { nodes = [], shares = new Map() } = this.path || {};
    const on = new Map();
    for (const [index, share] of shares) {
      const group = this.groupAt.get(index);
      if (group !== undefined) on.set(group, (on.get(group) || 0) + share);
    }
    this.boxes.forEach((box, place) => {
      box.share = on.get(place) ?? null;
      box.badge?.remove();
      box.badge = box.share === null ? null : badge(`★ ${percent(box.share)}`, box.width, box.members.length > 1 ? -20 : -14);
      if (box.badge) box.element.append(box.badge);
      box.element.classList.toggle("on-path", box.share !== null);
    });
    const steps = new Set(nodes.slice(1).map((index, place) => `${this.groupAt.get(nodes[place])} ${this.groupAt.get(index)}`));
    this.edges?.forEach(([from, to], index) => this.edgeShapes[index].classList.toggle("on-path", steps.has(`${from} ${to}`)));
  }

  // The batches of the nodes from which a node streams: how many it can have so far. 0 if it streams from none.
  batchesAbove(member) {
    return (this.streams?.get(member) || []).reduce((sum, parent) => sum + (this.rows[parent]?.batches || 0), 0);
  }

  updateEdges() {
    this.edges.forEach(([from, to], index) => {
      const target = this.groups[to].length === 1 ? this.rows[this.groups[to][0]] : null;
      const source = this.groups[from].length === 1 ? this.rows[this.groups[from][0]] : null;
      const gone = (target && target.status === "skipped") || (source && source.status === "skipped");
      this.edgeShapes[index].classList.toggle("not-taken", Boolean(gone));
    });
  }

  select(index) {
    this.chosen = index;
    const chosen = this.groupAt.get(index);
    this.boxes.forEach((box, place) => {
      box.selected = place === chosen;
      box.element.classList.toggle("selected", box.selected);
    });
    if (chosen === undefined) return;
    this.reach(index);
    this.reveal(chosen);
  }

  focus(index) {
    this.reach(index);
    this.boxes[this.groupAt.get(index)]?.element.focus();
  }

  hideEnded(hide) {
    for (const box of this.boxes) {
      const rows = box.members.map((member) => this.rows?.[member]).filter(Boolean);
      box.hidden = hide && rows.length > 0 && rows.every((row) => row.status === "finished" || row.status === "skipped");
      box.element.classList.toggle("gone", box.hidden);
    }
  }

  // Move the focus with an arrow key.
  step(key, index) {
    const next = neighbour(key, index, this);
    if (next === undefined) return;
    this.reveal(next);
    this.focus(this.groups[next][0]);
  }

  reveal(index) {
    const [x, y] = this.placed.nodes[index];
    const { width, height } = this.size;
    const at = [x * this.view.scale + this.view.x, y * this.view.scale + this.view.y];
    if (at[0] < 60 || at[0] > width - 60 || at[1] < 40 || at[1] > height - 40) {
      this.view.x += width / 2 - at[0];
      this.view.y += height / 2 - at[1];
      this.move();
    }
  }

  fit() {
    const { width, height } = this.size;
    if (!width || !this.placed) return;
    const scale = Math.min(1.25, (width - 32) / this.placed.width, (height - 32) / this.placed.height);
    this.view.scale = Math.max(0.02, scale);
    this.view.x = (width - this.placed.width * this.view.scale) / 2;
    this.view.y = (height - this.placed.height * this.view.scale) / 2;
    this.move();
  }

  zoom(factor, x, y) {
    const [cx, cy] = [x ?? this.size.width / 2, y ?? this.size.height / 2];
    const scale = Math.min(4, Math.max(0.02, this.view.scale * factor));
    const ratio = scale / this.view.scale;
    this.view = { scale, x: cx - (cx - this.view.x) * ratio, y: cy - (cy - this.view.y) * ratio };
    this.move();
  }

  // Show the part of the picture that `view` says.
  move() {
    const { x, y, scale } = this.view;
    this.layer.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${scale.toFixed(4)})`);
    this.svg.classList.toggle("far", scale < READABLE);
    this.svg.classList.toggle("tiny", scale < TINY);
    if (this.boxes.length) this.addVisibleTexts();
  }

  listen() {
    let from = null;
    const indexOf = (event) => event.target.closest(".node")?.dataset.group;
    this.svg.addEventListener("click", (event) => {
      const dragged = this.moved;
      this.moved = false;
      if (indexOf(event) && !dragged) this.open(Number(indexOf(event)));
    });
    this.svg.addEventListener("keydown", (event) => {
      const index = indexOf(event);
      if (!index || event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.open(Number(index));
      } else if (event.key in ARROWS) {
        event.preventDefault();
        this.step(event.key, Number(index));
      }
    });
    this.svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = this.svg.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    this.svg.addEventListener("pointerdown", (event) => {
      from = { x: event.clientX, y: event.clientY, view: { ...this.view } };
      this.moved = false;
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!from) return;
      const [dx, dy] = [event.clientX - from.x, event.clientY - from.y];
      if (!this.moved && Math.abs(dx) + Math.abs(dy) < 5) return;
      this.moved = true;
      this.view = { ...from.view, x: from.view.x + dx, y: from.view.y + dy };
      this.move();
    });
    for (const name of ["pointerup", "pointerleave"]) this.svg.addEventListener(name, () => { from = null; });
    // The observer knows the size without making the browser compute a layout of all nodes at once.
    this.resize = new ResizeObserver(([{ contentRect: { width, height } }]) => {
      const appears = !this.size.width;
      this.size = { width, height };
      if (appears) this.fit();
    });
    this.resize.observe(this.svg);
  }

  close() {
    placing.cancel();
    this.resize.disconnect();
  }
}

function batchesText(row, above) {
  if (!row.batches && !above) return "";
  if (above && !ENDED.has(row.status)) return `${doneOf(row).toLocaleString()} of ${above.toLocaleString()} batches`;
  return `${(row.batches || 0).toLocaleString()} ${row.batches === 1 ? "batch" : "batches"}`;
}

// Batches that are set aside are done, too.
const doneOf = (row) => (row.batches || 0) + (row.failed_batches || 0);

// How far a node is, from 0 to 1. Of one whose end is not known, nothing is shown.
function progressOf(row, above) {
  if (ENDED.has(row.status)) return row.status === "finished" ? 1 : 0;
  const known = /([\d,]+) of ([\d,]+)/.exec(row.shards || "");
  return known ? Number(known[1].replaceAll(",", "")) / Number(known[2].replaceAll(",", "")) : above ? doneOf(row) / above : 0;
}

// A label over the upper right corner of a box. Its ground hides the edges under it.
function badge(text, right, y) {
  const width = Math.round(text.length * CHAR) + 8;
  return s("g", { class: "share", transform: `translate(${right - width - 4} ${y})` },
    s("rect", { width, height: 16, rx: 5 }), s("text", { x: width / 2, y: 12, "text-anchor": "middle" }, text));
}

const PATH_ARROW = 2.5; // Arrowheads grow with the stroke, and that of the critical path is thick.

const edgeShape = (path, kind) => s("path", { class: `edge ${kind}`, d: path, "marker-end": path && `url(#arrow-${kind})` });

function arrowheads() {
  const kinds = ["plain", "streaming", "conditional", "success", "failure"];
  const head = (kind, size) => s(
    "marker",
    { id: `arrow-${kind}`, class: `arrow ${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: size, markerHeight: size, orient: "auto-start-reverse" },
    s("path", { d: "M0 0 L8 4 L0 8 z" }),
  );
  return s("defs", {}, kinds.map((kind) => head(kind, 7)), head("critical", PATH_ARROW));
}
