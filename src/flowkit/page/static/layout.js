// A web worker that computes where the nodes and edges of a graph lie. Only numbers reach Graphviz.

import { Graphviz } from "./vendor/graphviz.js";

const INCH = 72;
const LARGE = 1000; // Beyond this number of boxes, the picture may be less even, but takes a third of the time.
const TRIAL = { sizes: [0, 1, 2, 3, 4].map(() => [INCH, INCH]), edges: [[0, 1], [0, 2], [1, 3], [2, 3], [0, 4]], sideways: true };

// The first layout compiles most of Graphviz, so a small one takes place before it is needed.
const loading = Graphviz.load().then((graphviz) => {
  graphviz.layout(dotOf(TRIAL), "plain", "dot");
  return graphviz;
});

function dotOf({ sizes, edges, sideways }) {
  const lines = [
    "digraph {",
    `graph [rankdir=${sideways ? "LR" : "TB"}, nslimit=${sizes.length > LARGE ? 0.1 : 1}, nslimit1=1, mclimit=0.1, nodesep=0.3, ranksep=0.55];`,
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
  const point = (x, y) => [Math.round(Number(x) * INCH * 10) / 10, Math.round((height - Number(y) * INCH) * 10) / 10];
  const nodes = [];
  const found = new Map();
  for (const words of lines) {
    if (words[0] === "node") nodes[Number(words[1])] = point(words[2], words[3]);
    if (words[0] === "edge") {
      const points = [];
      for (let at = 4; at < 4 + 2 * Number(words[3]); at += 2) points.push(point(words[at], words[at + 1]).join(" "));
      const key = `${words[1]} ${words[2]}`;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(`M${points[0]} C${points.slice(1).join(" ")}`);
    }
  }
  const paths = edges.map(([from, to]) => found.get(`${from} ${to}`)?.shift() || "");
  return { width: Number(lines[0][2]) * INCH, height, nodes, paths };
}

self.addEventListener("message", async ({ data }) => {
  try {
    const graphviz = await loading;
    self.postMessage({ placed: read(graphviz.layout(dotOf(data), "plain", "dot"), data.edges) });
  } catch (error) {
    self.postMessage({ error: String(error) });
  }
});
