// How states and times read. Each status has a word and a symbol; color only repeats what they say.

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

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.round((seconds % 86400) / 3600)} h`;
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

export function clock(moment) {
  if (!moment) return "";
  const at = typeof moment === "number" ? new Date(moment * 1000) : new Date(moment);
  return Number.isNaN(at.getTime()) ? "" : at.toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
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
