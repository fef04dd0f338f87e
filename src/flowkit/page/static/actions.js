// Actions of operators. Each shows first what it would affect, and asks.

import { ofTask, post } from "./api.js";
import { h, replace, toast } from "./dom.js";
import { ENDED } from "./words.js";

const LOOK_MS = 600;
const TYPING_MS = 300;
const ANEW_MS = 1000; // for which a dialog takes no confirmation of what has just changed under it
const CHANGES = 6;

// What can be done with a task and with a node: the name of the action, a label, and fields of its form. `blind`: no rule
// can reject it before its form is filled in.
const TASK_ACTIONS = [
  { name: "pause", label: "Pause", open: true, fields: ["interrupt"] },
  { name: "resume", label: "Resume", open: true },
  { name: "cancel", label: "Cancel", open: true, danger: true, blind: true },
  { name: "change_graph", label: "Add nodes", open: true, blind: true, fields: ["added"] },
  { name: "rerun", label: "Run again", open: false, blind: true, fields: ["nodes", "params", "inputs"] },
];
const NODE_ACTIONS = [
  { name: "retry_node", label: "Retry", fields: ["input_inline", "interrupt"] },
  { name: "skip_node", label: "Skip", fields: ["interrupt"] },
  { name: "complete_node", label: "Complete", fields: ["metrics", "interrupt"] },
  { name: "fail_node", label: "Fail", fields: ["interrupt"], danger: true },
  { name: "retry_batches", label: "Retry failed batches", fits: (node) => node.sets_aside },
  { name: "skip_batches", label: "Skip failed batches", fits: (node) => node.sets_aside },
];
const DECISIONS = [
  { name: "decide", label: "Approve", given: { decision: "approve" }, fields: ["comment"] },
  { name: "decide", label: "Reject", given: { decision: "reject" }, fields: ["comment"], danger: true },
];

// What can be done with a node of this kind. Actions that never fit it are left out; once the task has ended, all but one.
function actionsOf(node, row, closed) {
  const whole = { node_id: undefined }; // these actions name no node
  if (closed) return [{ name: "rerun", label: "Run again", given: { ...whole, nodes: [node.node_id] }, fields: ["params", "inputs"] }];
  const decides = node.role === "approval" && !ENDED.has(row.status) ? DECISIONS : [];
  const satisfies = row.status === "queued" ? (node.prerequisites || []).map((each) => ({ name: "satisfy", label: `Satisfy ${each}`, given: { ...whole, prerequisite: each } })) : [];
  return [...decides, ...satisfies, ...NODE_ACTIONS.filter(({ fits }) => !fits || fits(node))];
}

// The fields of the forms. An empty one is not sent.
const FIELDS = {
  interrupt: { label: "stop attempts that run", kind: "switch" },
  input_inline: { label: "Changed keys of the input, as JSON", kind: "object", example: '{"limit": 5}' },
  metrics: { label: "Final metrics, as JSON", kind: "object", example: '{"rows": 7}' },
  added: { label: "New nodes, as a JSON list", kind: "list", sent: "nodes", example: '[{"node_id": "mail", "type": "mailer", "depends_on": ["load"]}]' },
  nodes: { label: "Nodes that run again, with what depends on them: one id a line", kind: "lines", example: "all that did not finish" },
  params: { label: "Changed params, as JSON", kind: "object", example: '{"day": "2026-01-31"}' },
  inputs: { label: "Changed keys of the inputs of nodes, as JSON by node id", kind: "object", example: '{"load": {"limit": 5}}' },
  comment: { label: "Comment", kind: "text" },
};

const call = (taskId, name, input, dryRun) => post(ofTask(`actions/${name}`, taskId), { input, dry_run: dryRun });

// Buttons of actions, which are disabled with the reason if the rules reject them.
class Buttons {
  // `now()` returns the values that fields of a form would change.
  constructor(taskId, session, label, now) {
    this.taskId = taskId;
    this.session = session;
    this.now = now;
    this.element = h("div", { class: "actions", role: "group", "aria-label": label });
    this.element.hidden = !session.may_operate;
    this.looks = 0;
  }

  offer(actions, given) {
    if (!this.session.may_operate) return;
    clearTimeout(this.timer);
    const look = (this.looks += 1);
    this.timer = setTimeout(async () => {
      const offered = await this.judge(actions, given, look);
      if (look === this.looks) this.show(offered, given);
    }, LOOK_MS);
  }

  // One call at a time: a browser has six connections for all its tabs, and without an engine each call takes seconds.
  // Without a response of the rules, actions are offered: their dialogs ask again.
  async judge(actions, given, look) {
    const offered = [];
    let respond = true;
    for (const action of actions) {
      let why = "";
      if (respond && look === this.looks) {
        try {
          why = await this.rejection(action, given);
        } catch {
          respond = false;
        }
      }
      offered.push({ action, why });
    }
    return offered;
  }

