// Write one record. Sent under a producer id, so that "try again" after a lost answer cannot write it twice.

import { Problem, post } from "./api.js";
import { el, facts, field, problemBox, say, select, setText } from "./dom.js";
import { number } from "./format.js";
import { offerTopics } from "./tail.js";

const ENCODINGS = [["text", "Text"], ["base64", "Base64"], ["hex", "Hex"]];
const UNKNOWN = "OutcomeUnknown";

/** Producer id and next sequence of each partition this page has written to. */
const places = new Map();

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return `console-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** Under which number to send: the same as before only for the same record whose outcome is not known. */
function numbered(batch) {
  const key = `${batch.topic}:${batch.partition}`;
  const record = JSON.stringify(batch);
  let place = places.get(key);
  if (!place || (place.unknown !== null && place.unknown !== record)) {
    place = { id: newId(), next: 0, unknown: null };
    places.set(key, place);
  }
  return [place, record, { ...batch, producer_id: place.id, sequence: place.next }];
}

function encoded(text, encoding, name) {
  if (encoding === "text") return text;
  const plain = text.replace(/\s+/g, "");
  if (encoding === "base64") {
    try {
      atob(plain);
    } catch {
      throw new Problem(0, `${name} is no Base64`, "It cannot be decoded.", "letters, digits, + and /, padded with =");
    }
    return { base64: plain };
  }
  if (!/^([0-9a-f]{2})*$/i.test(plain)) throw new Problem(0, `${name} is no hex`, "It cannot be decoded.", "two digits per byte, as in 00 ff 7a");
  const letters = (plain.match(/../g) || []).map((pair) => String.fromCharCode(Number.parseInt(pair, 16)));
  return { base64: btoa(letters.join("")) };
}

export function produce(root, { query, life }) {
  const known = el("datalist", { id: "produce-topics" });
  const form = {
    topic: el("input", { list: "produce-topics", required: true, autocomplete: "off", spellcheck: "false", maxlength: 200, value: query.get("topic") || "" }),
    partition: el("input", { type: "number", min: 0, max: 99999, required: true, value: query.get("partition") || "0" }),
    key: el("input", { autocomplete: "off", spellcheck: "false" }),
    keyForm: select([["none", "No key"], ...ENCODINGS], "none"),
    value: el("textarea", { rows: 8, spellcheck: "false" }),
    valueForm: select(ENCODINGS, "text"),
  };
  const headers = el("div", { class: "header-rows" });
  const result = el("div", { "aria-live": "polite" });
  const send = el("button", { type: "submit", class: "main" }, "Produce");
  form.key.addEventListener("input", () => {
    if (form.key.value && form.keyForm.value === "none") form.keyForm.value = "text";
  });
  const add = el("button", { type: "button", onclick: () => addHeader(headers).querySelector("input").focus() }, "Add a header");
  const whole = el(
    "form",
    { class: "stack" },
    el("div", { class: "form" }, field("Topic", form.topic, "created if it is not there"), known, field("Partition", form.partition)),
    el("div", { class: "form" }, field("Key", form.key), field("Key as", form.keyForm)),
    el("div", { class: "form wide" }, field("Value", form.value), field("Value as", form.valueForm)),
    el("fieldset", {}, el("legend", {}, "Headers"), headers, add),
    el("div", { class: "row" }, send, el("span", { class: "quiet" }, "Ctrl Enter")),
  );
  root.append(el("h1", {}, "Produce a record"), whole, result);
  whole.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      whole.requestSubmit();
    }
  });
  whole.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (send.disabled) return;
    send.disabled = true;
    setText(send, "Sending…");
    try {
      await sent(batchOf(form, headers), result);
    } catch (error) {
      if (error.name !== "AbortError") result.replaceChildren(problemBox(error));
    } finally {
      send.disabled = false;
      setText(send, "Produce");
    }
  });
  offerTopics(known, life);
}

function addHeader(place) {
  const row = el("div", { class: "form header-row" },
    field("Name", el("input", { autocomplete: "off", spellcheck: "false" })),
    field("Value", el("input", { autocomplete: "off", spellcheck: "false" })),
    el("button", { type: "button", "aria-label": "Remove this header", onclick: () => row.remove() }, "Remove"));
  place.append(row);
  return row;
}

function batchOf(form, headers) {
  const batch = {
    topic: form.topic.value.trim(),
    partition: Number(form.partition.value),
    records: [encoded(form.value.value, form.valueForm.value, "Value")],
  };
  if (form.keyForm.value !== "none") batch.keys = [encoded(form.key.value, form.keyForm.value, "Key")];
  const pairs = [...headers.children].map((row) => [...row.querySelectorAll("input")].map((input) => input.value)).filter(([name]) => name !== "");
  if (pairs.length) batch.headers = [pairs];
  return batch;
}

async function sent(batch, result) {
  const [place, record, message] = numbered(batch);
  let answer;
  try {
    const found = await post("/produce", { topic_partitions: [message] }, { also: [409, 503] });
    [answer] = found.results;
  } catch (error) {
    if (error.status === 0 || error.type === UNKNOWN) {
      place.unknown = record;
      error.title = "It may have been written";
      error.hint = "press Produce again: the same record is written once at most";
    }
    throw error;
  }
  if (answer.ok) {
    place.next += 1;
    place.unknown = null;
    done(answer, result);
    return;
  }
  const problem = new Problem(409, answer.error_type, answer.error, answer.hint);
  if (answer.error_type === UNKNOWN) {
    place.unknown = record;
    problem.title = "It may have been written";
    problem.hint = "press Produce again: the same record is written once at most";
  }
  throw problem;
}

function done(answer, result) {
  const part = encodeURIComponent(answer.topic);
  const text = `Written at offset ${number(answer.start_offset)}`;
  result.replaceChildren(
    el("div", { class: "done" },
      el("strong", {}, `${text}${answer.duplicate ? ", and not a second time" : ""}.`),
      facts([["Topic", answer.topic], ["Partition", number(answer.partition)], ["Object", answer.wal_uri || "–"]]),
      el("a", { href: `#/tail?topic=${part}&partition=${answer.partition}&from=${answer.start_offset}` }, "See it in the live tail")),
  );
  say(text);
}
