// <glass-tree>: the tree of a beam search, grown from left to right; the hypotheses that won are drawn strong.

import { fill, scrolled, svg } from "./dom.js";
import { four } from "./format.js";

const ACROSS = 74;
const DOWN = 26;
const LEFT = 64;
const LONGEST = 6; // signs of a word in its box
const brief = (word) => ([...word].length > LONGEST ? `${[...word].slice(0, LONGEST - 1).join("")}…` : word);

/** Rows by node: a row for each leaf, top down; a node has the row of its first child. */
function layout(nodes) {
  const children = new Map();
  nodes.forEach(({ parent }, index) => {
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(index);
  });
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

customElements.define("glass-tree", class extends HTMLElement {
  /** {nodes: [{parent, word, position, probability, finish}], best: leaves, best first} */
  set data({ nodes, best }) {
    if (!nodes.length) { fill(this); return; }
    const { rows, count } = layout(nodes);
    const path = (leaf) => (leaf === undefined || leaf < 0 ? [] : [leaf, ...path(nodes[leaf].parent)]);
    const [first, winners] = [new Set(path(best[0])), new Set(best.flatMap(path))];
    const x = (node) => (node < 0 ? 14 : LEFT + ACROSS * (nodes[node].position - 1));
    const root = nodes.findIndex(({ parent }) => parent < 0);
    const y = (node) => 18 + DOWN * rows[node < 0 ? root : node];
    const kind = (node) =>
      (first.has(node) ? "first" : winners.has(node) ? "won" : best.length ? "lost" : "open");
    const depth = Math.max(...nodes.map(({ position }) => position));
    const [width, height] = [LEFT + ACROSS * depth + 12, 12 + DOWN * count];
    const edge = ({ parent }, node) => {
      const [from, to, above, at] = [x(parent) + (parent < 0 ? 6 : 22), x(node), y(parent), y(node)];
      const d = `M${from} ${above}C${to - 26} ${above} ${to - 44} ${at} ${to - 22} ${at}`;
      return svg("path", { class: `edge ${kind(node)}`, d });
    };
    const box = ({ word, probability, finish }, node) => svg("g",
      { class: `node ${kind(node)}`, transform: `translate(${x(node)} ${y(node)})` },
      svg("title", {}, `${word}, probability ${four(probability)}${finish ? `, ended by ${finish}` : ""}`),
      svg("rect", { x: -22, y: -10, width: 44, height: 20, rx: 5 }),
      svg("text", { x: 0, y: 4, "text-anchor": "middle" }, brief(word)),
      finish && svg("path", { class: "end", d: "M26 -5v10" }));
    const told = `Tree of the search: ${nodes.length} kept tokens, ${depth} deep, ${best.length} hypotheses`;
    fill(this, scrolled("Beam tree", svg("svg",
      { role: "img", "aria-label": `${told}; the table lists them`, width, height, viewBox: `0 0 ${width} ${height}` },
      svg("circle", { cx: 14, cy: y(-1), r: 5, class: "root" }), nodes.map(edge), nodes.map(box))));
  }
});
