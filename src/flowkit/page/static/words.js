// How states and times read. Each status has a word and a symbol; color only repeats what they say.

import { h } from "./dom.js";

export const STATUSES = {
  queued: { symbol: "○", word: "queued" },
  deferred: { symbol: "◷", word: "waits" },
  running: { symbol: "▶", word: "running" },
  cancelling: { symbol: "◼", word: "stopping" },
  finished: { symbol: "✓", word: "finished" },
  failed: { symbol: "✕", word: "failed" },
  cancelled: { symbol: "⊘", word: "cancelled" },
  skipped: { symbol: "⤼", word: "skipped" },
};

export const ENDED = new Set(["finished", "failed", "cancelled", "skipped"]);

const RUNS = new Set(["running", "cancelling"]);

export const symbolOf = (status) => (STATUSES[status] || { symbol: "?" }).symbol;

// A duration in its two largest units: 60 ms, 2.5 s, 45 s, 1 min 5 s, 2 h 0 min, 3 d 4 h. It is rounded before it is cut into units.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const [ms, tenths] = [Math.round(seconds * 1000), Math.round(seconds * 10)];
  if (ms < 1000) return `${Math.max(0, ms)} ms`;
  if (tenths < 100) return `${(tenths / 10).toFixed(1)} s`;
  const rounded = (unit) => Math.round(seconds / unit);
  if (rounded(1) < 60) return `${rounded(1)} s`;
  if (rounded(1) < 3600) return `${Math.floor(rounded(1) / 60)} min ${rounded(1) % 60} s`;
  if (rounded(60) < 1440) return `${Math.floor(rounded(60) / 60)} h ${rounded(60) % 60} min`;
  return `${Math.floor(rounded(3600) / 24)} d ${rounded(3600) % 24} h`;
}

// How long an attempt, or the latest one of a node, took or has been running; null if that is unknown. Times of attempts
// on the page have no other formula.
export function secondsOf({ began_at: began, ended_at: ended, outcome, status }, now) {
  const until = RUNS.has(outcome ?? status) ? now : ended;
  return began && until ? Math.max(0, until - began) : null;
}

// How long all runs of a task took, if it has run again; empty otherwise. Its own duration is that of the latest run.
export function totalOf({ seconds, total_seconds: total }) {
  return total > seconds ? `${duration(total)} since it was created` : "";
}

export function percent(share) {
  const rounded = Math.round(100 * share);
  return rounded || !share ? `${rounded} %` : "<1 %";
}

// Return a time, in seconds since the epoch or as a text, as a Date; null if there is none.
function dateOf(given) {
  const at = given ? new Date(typeof given === "number" ? given * 1000 : given) : null;
  return at && !Number.isNaN(at.getTime()) ? at : null;
}

const local = (at) => at.toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
const utc = (at) => `${at.toISOString().slice(0, 19).replace("T", " ")} UTC`;

// A time for a sentence: local, and in UTC where that is another one. Empty if there is none.
export function clock(given) {
  const at = dateOf(given);
  if (!at) return "";
  return at.getTimezoneOffset() ? `${local(at)} (${utc(at).slice(11)})` : local(at);
}

// A time for a table: local, with UTC as its title. Empty if there is none.
export function moment(given) {
  const at = dateOf(given);
  return at && h("time", { datetime: at.toISOString(), title: utc(at) }, local(at));
}

// The time of day of a moment, which is given in seconds since the epoch.
export const timeOfDay = (moment) => new Date(moment * 1000).toLocaleTimeString(undefined, { timeStyle: "medium" });

// A time in a time zone; in UTC if this browser does not know the zone.
export function instant(text, zone) {
  const at = new Date(text);
  if (Number.isNaN(at.getTime())) return text;
  const shown = (timeZone) => `${at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: at.getUTCSeconds() ? "medium" : "short", timeZone })} ${timeZone}`;
  try {
    return shown(zone);
  } catch {
    return shown("UTC");
  }
}

// What a node does or waits for, and the batches that it has set aside; empty if its status says it all.
export const sentenceOf = (row, now) => (row ? [stateOf(row, now), row.set_aside_text].filter(Boolean).join("; ") : "");

function stateOf(row, now) {
  const worker = row.worker ? `${row.external ? "external worker" : "worker"} ${row.worker}` : "";
  if (row.lost) return `${worker} is lost: silent since ${clock(row.heard_at)}; the next free worker replaces it`;
  if (row.heard_at) return `${worker} is silent since ${clock(row.heard_at)}; replaced at ${clock(row.replaced_at)} unless it responds`;
  if (row.waits_for) return `waits for ${row.waits_for}`;
  if (row.waiting) return "no worker has started it yet";
  if (row.next_retry_at) {
    const left = row.next_retry_at - now;
    return `${left > 0 ? `retry in ${duration(left)}` : "retry is due"}${row.note ? `: ${row.note}` : ""}`;
  }
  if (row.shards) return row.shards;
  if (row.note) return row.note;
  return row.status === "running" && worker ? `runs on ${worker}` : "";
}
