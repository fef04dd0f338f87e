// Stands in for the calls of the page's server. Tests set what they return, and when, and send updates.
(() => {
  const real = window.fetch;
  const gates = {};
  const waits = {};
  const updates = []; // texts that the page has not got yet
  const now = () => Date.now() / 1000 + fake.ahead;
  let latest = null; // the latest update, which an open page gets again and again
  const node = (node_id, more = {}) => ({ node_id, role: "quick", function: null, parallel: 1, is_map: false, when: null, ...more });
  const fake = (window.fake = {
    status: {}, // by call: the status of its responses, if it is an error
    calls: [],
    applied: [], // the inputs of the actions that were applied
    lost: false, // whether no call reaches the server
    ahead: 0, // seconds by which the clock of the server is ahead of that of the browser
    returns: {
      session: { actor: "7", may_operate: true, read_only: false, web_ui: null, namespace: "default", database: "flowkit", version: "1", actions: [] },
      tasks: { tasks: [], more: false },
      schedules: { schedules: [], more: false },
      "task/attempts": { attempts: [], complete: true },
      "task/logs": { kept: true, lines: [], earlier: false, later: false, end: "" },
      "task/variables": { variables: {} },
      "task/batches": { batches: [], total: 0, skip: 0 },
      "task/node": { node_id: "a", definition: { io: null }, result: {}, batches: 0, failed_batches: 0, debug: null },
      "task/explanation": { task_id: "t", status: "running", open: true, began_at: "", seconds: 0, total_seconds: 0, parts: {}, path: [], speed_ups: [], reason: null, waits_for: "", set_aside: [], missing: [] },
    },
    // Set the graph: a chain of these nodes.
    graph(ids, name = "nightly") {
      const edges = ids.slice(1).map((_, index) => [index, index + 1, "plain"]);
      fake.returns["task/graph"] = { task_id: "t", name, run_id: null, queue: null, params: { day: "today" }, nodes: ids.map((id) => node(id)), edges, conditions: {} };
      fake.ids = ids;
    },
    // Hold the responses of a call until `release`.
    hold(call) {
      waits[call] = new Promise((resolve) => { gates[call] = resolve; });
    },
    release(call) {
      gates[call]();
      delete waits[call];
    },
    // Send a state. `rows` are parts of the rows of nodes, by position.
    send(poll, rows, given = {}) {
      const nodes = Object.fromEntries(Object.entries(rows).map(([index, row]) => [index, { node_id: fake.ids[index], role: "quick", status: "queued", attempt: 0, ...row }]));
      const task = { task_id: "t", status: "running", closed: false, reason: null, source: "workflow", revision: 0, paused: [], seconds: 1, ...given.task };
      const update = { again_sec: 0.02, server: "one", poll, whole: true, origin: "x", at: now(), count: fake.ids.length, problem: null, lost_at: null, ...given, task, nodes };
      fake.raw(JSON.stringify({ now: now(), ...update }));
      latest = { ...update, whole: false, nodes: {} };
    },
    raw(text) {
      updates.push(text);
      fake.lost = false;
    },
  });
  fake.graph(["a", "b", "c"]);
  const aborted = (signal) => new Promise((_, reject) => { signal?.addEventListener("abort", () => reject(new DOMException("left", "AbortError"))); });
  const hasUpdate = async () => { while (!updates.length && !latest) await new Promise((resolve) => setTimeout(resolve, 5)); };
  window.fetch = async (path, options = {}) => {
    if (!String(path).startsWith("api/v1/")) return real(path, options);
    const call = path.slice(7).split("?")[0];
    fake.calls.push(call);
    const body = options.body ? JSON.parse(options.body) : null;
    if (body?.dry_run === false) fake.applied.push(body.input);
    await Promise.race([call === "task/updates" ? Promise.all([waits[call], hasUpdate()]) : waits[call], aborted(options.signal)]);
    if (fake.lost) throw new TypeError("network error");
    const status = fake.status[call] || 200;
    if (status !== 200) return new Response(JSON.stringify({ error: { code: "refused", message: `refused with ${status}` } }), { status });
    if (call === "task/updates") return new Response(updates.shift() ?? JSON.stringify({ now: now(), ...latest }));
    return new Response(JSON.stringify(fake.returns[call] ?? { affected: [], notes: ["a note"] }));
  };
})();
