// Builds elements. Text always becomes a text node, so no content of a task is ever read as HTML. All texts of the page
// pass `visible` here: no other file sets texts of the document.

const SVG = "http://www.w3.org/2000/svg";
const SHOWN = new Set(["title", "aria-label", "placeholder"]); // the attributes that people read
// Control characters except tab and line feed, line separators, and characters that change the direction of text.
const DECEPTIVE = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]/g;

// A text with such characters as escapes, as the function of this name in flowkit/text.py returns it.
export const visible = (text) => String(text).replace(DECEPTIVE, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
export const setText = (element, text) => { element.textContent = visible(text); };
export const setTitle = (text) => { document.title = visible(text); };
export const setLabel = (element, text) => element.setAttribute("aria-label", visible(text));

// A text that scrolls in its place takes the focus, for the arrow keys. One that fits does not: it would be one more stop.
const scrolling = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollHeight > target.clientHeight + 1) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
const SCROLLS = "[data-scrolls]";

function fill(element, attributes, children) {
  if (element.localName === "pre") element.dataset.scrolls = "";
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : SHOWN.has(name) ? visible(value) : String(value));
  }
  element.append(...present(children));
  if (element.matches(SCROLLS)) scrolling.observe(element);
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const present = (children) => children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false)
  .map((each) => (each instanceof Node ? each : visible(each)));

export function replace(parent, ...children) {
  parent.replaceChildren(...present(children));
}

// Whether two elements look alike. Which texts scroll depends on the layout, and is taken over.
function isSame(old, child) {
  const scrollers = (each) => (each instanceof Element ? [...(each.matches(SCROLLS) ? [each] : []), ...each.querySelectorAll(SCROLLS)] : []);
  const before = scrollers(old);
  scrollers(child).forEach((each, place) => { if (before[place]?.hasAttribute("tabindex")) each.tabIndex = 0; });
  return old.isEqualNode(child);
}

// Show these children instead. One that looks as before stays, with its focus and what is selected in it.
export function update(parent, ...children) {
  const wanted = present(children).map((each) => (typeof each === "string" ? document.createTextNode(each) : each));
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  wanted.forEach((child, place) => {
    const old = parent.childNodes[place];
    if (!old) parent.append(child);
    else if (!isSame(old, child)) old.replaceWith(child);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
  if (focused && !parent.contains(document.activeElement)) parent.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

// A button that copies a text. Pages that come without HTTPS from another machine have no clipboard, but a selection.
// A control character would act in the terminal into which the text is pasted.
export function copyButton(content, what) {
  const text = visible(content);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch { // there is none, or the browser does not permit it
      const field = h("textarea", { class: "copied" }, text);
      document.body.append(field);
      field.select();
      const copied = document.execCommand("copy");
      field.remove();
      if (!copied) return toast(`${what} cannot be copied; select it instead`, "error");
    }
    toast(`${what} is copied`);
  };
  return h("button", { type: "button", class: "copy", "aria-label": `Copy ${what}`, title: `Copy ${what}`, onclick: copy },
    s("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d: "M5.5 5.5h8v8h-8zM3 10.5h-.5v-8h8V3" })));
}

export const byId = (id) => document.getElementById(id);

export function toast(text, kind = "note") {
  const shown = h("p", { class: `toast ${kind}` }, text);
  byId("toasts").append(shown);
  setTimeout(() => shown.remove(), 8000);
}
