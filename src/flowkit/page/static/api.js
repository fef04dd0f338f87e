// Calls of the server, with the token of the page, and the clock of the server.

const KEY = "flowkit-token";
const tokenOf = () => sessionStorage.getItem(KEY);

// The token comes in the fragment, which browsers send to nobody, and leaves the address at once. Return whether there is one.
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return false;
  setToken(given);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

export function setToken(token) {
  sessionStorage.setItem(KEY, token);
  wanted = null;
}

// Tabs of the same page hand their token on in memory, so that it is gone with the last of them.
const tabs = new BroadcastChannel(`flowkit-token ${location.pathname}`);
let refused = null; // the token that the server has refused
let wanted = null; // what follows once another tab hands on another token

tabs.addEventListener("message", ({ data }) => {
  const found = wanted;
  if (data.asks) shareToken();
  else if (found && data.token !== refused) {
    setToken(data.token);
    found();
  }
});

export function shareToken() {
  if (tokenOf()) tabs.postMessage({ token: tokenOf() });
}

// Ask the other tabs for their token. `found` follows once one has a token, which may be later.
export function awaitToken(found) {
  wanted = found;
  tabs.postMessage({ asks: true });
}

// A token that is refused is not handed on. A call that began with another one says nothing about the token of now.
function forget(token) {
  refused = token;
  if (tokenOf() === token) sessionStorage.removeItem(KEY);
}

let ahead = 0; // Seconds by which the clock of the server is ahead of this one.

// The time by the clock of the server, in seconds since the epoch.
export const serverNow = () => Date.now() / 1000 + ahead;

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

const READ_MS = 40_000; // The server itself ends a call that only reads after 30 seconds.
const ACT_MS = 60_000; // It waits 30 seconds for an engine.

// Return what a call returns. Throw an ApiError that says why there is nothing, also after `ms`; an AbortError after `signal`.
async function call(path, ms, { signal, headers = {}, ...options }) {
  const late = new AbortController();
  const timer = setTimeout(() => late.abort(), ms);
  const token = tokenOf();
  try {
    const response = await fetch(`api/v1/${path}`, {
      ...options,
      headers: token ? { ...headers, Authorization: `Bearer ${token}` } : headers,
      signal: signal ? AbortSignal.any([signal, late.signal]) : late.signal,
    });
    if (response.status === 401) forget(token);
    if (!response.ok) throw await failure(response);
    const found = await response.json();
    if (found.now) ahead = found.now - Date.now() / 1000;
    return found;
  } catch (error) {
    if (error instanceof ApiError || signal?.aborted) throw error;
    if (late.signal.aborted) throw new ApiError(0, "timeout", `the server has not responded within ${ms / 1000} s`);
    if (error instanceof SyntaxError) throw new ApiError(0, "unreadable", "a response of the server cannot be read");
    throw new ApiError(0, "unreachable", "the server does not respond");
  } finally {
    clearTimeout(timer);
  }
}

export const get = (path, signal, ms = READ_MS) => call(path, ms, { signal });

export async function post(path, body) {
  try {
    return await call(path, ACT_MS, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  } catch (error) {
    if (error.code === "timeout" && !body.dry_run) error.message += "; it may still apply the action, so look at the task before you repeat it";
    throw error;
  }
}

// The id of a task is no part of a path: it may contain slashes and dots, which browsers change there.
export const ofTask = (call, taskId, query = {}) => `task/${call}?${new URLSearchParams({ task_id: taskId, ...query })}`;
