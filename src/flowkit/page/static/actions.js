// Actions of operators. Each shows first what it would affect, and asks.

import { ofTask, post } from "./api.js";
import { h, replace, toast } from "./dom.js";
import { ENDED } from "./words.js";

const LOOK_MS = 600;

// What can be done with a task and with a node: the name of the action, a label, and fields of its form.
const TASK_ACTIONS = [
  { name: "pause", label: "Pause", open: true, fields: ["interrupt"] },
  { name: "resume", label: "Resume", open: true },
  { name: "cancel", label: "Cancel", open: true, danger: true, blind: true },
  { name: "rerun", label: "Run again", open: false },
];
const NODE_ACTIONS = [
  { name: "retry_node", label: "Retry", fields: ["input_inline", "interrupt"] },
  { name: "skip_node", label: "Skip", fields: ["interrupt"] },
  { name: "complete_node", label: "Complete", fields: ["metrics", "interrupt"] },
  { name: "fail_node", label: "Fail", fields: ["interrupt"], danger: true },
  { name: "retry_batches", label: "Retry failed batches" },
  { name: "skip_batches", label: "Skip failed batches" },
];
const DECISIONS = [
  { name: "decide", label: "Approve", given: { decision: "approve" }, fields: ["comment"] },
  { name: "decide", label: "Reject", given: { decision: "reject" }, fields: ["comment"], danger: true },
];

const call = (taskId, name, input, dryRun) => post(ofTask(`actions/${name}`, taskId), { input, dry_run: dryRun });

// Buttons of actions, which are disabled with the reason if the rules reject them.
class Buttons {
  constructor(taskId, session, label) {
    this.taskId = taskId;
    this.session = session;
    this.element = h("div", { class: "actions", role: "group", "aria-label": label });
    this.element.hidden = !session.may_operate;
    this.looks = 0;
  }

  offer(actions, given) {
    if (!this.session.may_operate) return;
    clearTimeout(this.timer);
    const look = (this.looks += 1);
    this.timer = setTimeout(async () => {
      const offered = await Promise.all(actions.map(async (action) => ({ action, why: await this.rejection(action, given) })));
      if (look === this.looks) this.show(offered, given);
    }, LOOK_MS);
  }

  async rejection(action, given) {
    if (action.blind) return "";
    try {
      await call(this.taskId, action.name, { ...given, ...action.given, ...(action.fields?.includes("interrupt") ? { interrupt: true } : {}) }, true);
      return "";
    } catch (error) {
      return error.message;
    }
  }

  show(offered, given) {
    const focused = document.activeElement?.dataset?.action;
    replace(this.element, offered.map(({ action, why }) => h("button", {
      type: "button", class: action.danger ? "danger" : null, "aria-disabled": why ? "true" : null, title: why || null, "data-action": action.label,
      onclick: () => (why ? toast(`${action.label}: ${why}`, "error") : confirmAction(this.taskId, action, given)),
    }, action.label)));
    if (focused) this.element.querySelector(`[data-action="${CSS.escape(focused)}"]`)?.focus();
  }
}

export class ActionBar extends Buttons {
  constructor(taskId, session, stateOf) {
    super(taskId, session, "Actions of the task");
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
  constructor(taskId, node, session) {
    super(taskId, session, "Actions of the node");
    this.node = node;
  }

  update(row) {
    const key = `${row.status} ${row.attempt} ${row.awaits_decision} ${row.note}`;
    if (key === this.key) return;
    this.key = key;
    const approval = this.node.role === "approval" && !ENDED.has(row.status);
    this.offer([...(approval ? DECISIONS : []), ...NODE_ACTIONS], { node_id: this.node.node_id });
  }
}

function field(name) {
  switch (name) {
    case "interrupt": return h("label", { class: "toggle" }, h("input", { type: "checkbox", name }), "stop attempts that run");
    case "input_inline": return h("label", {}, "Changed keys of the input, as JSON", h("textarea", { name, rows: 4, placeholder: '{"limit": 5}', spellcheck: "false" }));
    case "metrics": return h("label", {}, "Final metrics, as JSON", h("textarea", { name, rows: 3, placeholder: '{"rows": 7}', spellcheck: "false" }));
    default: return h("label", {}, "Comment", h("input", { name, maxlength: 500 }));
  }
}

function read(form, action) {
  const given = {};
  for (const name of action.fields || []) {
    const element = form.elements.namedItem(name);
    if (name === "interrupt") {
      if (element.checked) given.interrupt = true;
    } else if (name === "comment") {
      if (element.value) given.comment = element.value;
    } else if (element.value.trim()) given[name] = JSON.parse(element.value);
  }
  const reason = form.elements.namedItem("reason").value.trim();
  return reason ? { ...given, reason } : given;
}

// Show what the action would affect, and apply it when the user confirms.
function confirmAction(taskId, action, given) {
  const preview = h("div", { class: "preview", role: "status" });
  const apply = h("button", { type: "submit", class: action.danger ? "danger" : "primary" }, action.label);
  const form = h("form", { method: "dialog" },
    h("h2", {}, given.node_id ? `${action.label} ${given.node_id}` : `${action.label} the task`),
    (action.fields || []).map(field),
    h("label", {}, "Reason", h("input", { name: "reason", maxlength: 500 })),
    preview,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Back"), apply));
  const dialog = h("dialog", {}, form);
  const input = () => ({ ...given, ...action.given, ...read(form, action) });
  let looks = 0;
  const look = async () => {
    const number = (looks += 1);
    try {
      const found = await call(taskId, action.name, input(), true);
      if (number !== looks) return;
      apply.disabled = false;
      replace(preview, affected(found));
    } catch (error) {
      if (number !== looks) return;
      apply.disabled = true;
      replace(preview, h("p", { class: "reason" }, error instanceof SyntaxError ? `This is not JSON: ${error.message}` : error.message));
    }
  };
  form.addEventListener("input", () => { clearTimeout(dialog.timer); dialog.timer = setTimeout(look, 300); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    apply.disabled = true;
    try {
      await call(taskId, action.name, input(), false);
      toast(`${action.label}: done`);
      dialog.close();
    } catch (error) {
      replace(preview, h("p", { class: "reason", role: "alert" }, error.message));
    }
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  look();
}

function affected({ affected: nodes, notes }) {
  const shown = nodes.slice(0, 12);
  return [
    h("p", {}, nodes.length ? `Affects ${nodes.length === 1 ? "one node" : `${nodes.length.toLocaleString()} nodes`}:` : "No node changes at once."),
    h("ul", {}, shown.map((each) => h("li", {}, `${each.node_id}: ${each.from} → ${each.to}`)), nodes.length > shown.length && h("li", {}, `${nodes.length - shown.length} more`)),
    notes.map((note) => h("p", { class: "note" }, note)),
  ];
}
