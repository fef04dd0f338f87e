// A timeline of attempts: one row each. Only the rows in view exist, so ten thousand attempts stay smooth.

import { h, replace, update } from "./dom.js";
import { clock, duration } from "./words.js";

const ROW = 24;
const EXTRA = 10;
const IDLE_SEC = 5;

// Return a function from a time to a place between 0 and 1. With `collapsed`, pauses of all attempts are short.
export function scaleOf(attempts, now, collapsed) {
  const spans = attempts
    .filter((each) => each.began_at)
    .map((each) => [each.began_at, each.ended_at ?? now])
    .sort((a, b) => a[0] - b[0]);
  if (!spans.length) return { place: () => 0, cuts: [] };
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
  return { place, cuts: starts.slice(1).map((start) => (start - gap / 2) / length) };
}

export class Timeline {
  constructor(container, onSelect) {
    this.container = container;
    this.onSelect = onSelect;
    this.attempts = [];
    this.collapsed = true;
    this.rows = h("div", { class: "timeline-rows", role: "list" });
    this.space = h("div", { class: "timeline-space" }, this.rows);
    this.scroller = h("div", { class: "timeline", role: "region", tabindex: "0", "aria-label": "Timeline of attempts" }, this.space);
    replace(container, this.scroller);
    this.scroller.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()));
  }

  show(attempts, now) {
    const still = this.attempts === attempts && this.scaled === this.collapsed && attempts.every((each) => each.ended_at);
    if (!still) this.scale = scaleOf(attempts, now, this.collapsed);
    this.scaled = this.collapsed;
    this.attempts = attempts;
    this.now = now;
    this.space.style.height = `${attempts.length * ROW}px`;
    this.draw();
  }

  // Show why the attempts are not known, as far as none are shown.
  refuse(why) {
    if (!this.attempts.length) update(this.rows, h("p", { class: "note" }, why));
  }

  draw() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - EXTRA);
    const count = Math.ceil((this.scroller.clientHeight || 300) / ROW) + 2 * EXTRA;
    this.rows.style.transform = `translateY(${first * ROW}px)`;
    update(this.rows, this.attempts.length ? this.attempts.slice(first, first + count).map((each) => this.row(each)) : h("p", { class: "note" }, "No attempt has started."));
  }

  row(attempt) {
    const from = attempt.began_at ? this.scale.place(attempt.began_at) : null;
    const to = this.scale.place(attempt.ended_at ?? this.now);
    const took = attempt.began_at && !attempt.ended_at ? this.now - attempt.began_at : attempt.seconds;
    const text = `${attempt.node_id} · ${attempt.attempt}: ${attempt.outcome}${took === null ? "" : `, ${duration(took)}`}${attempt.error ? `, ${attempt.error}` : ""}`;
    const bar = h("span", { class: `bar ${attempt.outcome.replaceAll(" ", "-")}` });
    if (from !== null) {
      bar.style.left = `${from * 100}%`;
      bar.style.width = `${Math.max(0.3, (to - from) * 100)}%`;
    } else bar.hidden = true;
    return h(
      "div",
      { class: "timeline-row", role: "listitem" },
      h("button", { class: "link", "data-key": `${attempt.node_id} ${attempt.attempt} ${attempt.began_at}`, title: text, "aria-label": text, onclick: () => this.onSelect(attempt.node_id) }, `${attempt.node_id} · ${attempt.attempt}`),
      h("span", { class: "track", title: `${clock(attempt.began_at)} ${text}` }, bar),
      h("span", { class: "took" }, took === null ? attempt.outcome : duration(took)),
    );
  }
}
