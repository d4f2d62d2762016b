// Which records are shown.

import { toText } from "./format.js";

const EXPRESSION = /^\/(.*)\/([a-z]*)$/s;

function texts(record) {
  const headers = (record.headers || []).flatMap(([name, value]) => [name, value === null ? "" : toText(value)]);
  return [record.key === undefined || record.key === null ? "" : toText(record.key), toText(record.value), ...headers];
}

/** A test of records from what somebody typed: a text in any case, or /an expression/. Raises where it is none. */
export function matcher(typed) {
  const expression = EXPRESSION.exec(typed);
  if (expression) {
    const pattern = new RegExp(expression[1], expression[2].replace(/[gy]/g, ""));
    return (record) => texts(record).some((text) => pattern.test(text));
  }
  const wanted = typed.toLowerCase();
  return wanted === "" ? () => true : (record) => texts(record).some((text) => text.toLowerCase().includes(wanted));
}
