// Elements made by calls. Data only ever becomes text nodes and attributes: there is no markup made of it.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

/** Change a text only where it differs: selections and screen readers are left in peace. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Tell those who cannot see it. */
export function say(text) {
  setText(byId("said"), text);
}

let labels = 0;

/** A labelled control. */
export function field(label, control, hint) {
  const id = control.id || `field-${++labels}`;
  control.id = id;
  const children = [el("label", { for: id }, label), control];
  if (hint) {
    children.push(el("span", { class: "quiet", id: `${id}-hint` }, hint));
    control.setAttribute("aria-describedby", `${id}-hint`);
  }
  return el("div", { class: "field" }, ...children);
}

export function select(options, chosen, attributes) {
  return el(
    "select",
    attributes,
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)),
  );
}

/** Names and values as a list. Values are texts or nodes. */
export function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** An error, readable: what, why, what to do. */
export function problemBox(problem) {
  return el(
    "div",
    { class: "problem", role: "alert" },
    el("strong", {}, problem.title || problem.type || "Error"),
    el("p", {}, problem.message),
    problem.hint ? el("p", { class: "hint" }, `What to do: ${problem.hint}`) : null,
    problem.requestId ? el("p", { class: "quiet" }, `Request ${problem.requestId}`) : null,
  );
}

export function empty(text, ...more) {
  return el("div", { class: "empty" }, el("p", {}, text), ...more);
}

/** A card with one number. `set` changes it. */
export function card(name, note) {
  const value = el("output", { class: "value" }, "–");
  const small = el("span", { class: "quiet" }, note || "");
  const node = el("div", { class: "card" }, el("span", { class: "name" }, name), value, small);
  return {
    node,
    set(text, more) {
      setText(value, text);
      if (more !== undefined) setText(small, more);
    },
  };
}
