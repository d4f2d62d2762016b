// One record, as text, as JSON or as hex. Long values are cut, and shown whole on request.

import { el } from "./dom.js";
import { hexDump, indentJson, isText, number, size, time, toBytes, toText } from "./format.js";

const CHARS_MAX = 4096;
const BYTES_MAX = 1024;

/** What is shown of some bytes: the text, whether it is all, and a word about it. */
function view(value, form, whole) {
  if (form === "hex") {
    const bytes = toBytes(value);
    return { text: hexDump(whole ? bytes : bytes.subarray(0, BYTES_MAX)), all: whole || bytes.length <= BYTES_MAX };
  }
  let text = toText(value);
  let note = isText(value) ? "" : "bytes that are no UTF-8; the hex view shows them";
  if (form === "json") {
    try {
      text = indentJson(text);
    } catch {
      note ||= "no JSON";
    }
  }
  return { text: whole ? text : text.slice(0, CHARS_MAX), all: whole || text.length <= CHARS_MAX, note };
}

export function recordNode(record, form) {
  const bytes = toBytes(record.value).length;
  const body = el("div", { class: "body" });
  const fill = (whole) => {
    const shown = view(record.value, form, whole);
    body.replaceChildren(
      shown.text === "" ? el("p", { class: "quiet" }, "empty value") : el("pre", {}, shown.text),
      shown.note ? el("p", { class: "quiet" }, shown.note) : "",
      shown.all ? "" : el("button", { type: "button", onclick: () => fill(true) }, `Show all ${size(bytes)}`),
    );
  };
  fill(false);
  return el(
    "li",
    { class: "record" },
    el("div", { class: "meta" },
      el("span", { class: "offset", title: `partition ${record.partition}` }, number(record.offset)),
      el("time", { datetime: stamp(record.timestamp_ms) }, time(record.timestamp_ms)),
      record.key === undefined || record.key === null ? null : el("span", { class: "key" }, el("span", { class: "quiet" }, "key "), el("bdi", {}, brief(record.key, form))),
      el("span", { class: "quiet" }, size(bytes))),
    (record.headers || []).length
      ? el("dl", { class: "headers" }, record.headers.map(([name, value]) => el("div", {}, el("dt", {}, el("bdi", {}, name)), el("dd", {}, value === null ? el("i", {}, "null") : el("bdi", {}, brief(value, form))))))
      : null,
    body,
  );
}

function stamp(ms) {
  const at = new Date(ms);
  return Number.isNaN(at.getTime()) ? null : at.toISOString();
}

const BRIEF_CHARS = 200;

function brief(value, form) {
  const text = form === "hex" || !isText(value) ? [...toBytes(value)].map((byte) => byte.toString(16).padStart(2, "0")).join(" ") : value;
  return text.length > BRIEF_CHARS ? `${text.slice(0, BRIEF_CHARS)}…` : text;
}
