// Calls of the server, with the token of the page.

const KEY = "flowkit-token";

// The token comes in the fragment, which browsers send to nobody, and leaves the address at once. Return whether there is one.
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return false;
  sessionStorage.setItem(KEY, given);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

export const setToken = (token) => sessionStorage.setItem(KEY, token);

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function failure(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.code, error.message);
  } catch {
    return new ApiError(response.status, "unreadable", `the server responded with status ${response.status}`);
  }
}

const GET_MS = 40_000; // The server itself ends a call that only reads after 30 seconds.

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "the server does not respond");
  }
}

export async function get(path, signal) {
  const late = AbortSignal.timeout(GET_MS);
  const response = await reach(`api/v1/${path}`, { headers: headers(), signal: signal ? AbortSignal.any([signal, late]) : late });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export async function post(path, body) {
  const response = await reach(`api/v1/${path}`, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
  });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// The id of a task is no part of a path: it may contain slashes and dots, which browsers change there.
export const ofTask = (call, taskId, query = {}) => `task/${call}?${new URLSearchParams({ task_id: taskId, ...query })}`;

const SILENT_MS = 30_000; // The server sends a comment at least each ten seconds.

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError(0, "unreadable", "an update of the server cannot be read");
  }
}

// Yields the events of a stream until it ends. An EventSource could send no header with the token.
export async function* stream(path, signal) {
  const stop = new AbortController();
  const leave = () => stop.abort();
  signal.addEventListener("abort", leave, { once: true });
  let watchdog = setTimeout(() => stop.abort(), SILENT_MS);
  try {
    const response = await reach(`api/v1/${path}`, {
      headers: headers({ Accept: "text/event-stream" }),
      signal: stop.signal,
      cache: "no-store",
    });
    if (!response.ok) throw await failure(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(watchdog);
      watchdog = setTimeout(() => stop.abort(), SILENT_MS);
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield parse(data.join("\n"));
      }
    }
  } finally {
    clearTimeout(watchdog);
    signal.removeEventListener("abort", leave);
    stop.abort();
  }
}
