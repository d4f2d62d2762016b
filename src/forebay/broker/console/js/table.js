// A table that is brought up to date in place: rows keep their elements, so focus and selection stay.

import { el, empty } from "./dom.js";

/** `columns`: {title, number, tight, cell(row)}; tight: on one line; a cell is a text or {text, href, label, kind, title}. */
export class Table {
  constructor({ caption, columns, key, none }) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = el("tbody");
    this.none = empty(none || "Nothing here yet.");
    this.none.hidden = true;
    const head = el("tr", {}, columns.map((column) => el("th", { scope: "col", class: classOf(column) }, column.title)));
    this.scroll = el(
      "div",
      { class: "scroll", role: "region", tabindex: "0", "aria-label": caption },
      el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, head), this.body),
    );
    this.node = el("div", { class: "tabled" }, this.scroll, this.none);
  }

  update(rows) {
    const kept = new Set();
    let before = this.body.firstChild;
    for (const row of rows) {
      const key = String(this.key(row));
      kept.add(key);
      let known = this.rows.get(key);
      if (!known) {
        known = { node: el("tr", {}, this.columns.map((column) => el("td", { class: classOf(column) }))), cells: [] };
        this.rows.set(key, known);
      }
      this.#cells(known, row);
      if (known.node !== before) this.body.insertBefore(known.node, before);
      else before = before.nextSibling;
    }
    for (const [key, known] of this.rows) {
      if (!kept.has(key)) {
        known.node.remove();
        this.rows.delete(key);
      }
    }
    this.none.hidden = rows.length > 0;
    this.scroll.hidden = rows.length === 0;
  }

  #cells(known, row) {
    this.columns.forEach((column, place) => {
      const found = column.cell(row);
      const cell = typeof found === "object" && found !== null ? found : { text: String(found) };
      const shape = JSON.stringify(cell);
      if (known.cells[place] === shape) return;
      known.cells[place] = shape;
      known.node.children[place].replaceChildren(drawn(cell));
    });
  }
}

const classOf = (column) => (column.number ? "number" : column.tight ? "tight" : null);

function drawn(cell) {
  if (cell.href) return el("a", { href: cell.href, title: cell.title, "aria-label": cell.label }, el("bdi", {}, cell.text));
  return el("bdi", { class: cell.kind ? `badge ${cell.kind}` : null, title: cell.title }, cell.text);
}
