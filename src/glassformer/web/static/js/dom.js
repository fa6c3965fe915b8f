// How nodes are made: text only ever enters a page as text.
// el("button", {class: "quiet", onclick: f, "aria-pressed": true, disabled: false}, "Run", child)

const SVG = "http://www.w3.org/2000/svg";

function apply(node, props) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.setAttribute("class", value);
    else if (name === "value" && "value" in node) node.value = value;
    else if (name === "style") throw new Error("styles are classes, or node.style.x = …");
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  return node;
}

/** Children: nodes, strings, numbers, nested lists; null and false are left out. */
export function put(node, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function el(tag, props, ...children) {
  const node = put(document.createElement(tag), ...children);
  return apply(node, props); // after the children, so that a select's value finds its option
}

export function svg(tag, props, ...children) {
  return apply(put(document.createElementNS(SVG, tag), ...children), props);
}

/** Nodes of a tree that the server made: [tag, attributes, inside …]; text stays text. */
export function build([tag, props, ...inside], make = el) {
  const own = tag === "svg" ? svg : make;
  return own(tag, props, inside.map((each) => (typeof each === "string" ? each : build(each, own))));
}

/** Replace what a node holds. */
export function fill(node, ...children) {
  node.replaceChildren();
  return put(node, ...children);
}

let ids = 0;
export const fresh = (stem) => `${stem}-${++ids}`;

/** A labelled control: the label is a real label. */
export function field(label, control, { hint, hidden = false } = {}) {
  control.id ||= fresh("field");
  return el("div", { class: "field" },
    el("label", { for: control.id, class: hidden ? "visually-hidden" : null }, label),
    control, hint && el("span", { class: "hint" }, hint));
}

/** options: [[value, text], …] or plain strings; a value that is none of them is one more. */
export function select(options, value, onchange, props) {
  const known = !value || options.some((each) => value === (Array.isArray(each) ? each[0] : each));
  const made = (known ? options : [value, ...options]).map((each) => {
    const [key, text] = Array.isArray(each) ? each : [each, each];
    return el("option", { value: key }, text);
  });
  return el("select", { ...props, value, onchange: (event) => onchange?.(event.target.value) }, made);
}

export function check(label, checked, onchange, props) {
  const box = el("input", { ...props, type: "checkbox", onchange: (event) => onchange(event.target.checked) });
  box.checked = checked;
  return el("label", { class: "check" }, box, el("span", {}, label));
}

/** A real table. head: [text | {text, n: true}], rows: [[cell, …]]; a cell is text, a node or a list. */
export function table({ caption, head, rows, props }) {
  const columns = head.map((each) => (typeof each === "object" ? each : { text: each }));
  const kind = (index) => (columns[index]?.n ? "n" : null);
  return el("table", { class: "data", ...props },
    el("caption", { class: "visually-hidden" }, caption),
    el("thead", {}, el("tr", {}, columns.map((each, index) =>
      el("th", { scope: "col", class: kind(index) }, each.text)))),
    el("tbody", {}, rows.map((row) => (row instanceof Node ? row : el("tr", {},
      row.map((cell, index) => el(index ? "td" : "th", { class: kind(index), scope: index ? null : "row" }, cell)))))));
}

/** Enter that sends what was written: not with Shift, and not the one that ends a composed sign. */
export const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

/** A bar of a share 0 … 1 of its place. */
export function meter(share, kind = "") {
  const bar = el("span", { class: `meter ${kind}` });
  bar.style.width = `${100 * Math.max(0, share ?? 0)}%`;
  return bar;
}

/** Something is on its way: said to the eye, and to a screen reader. */
export function busy(node, on) {
  node.classList.toggle("busy", on);
  node.setAttribute("aria-busy", on);
}

/** A box that scrolls, and that a keyboard can reach. */
export const scrolled = (label, ...children) =>
  el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, children);

/** A part of a page under its heading. */
export const panel = (name, title, ...children) =>
  el("section", { class: `panel ${name}`, "aria-labelledby": `${name}-title` },
    title instanceof Node ? title : el("h2", { id: `${name}-title` }, title), children);

/** The head of a column of numbers. */
export const right = (text) => ({ text, n: true });

/** The head of a column that needs none to be understood by the eye. */
export const silent = (text) => ({ text: el("span", { class: "visually-hidden" }, text) });

/** What a page shows where there is no run. */
export const nothingYet = () =>
  el("p", { class: "empty" }, "No run is here yet. ", el("code", {}, "glass train digits"),
  " makes one; ", el("a", { href: "#/design" }, "Design"), " needs none.");

/** The box in which an error is shown: what, where, hint. */
export function alertBox(error, dismiss) {
  return el("div", { class: "alert", role: "alert" },
    el("div", {}, el("strong", {}, error.what ?? error.message ?? String(error)),
      error.where && el("p", { class: "where" }, error.where),
      error.hint && el("p", { class: "hint" }, error.hint)),
    dismiss && el("button", { type: "button", class: "quiet", onclick: dismiss, "aria-label": "Dismiss" }, "✕"));
}
