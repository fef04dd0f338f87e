// A timeline: a row for each attempt, and for each node that waits without one. Only the rows in view exist, so ten
// thousand attempts stay smooth. The waits are those of the explanation, in its colors and words.

import { h, replace, update } from "./dom.js";
import { PARTS } from "./explain.js";
import { clock, duration, secondsOf, timeOfDay } from "./words.js";

const ROW = 24;
const EXTRA = 10;
const IDLE_SEC = 5;
const TICKS = 6; // about as many labels of the axis
const LABEL = 0.14; // the share of the axis that a label takes beside the panel of a node
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400];

// Return a function from a time to a place between 0 and 1, the pieces of time that are drawn, and the places where others
// are left out. With `collapsed`, pauses of all attempts are short.
export function scaleOf(rows, now, collapsed, open) {
  const attempts = rows.filter((each) => each.began_at).map((each) => [each.began_at, each.began_at + (secondsOf(each, now) ?? 0)]);
  const waits = collapsed && attempts.length ? [] : rows.flatMap((each) => each.waits.map(({ since, until }) => [since, until ?? now]));
  const spans = [...attempts, ...waits, ...(open ? [[now, now]] : [])].sort((a, b) => a[0] - b[0]);
  if (!spans.length) return { place: () => 0, cuts: [], pieces: [] };
  const busy = [];
  for (const [from, to] of spans) {
    const last = busy[busy.length - 1];
    if (last && from <= last[1] + (collapsed ? IDLE_SEC : Infinity)) last[1] = Math.max(last[1], to);
    else busy.push([from, to]);
  }
  const gap = busy.length > 1 ? busy.reduce((sum, [from, to]) => sum + to - from, 0) * 0.02 + 0.01 : 0;
  let length = 0;
  const starts = busy.map(([from, to]) => {
    const start = length;
    length += Math.max(to - from, 0.001) + gap;
    return start;
  });
  length -= gap;
  const place = (at) => {
    let [index, above] = [0, busy.length];
    while (above - index > 1) {
      const middle = (index + above) >> 1;
      if (busy[middle][0] <= at) index = middle;
      else above = middle;
    }
    const inside = Math.min(Math.max(at - busy[index][0], 0), busy[index][1] - busy[index][0] + gap);
    return Math.min(1, Math.max(0, (starts[index] + inside) / length));
  };
  return { place, cuts: starts.slice(1).map((start) => (start - gap / 2) / length), pieces: busy, length };
}

// Return the times that the axis names: where a piece begins, and round ones within the pieces.
export function ticksOf({ place, pieces, length }) {
  if (!pieces.length) return [];
  const step = STEPS.find((each) => length / each <= TICKS) ?? Math.ceil(length / TICKS / 86_400) * 86_400;
  const zone = new Date().getTimezoneOffset() * 60; // round ones by the local clock
  const times = pieces.flatMap(([from, to]) => {
    const first = Math.ceil((from - zone) / step) * step + zone;
    return [from, ...Array.from({ length: Math.max(0, Math.floor((to - first) / step) + 1) }, (_, index) => first + index * step)];
  });
  return times.reduce((kept, at) => (kept.length && place(at) - place(kept[kept.length - 1]) < LABEL ? kept : [...kept, at]), []);
}

// Return the rows: each attempt with the waits before it, the last one also with those after it, and nodes that have only
// waits. `placeOf(id)` is the position of a node in the graph.
export function rowsOf(attempts, waits, placeOf) {
  const rows = attempts.map((each) => ({ ...each, waits: [] }));
  const byNode = new Map(); // the rows of each node, and which of them is the first that may follow its next wait
  const add = (row) => {
    const own = byNode.get(row.node_id);
    if (own) own.rows.push(row);
    else byNode.set(row.node_id, { rows: [row], next: 0 });
  };
  rows.forEach(add);
  for (const wait of waits) {
    if (!byNode.has(wait.node_id)) add(rows[rows.push({ node_id: wait.node_id, attempt: null, outcome: "", waits: [] }) - 1]);
    const own = byNode.get(wait.node_id);
    const follows = (row) => row.began_at && wait.until && row.began_at >= wait.until - 0.001;
    while (own.next < own.rows.length && !follows(own.rows[own.next])) own.next += 1;
    (own.rows[own.next] || own.rows[own.rows.length - 1]).waits.push(wait);
  }
  return rows.map((row, index) => [row, placeOf(row.node_id) ?? Infinity, index]).sort((a, b) => a[1] - b[1] || a[2] - b[2]).map(([row]) => row);
}