  async rejection(action, given) {
    if (action.blind) return "";
    try {
      await call(this.taskId, action.name, { ...given, ...action.given, ...(action.fields?.includes("interrupt") ? { interrupt: true } : {}) }, true);
      return "";
    } catch (error) {
      if (isOutage(error)) throw error;
      return error.message;
    }
  }

  stop() {
    clearTimeout(this.timer);
    this.looks += 1;
  }

  show(offered, given) {
    const focused = document.activeElement?.dataset?.action;
    replace(this.element, offered.map(({ action, why }) => h("button", {
      type: "button", class: action.danger ? "danger" : null, "aria-disabled": why ? "true" : null, title: why || null, "data-action": action.label,
      onclick: () => (why ? toast(`${action.label}: ${why}`, "error") : confirmAction(this.taskId, action, given, this.now())),
    }, action.label)));
    if (focused) this.element.querySelector(`[data-action="${CSS.escape(focused)}"]`)?.focus();
  }
}

export class ActionBar extends Buttons {
  constructor(taskId, session, stateOf, now) {
    super(taskId, session, "Actions of the task", now);
    this.stateOf = stateOf;
  }

  update() {
    const { task } = this.stateOf();
    const key = `${task.status} ${task.revision} ${task.paused?.length}`;
    if (key === this.key) return;
    this.key = key;
    this.offer(TASK_ACTIONS.filter((action) => action.open === !task.closed), {});
  }
}

export class NodeActions extends Buttons {
  constructor(taskId, node, session, now) {
    super(taskId, session, "Actions of the node", now);
    this.node = node;
  }

  // Show what can be done now. At the end of the task, the buttons of its run are gone at once.
  update(row, closed) {
    const key = `${row.status} ${row.attempt} ${row.awaits_decision} ${row.note} ${closed}`;
    if (key === this.key) return;
    this.key = key;
    if (closed !== this.closed) replace(this.element);
    this.closed = closed;
    this.offer(actionsOf(this.node, row, closed), { node_id: this.node.node_id });
  }
}

function field(name, now) {
  const { label, kind, example } = FIELDS[name];
  if (kind === "switch") return h("label", { class: "toggle" }, h("input", { type: "checkbox", name }), label);
  if (kind === "text") return h("label", {}, label, h("input", { name, maxlength: 500 }));
  const known = now && Object.keys(now).length > 0;
  return [
    h("label", {}, label, h("textarea", { name, rows: 3, placeholder: example, spellcheck: "false" })),
    known && h("details", {}, h("summary", {}, "What it is now"), h("pre", { tabindex: "0" }, JSON.stringify(now, null, 2)))];
}

// Return the value of a field; undefined if it is empty. Throw an error with a remedy.
function valueOf(name, element) {
  const { label, kind, example } = FIELDS[name];
  if (kind === "switch") return element.checked || undefined;
  const text = element.value.trim();
  if (!text) return undefined;
  if (kind === "text") return text;
  if (kind === "lines") return text.split("\n").map((line) => line.trim()).filter(Boolean);
  let parsed;
  try {
    parsed = JSON.parse(text);
  } catch { /* reported below */ }
  const isList = kind === "list";
  if (typeof parsed !== "object" || parsed === null || Array.isArray(parsed) !== isList) throw new Error(`${label}: this is no JSON ${isList ? "list" : "object"}; write, for example, ${example}`);
  return parsed;
}

function read(form, action) {
  const given = {};
  for (const name of [...(action.fields || []), "reason"]) {
    const element = form.elements.namedItem(name);
    const value = name === "reason" ? element.value.trim() || undefined : valueOf(name, element);
    if (value !== undefined) given[FIELDS[name]?.sent || name] = value;
  }
  return given;
}

