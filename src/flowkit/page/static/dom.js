// Builds elements. Text always becomes a text node, so no content of a task is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
}

export const byId = (id) => document.getElementById(id);

export function toast(text, kind = "note") {
  const shown = h("p", { class: `toast ${kind}` }, text);
  byId("toasts").append(shown);
  setTimeout(() => shown.remove(), 8000);
}