export class Timeline {
  constructor(container, onSelect) {
    this.container = container;
    this.onSelect = onSelect;
    this.attempts = [];
    this.collapsed = true;
    this.axis = h("div", { class: "timeline-axis", "aria-hidden": "true" });
    this.marks = h("div", { class: "timeline-marks", "aria-hidden": "true" });
    this.rows = h("div", { class: "timeline-rows" });
    this.space = h("div", { class: "timeline-space" }, this.marks, this.rows);
    this.scroller = h("div", { class: "timeline", role: "region", tabindex: "0", "aria-label": "Timeline of attempts" }, this.axis, this.space);
    replace(container, this.scroller);
    this.scroller.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()));
  }

  // Show rows (`rowsOf`). `open` says whether the task has not ended, so that time goes on.
  show(rows, now, open) {
    const still = this.attempts === rows && this.scaled === this.collapsed && !open;
    if (!still) this.scale = scaleOf(rows, now, this.collapsed, open);
    this.scaled = this.collapsed;
    this.attempts = rows;
    this.now = now;
    this.space.style.height = `${rows.length * ROW}px`;
    this.drawAxis(open);
    this.draw();
  }

  // Show why the attempts are not known, as far as none are shown.
  refuse(why) {
    if (!this.attempts.length) update(this.rows, h("p", { class: "note" }, why));
  }

  drawAxis(open) {
    const { place, cuts } = this.scale;
    const at = (element, where) => {
      element.style.left = `${where * 100}%`;
      return element;
    };
    const ticks = ticksOf(this.scale);
    const here = open && ticks.length ? place(this.now) : null;
    const shown = ticks.filter((each) => here === null || here - place(each) > LABEL * 1.3 || place(each) > here);
    update(this.axis, h("div", { class: "on-track" },
      shown.map((each) => at(h("span", { title: clock(each) }, timeOfDay(each)), place(each))),
      here !== null && at(h("span", { class: "now", title: clock(this.now) }, "now"), here)));
    update(this.marks, h("div", { class: "on-track" },
      shown.map((each) => at(h("i", {}), place(each))),
      cuts.map((each) => at(h("i", { class: "cut", title: "no attempt ran" }), each)),
      here !== null && at(h("i", { class: "now" }), here)));
  }

  draw() {
    const first = Math.max(0, Math.floor((this.scroller.scrollTop - ROW) / ROW) - EXTRA);
    const count = Math.ceil((this.scroller.clientHeight || 300) / ROW) + 2 * EXTRA;
    this.rows.style.transform = `translateY(${first * ROW}px)`;
    if (this.attempts.length) this.rows.setAttribute("role", "list");
    else this.rows.removeAttribute("role");
    update(this.rows, this.attempts.length ? this.attempts.slice(first, first + count).map((each) => this.row(each)) : h("p", { class: "note" }, "No attempt has started."));
  }

  bar(kind, from, to, text) {
    const bar = h("span", { class: `bar ${kind}`, title: text });
    bar.style.left = `${from * 100}%`;
    bar.style.width = `${Math.max(0.3, (to - from) * 100)}%`;
    return bar;
  }

  row(attempt) {
    const { place } = this.scale;
    const took = secondsOf(attempt, this.now);
    const waits = attempt.waits.map(({ part, since, until }) => ({ part, from: place(since), to: place(until ?? this.now), text: `${PARTS[part] || part} ${duration((until ?? this.now) - since)}${until ? "" : " so far"}` }));
    const name = attempt.attempt === null ? attempt.node_id : `${attempt.node_id} · ${attempt.attempt}`;
    const waited = waits.map((each) => each.text).join(", ");
    const state = [attempt.outcome, took === null ? "" : duration(took), attempt.error].filter(Boolean).join(", ");
    const text = [`${name}${state ? `: ${state}` : ""}`, waited && `waited: ${waited}`].filter(Boolean).join("; ");
    return h(
      "div",
      { class: "timeline-row", role: "listitem" },
      h("button", { class: "link", "data-key": `${attempt.node_id} ${attempt.attempt} ${attempt.began_at}`, title: text, "aria-label": text, onclick: () => this.onSelect(attempt.node_id) }, name),
      h("span", { class: "track" },
        waits.map(({ part, from, to, text: what }) => this.bar(`wait part ${part}`, from, to, what)),
        took !== null && this.bar(attempt.outcome.replaceAll(" ", "-"), place(attempt.began_at), place(attempt.began_at + took), `${clock(attempt.began_at)} ${state}`)),
      h("span", { class: "took" }, took === null ? attempt.outcome || "waits" : duration(took)),
    );
  }
}
