// A web worker that computes where the nodes and edges of a graph lie. Only numbers reach Graphviz.

import { Graphviz } from "./vendor/graphviz.js";

const loading = Graphviz.load();
const INCH = 72;

function dotOf({ sizes, edges, sideways }) {
  const lines = [
    "digraph {",
    `graph [rankdir=${sideways ? "LR" : "TB"}, nslimit=1, nslimit1=1, mclimit=0.1, nodesep=0.3, ranksep=0.55];`,
    "node [shape=box, fixedsize=true, label=\"\"];",
    "edge [arrowhead=none];",
  ];
  sizes.forEach(([width, height], index) => {
    lines.push(`${index} [width=${(width / INCH).toFixed(3)}, height=${(height / INCH).toFixed(3)}];`);
  });
  for (const [from, to] of edges) lines.push(`${from} -> ${to};`);
  lines.push("}");
  return lines.join("\n");
}

// The format `plain` has one line for each thing: https://graphviz.org/docs/outputs/plain/
function read(plain, edges) {
  const lines = plain.replace(/\\\n/g, "").split("\n").map((line) => line.split(" "));
  const height = Number(lines[0][3]) * INCH;
  const point = (x, y) => [Number(x) * INCH, height - Number(y) * INCH];
  const nodes = [];
  const found = new Map();
  for (const words of lines) {
    if (words[0] === "node") nodes[Number(words[1])] = point(words[2], words[3]);
    if (words[0] === "edge") {
      const count = Number(words[3]);
      const points = [];
      for (let place = 0; place < count; place += 1) points.push(point(words[4 + 2 * place], words[5 + 2 * place]));
      const key = `${words[1]} ${words[2]}`;
      found.set(key, [...(found.get(key) || []), points]);
    }
  }
  const splines = edges.map(([from, to]) => (found.get(`${from} ${to}`) || []).shift() || []);
  return { width: Number(lines[0][2]) * INCH, height, nodes, splines };
}

self.addEventListener("message", async ({ data }) => {
  try {
    const graphviz = await loading;
    const plain = graphviz.layout(dotOf(data), "plain", "dot");
    self.postMessage({ request: data.request, placed: read(plain, data.edges) });
  } catch (error) {
    self.postMessage({ request: data.request, error: String(error) });
  }
});