// Show what the action would affect, and apply it when the user confirms.
function confirmAction(taskId, action, given, now) {
  const preview = h("div", { class: "preview", role: "status" }, h("p", { class: "note" }, "…"));
  const apply = h("button", { type: "submit", class: action.danger ? "danger" : "primary", disabled: true }, action.label);
  const title = h("h2", { id: "dialog-title" }, { ...given, ...action.given }.node_id ? `${action.label} ${given.node_id}` : `${action.label} the task`);
  const form = h("form", { method: "dialog" },
    title,
    (action.fields || []).map((name) => field(name, now[name])),
    h("label", {}, "Reason", h("input", { name: "reason", maxlength: 500 })),
    preview,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Back"), apply));
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
  const input = () => ({ ...given, ...action.given, ...read(form, action) });
  let seen = null; // the preview that is shown, and that the button confirms
  let first = null; // the one shown first for the form as it is: changes are told since then, so a later one hides none
  let edits = 0; // of the form
  let looking = null; // for how many edits a look is on its way
  let again = false;
  let applying = false;
  let resting = null;
  const ready = () => { apply.disabled = !seen || applying || resting !== null; };
  const show = (found, news) => {
    seen = found;
    replace(preview, news && h("p", { class: "reason", role: "alert" }, `Changed meanwhile: ${news}.`), affected(found));
    clearTimeout(resting);
    resting = news ? setTimeout(() => { resting = null; ready(); }, ANEW_MS) : null;
    ready();
  };
  const lookOnce = async () => {
    const turn = edits;
    try {
      const found = await call(taskId, action.name, input(), true);
      if (turn !== edits || applying) return;
      first ??= found;
      if (!seen || !isSame(seen, found)) show(found, changesOf(first, found, guards(action, input())));
    } catch (error) {
      if (turn !== edits || applying) return;
      // A server that does not respond says nothing about what is shown, which it checks when it applies the action.
      if (!seen || !isOutage(error)) {
        seen = null;
        replace(preview, h("p", { class: "reason" }, error.message));
      }
    }
    ready();
  };
  // Changes of the task wait for a look that is on its way. A change of the form does not: that look is outdated.
  const look = async () => {
    again = true;
    if (looking === edits) return;
    const turn = (looking = edits);
    while (again && turn === edits && dialog.open) {
      again = false;
      await lookOnce();
    }
    if (looking === turn) looking = null;
  };
  // What is shown must be what is applied, so a change takes the button until its effect is known.
  form.addEventListener("input", () => {
    seen = first = null;
    edits += 1;
    ready();
    clearTimeout(dialog.timer);
    dialog.timer = setTimeout(look, TYPING_MS);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (applying || !seen) return;
    applying = true;
    ready();
    try {
      await call(taskId, action.name, { ...input(), ...expected(seen, guards(action, input())) }, false);
      toast(`${action.label}: done`);
      dialog.close();
    } catch (error) {
      if (!dialog.open) toast(`${action.label}: ${error.message}`, "error");
      replace(preview, h("p", { class: "reason", role: "alert" }, error.message));
      applying = false;
      look();
    }
  });
  dialog.addEventListener("taskchange", look);
  dialog.addEventListener("close", () => { clearTimeout(dialog.timer); dialog.remove(); });
  document.body.append(dialog);
  dialog.showModal();
  look();
}

// The open dialog looks again, because the state of the task has changed.
export const noteChange = () => document.querySelector("dialog[open]")?.dispatchEvent(new Event("taskchange"));

const isOutage = (error) => error.status === 0 || error.status >= 500;
const isSame = (before, after) => JSON.stringify(before) === JSON.stringify(after);

// Whether an action must find its nodes as they were shown. A pause lets them finish, and a resume lets them start,
// whatever they do meanwhile.
const guards = (action, given) => !["pause", "resume"].includes(action.name) || Boolean(given.interrupt);

const expected = (seen, guarded) => ({ if_revision: seen.revision ?? undefined, if_state: (guarded && seen.state) || undefined });

// Return in words what differs between two previews; an empty text if nothing does that matters for a confirmation.
function changesOf(before, after, guarded) {
  const [was, is] = [before, after].map((each) => new Map(each.affected.map(({ node_id, from }) => [node_id, from])));
  const nodes = [
    ...[...was].filter(([id, from]) => is.get(id) !== from).map(([id, from]) => (is.has(id) ? `${id} was ${from} and is ${is.get(id)}` : `${id} is no longer affected`)),
    ...[...is.keys()].filter((id) => !was.has(id)).map((id) => `${id} is affected, too`),
  ];
  const shown = nodes.length > CHANGES ? [...nodes.slice(0, CHANGES), `${(nodes.length - CHANGES).toLocaleString()} more`] : nodes;
  const texts = [
    before.revision !== after.revision && "another action was applied",
    before.run_seq !== after.run_seq && "the task has run again",
    ...(guarded ? shown : []),
  ].filter(Boolean);
  return texts.join("; ") || (guarded && before.state !== after.state ? "what it affects has been started or ended" : "");
}

function affected({ affected: nodes, notes }) {
  const shown = nodes.slice(0, 12);
  return [
    h("p", {}, nodes.length ? `Affects ${nodes.length === 1 ? "one node" : `${nodes.length.toLocaleString()} nodes`}:` : "No node changes at once."),
    h("ul", {}, shown.map((each) => h("li", {}, `${each.node_id}: ${each.from} → ${each.to}`)), nodes.length > shown.length && h("li", {}, `${nodes.length - shown.length} more`)),
    notes.map((note) => h("p", { class: "note" }, note)),
  ];
}
