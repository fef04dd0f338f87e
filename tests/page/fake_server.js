// Stands in for the calls of the page's server. Tests set what they return, and when, and send messages on the stream.
(() => {
  const real = window.fetch;
  const gates = {};
  const waits = {};
  const node = (node_id, more = {}) => ({ node_id, role: "quick", function: null, parallel: 1, is_map: false, when: null, ...more });
  const fake = (window.fake = {
    status: {}, // by call: the status of its responses, if it is an error
    calls: [],
    bodies: [], // of the calls that apply an action
    streams: [],
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
      fake.raw(`data: ${JSON.stringify({ now: Date.now() / 1000, server: "one", poll, whole: true, origin: "x", at: Date.now() / 1000, count: fake.ids.length, problem: null, ...given, task, nodes })}\r\n\r\n`);
    },
    raw(text) {
      fake.streams.at(-1).enqueue(new TextEncoder().encode(text));
    },
    // Lose the stream, as a network would.
    lose() {
      fake.streams.at(-1).error(new TypeError("network error"));
    },
  });
  fake.graph(["a", "b", "c"]);
  window.fetch = async (path, options = {}) => {
    if (!String(path).startsWith("api/v1/")) return real(path, options);
    const call = path.slice(7).split("?")[0];
    fake.calls.push(call);
    const body = options.body ? JSON.parse(options.body) : null;
    if (body?.dry_run === false) fake.bodies.push(body.input);
    await waits[call];
    const status = fake.status[call] || 200;
    if (status !== 200) return new Response(JSON.stringify({ error: { code: "refused", message: `refused with ${status}` } }), { status });
    if (call !== "task/stream") return new Response(JSON.stringify(fake.returns[call] ?? { affected: [], notes: ["a note"] }));
    return new Response(new ReadableStream({
      start(controller) {
        fake.streams.push(controller);
        options.signal.addEventListener("abort", () => { try { controller.error(new DOMException("left", "AbortError")); } catch { /* it has ended */ } });
      },
    }));
  };
})();
