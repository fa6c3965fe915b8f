// <glass-tree>: the tree of a beam search, grown from left to right; the hypotheses that won are drawn strong.

import { el, fill, svg } from "./dom.js";
import { fixed } from "./format.js";

const ACROSS = 74;
const DOWN = 26;
const LEFT = 64;

/** A row for each leaf, top down; a node stands where its first child does. */
function places(nodes) {
  const children = new Map();
  nodes.forEach(({ parent }, index) => { if (!children.has(parent)) children.set(parent, []); children.get(parent).push(index); });
  const rows = new Array(nodes.length).fill(0);
  let next = 0;
  const stack = [...(children.get(-1) ?? [])].reverse();
  const order = [];
  while (stack.length) {
    const node = stack.pop();
    order.push(node);
    if (children.has(node)) stack.push(...[...children.get(node)].reverse());
    else rows[node] = next++;
  }
  for (const node of order.reverse()) if (children.has(node)) rows[node] = rows[children.get(node)[0]];
  return { rows, count: next };
}

export class GlassTree extends HTMLElement {
  /** {nodes: [{parent, word, place, probability, finish}], best: leaves, best first} */
  set data({ nodes, best }) {
    if (!nodes.length) { fill(this); return; }
    const { rows, count } = places(nodes);
    const winners = new Set();
    for (const leaf of best) for (let node = leaf; node >= 0; node = nodes[node].parent) winners.add(node);
    const first = new Set();
    for (let node = best[0] ?? -1; node >= 0; node = nodes[node].parent) first.add(node);
    const x = (node) => (node < 0 ? 14 : LEFT + ACROSS * (nodes[node].place - 1));
    const root = nodes.findIndex(({ parent }) => parent < 0);
    const y = (node) => 18 + DOWN * rows[node < 0 ? root : node];
    const kind = (node) => (first.has(node) ? "first" : winners.has(node) ? "won" : best.length ? "lost" : "open");
    const depth = Math.max(...nodes.map(({ place }) => place));
    const [width, height] = [LEFT + ACROSS * depth + 12, 12 + DOWN * count];
    const edges = nodes.map((node, index) => svg("path", { class: `edge ${kind(index)}`,
      d: `M${x(node.parent) + (node.parent < 0 ? 6 : 22)} ${y(node.parent)}C${x(index) - 26} ${y(node.parent)} ${x(index) - 44} ${y(index)} ${x(index) - 22} ${y(index)}` }));
    const words = nodes.map((node, index) => svg("g", { class: `node ${kind(index)}`, transform: `translate(${x(index)} ${y(index)})` },
      svg("title", {}, `${node.word}, probability ${fixed(node.probability, 4)}${node.finish ? `, ended by ${node.finish}` : ""}`),
      svg("rect", { x: -22, y: -10, width: 44, height: 20, rx: 5 }),
      svg("text", { x: 0, y: 4, "text-anchor": "middle" }, node.word.length > 6 ? `${node.word.slice(0, 5)}…` : node.word),
      node.finish && svg("text", { x: 26, y: 4, class: "end" }, "⏹")));
    const told = `Tree of the search: ${nodes.length} kept tokens, ${depth} deep, ${best.length} hypotheses; the table lists them`;
    fill(this, el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Beam tree" },
      svg("svg", { role: "img", "aria-label": told, width, height, viewBox: `0 0 ${width} ${height}` }, svg("circle", { cx: 14, cy: y(-1), r: 5, class: "root" }), edges, words)));
  }
}

customElements.define("glass-tree", GlassTree);
