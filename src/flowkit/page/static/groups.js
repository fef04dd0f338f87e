// Collapses large graphs: nodes of the same role, parents and children, and the links of a chain, become one. Pure.

export const MAX_SHOWN = 1000;
export const MAX_DEPTH = 300;

export function depthOf(count, edges) {
  const children = Array.from({ length: count }, () => []);
  const left = new Array(count).fill(0);
  for (const [from, to] of edges) {
    children[from].push(to);
    left[to] += 1;
  }
  const depth = new Array(count).fill(1);
  const ready = left.flatMap((each, index) => (each ? [] : [index]));
  for (let next = 0; next < ready.length; next += 1) {
    for (const child of children[ready[next]]) {
      depth[child] = Math.max(depth[child], depth[ready[next]] + 1);
      left[child] -= 1;
      if (!left[child]) ready.push(child);
    }
  }
  return depth.reduce((most, each) => Math.max(most, each), 0);
}

export const isLarge = (nodes, edges) => nodes.length > MAX_SHOWN || depthOf(nodes.length, edges) > MAX_DEPTH;

// Return {groups, edges}: lists of the positions of nodes, and edges between groups. Nodes in `expanded` stay alone.
export function collapse(nodes, edges, expanded = new Set()) {
  let groupOf = nodes.map((_, index) => index);
  for (let round = 0; round < 20; round += 1) {
    const before = new Set(groupOf).size;
    groupOf = mergeAlike(nodes, edges, groupOf, expanded);
    groupOf = mergeChains(nodes, edges, groupOf, expanded);
    if (new Set(groupOf).size === before) break;
  }
  return gather(groupOf, edges);
}

function gather(groupOf, edges) {
  const places = new Map();
  const groups = [];
  groupOf.forEach((group, index) => {
    if (!places.has(group)) {
      places.set(group, groups.length);
      groups.push([]);
    }
    groups[places.get(group)].push(index);
  });
  const seen = new Set();
  const between = [];
  for (const [from, to, kind] of edges) {
    const ends = [places.get(groupOf[from]), places.get(groupOf[to])];
    const key = `${ends[0]} ${ends[1]} ${kind}`;
    if (ends[0] === ends[1] || seen.has(key)) continue;
    seen.add(key);
    between.push([...ends, kind]);
  }
  return { groups, edges: between };
}

function neighbours(groupOf, edges) {
  const parents = new Map();
  const children = new Map();
  for (const [from, to, kind] of edges) {
    const [a, b] = [groupOf[from], groupOf[to]];
    if (a === b) continue;
    if (!children.has(a)) children.set(a, new Set());
    if (!parents.has(b)) parents.set(b, new Set());
    children.get(a).add(`${b} ${kind}`);
    parents.get(b).add(`${a} ${kind}`);
  }
  return { parents, children };
}

const listed = (set) => (set ? [...set].sort().join(",") : "");

function mergeAlike(nodes, edges, groupOf, expanded) {
  const { parents, children } = neighbours(groupOf, edges);
  const first = new Map();
  const merged = new Map();
  for (const group of new Set(groupOf)) {
    if (expanded.has(group)) {
      merged.set(group, group);
      continue;
    }
    const key = `${nodes[group].role}|${listed(parents.get(group))}|${listed(children.get(group))}`;
    if (!first.has(key)) first.set(key, group);
    merged.set(group, first.get(key));
  }
  return groupOf.map((group, index) => (expanded.has(index) ? index : merged.get(group)));
}

function mergeChains(nodes, edges, groupOf, expanded) {
  const { parents, children } = neighbours(groupOf, edges);
  const only = (set) => (set && new Set([...set].map((each) => each.split(" ")[0])).size === 1 ? Number([...set][0].split(" ")[0]) : null);
  const root = new Map();
  const find = (group) => {
    let at = group;
    while (root.has(at)) at = root.get(at);
    return at;
  };
  const sizes = new Map();
  for (const group of groupOf) sizes.set(group, (sizes.get(group) || 0) + 1);
  for (const group of new Set(groupOf)) {
    const parent = only(parents.get(group));
    if (parent === null || only(children.get(parent)) !== group) continue;
    if (sizes.get(parent) !== sizes.get(group)) continue;
    if (nodes[parent].role !== nodes[group].role || expanded.has(parent) || expanded.has(group)) continue;
    const [a, b] = [find(parent), find(group)];
    if (a !== b) root.set(b, a);
  }
  return groupOf.map((group) => find(group));
}
