// Chooses what the page shows from its address: the list of tasks or of schedules, or one task.

import { ApiError, awaitToken, get, ofTask, setToken, shareToken, takeToken } from "./api.js";
import { byId, h, replace, setText, setTitle } from "./dom.js";
import { TaskList } from "./list.js";
import { ScheduleList } from "./schedules.js";
import { TaskPage } from "./task.js";

let shown = null;
let turns = 0; // A call that was overtaken by a later one shows nothing.

async function show() {
  const turn = (turns += 1);
  shown?.stop();
  shown = null;
  const query = new URLSearchParams(location.search);
  const main = byId("main");
  const task = query.get("task");
  const fail = (error) => {
    if (turn !== turns) return;
    shown?.stop();
    shown = null;
    if (error.name !== "AbortError") refuse(main, error);
  };
  const structure = task && get(ofTask("graph", task));
  structure?.catch(() => {}); // reported below, after a refused session
  try {
    const session = await get("session");
    if (turn !== turns) return;
    shareToken();
    setText(byId("who"), session.read_only ? `${session.actor}, read-only` : session.actor);
    const schedules = !task && query.get("view") === "schedules";
    setTitle(`${task || (schedules ? "Schedules" : "Tasks")} – FlowKit`);
    const section = (href, label, here) => h("a", { href, "aria-current": here && !task ? "page" : null, class: here && "here" }, label);
    replace(byId("crumbs"), section("./", "Tasks", !schedules), section("?view=schedules", "Schedules", schedules), task && h("span", {}, "›"), task && h("span", { "aria-current": "page" }, task));
    const List = schedules ? ScheduleList : TaskList;
    shown = task ? new TaskPage(main, task, query, session, keep, fail) : new List(main, query, navigate);
    if (turn > 1) main.focus();
    await shown.start(structure);
  } catch (error) {
    fail(error);
  }
}

function refuse(main, error) {
  const token = error instanceof ApiError && error.status === 401;
  if (token) awaitToken(show);
  replace(main, h("section", { class: "refused" },
    h("h1", {}, token ? "This server needs a token" : "The page cannot be shown"),
    h("p", { role: "alert" }, error.message),
    token && h("form", {
      onsubmit: (event) => {
        event.preventDefault();
        setToken(new FormData(event.target).get("token").trim());
        show();
      },
    }, h("label", {}, "Token", h("input", { name: "token", type: "password", autocomplete: "off", required: true })), h("button", {}, "Continue")),
    token && h("p", { class: "note" }, "An operator creates one with: flowkit token create --actor N --right tasks.read"),
    !token && h("button", { onclick: show }, "Try again")));
}

function navigate(query) {
  const target = query.size ? `?${query}` : "./";
  if (new URL(target, location).search !== location.search) history.pushState(null, "", target);
  arrive();
}

// What is shown may be able to show another address itself.
function arrive() {
  document.querySelector("dialog")?.close(); // it belongs to what was shown before
  if (!shown?.go(new URLSearchParams(location.search))) show();
}

// Change the address without leaving what is shown. With `step`, the browser's way back leads here.
function keep(changes, step = false) {
  const query = new URLSearchParams(location.search);
  for (const [key, value] of Object.entries(changes)) {
    if (value) query.set(key, value);
    else query.delete(key);
  }
  if (query.toString() !== new URLSearchParams(location.search).toString()) history[step ? "pushState" : "replaceState"](null, "", `?${query}`);
  return query;
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link || link.target || event.ctrlKey || event.metaKey || event.shiftKey || link.origin !== location.origin) return;
  if (link.pathname !== location.pathname || link.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  navigate(new URLSearchParams(link.search));
});
addEventListener("popstate", arrive);
takeToken();
addEventListener("hashchange", () => takeToken() && show());
show();
