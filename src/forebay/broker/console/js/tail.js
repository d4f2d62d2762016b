// Records as they come. Pausing ends the stream and remembers the place: nothing piles up anywhere.

import { Problem, events, get, paths } from "./api.js";
import { byId, el, empty, field, problemBox, say, select, setText } from "./dom.js";
import { number, plural } from "./format.js";
import { matcher } from "./filter.js";
import { recordNode } from "./record.js";

const KEPT_MAX = 2000;
const KEPT_BYTES_MAX = 16 * 1024 * 1024;
const SHOWN_MAX = 300;
const DRAW_MS = 100;
const RETRY_MS = [500, 1000, 2000, 5000];

const PLACES = [["latest", "new records only"], ["-100", "the last 100"], ["earliest", "the beginning"], ["offset", "an offset"]];
const FORMS = [["text", "Text"], ["json", "JSON"], ["hex", "Hex"]];

export function tail(root, { query, life }) {
  const known = el("datalist", { id: "tail-topics" });
  const from = query.get("from") || "latest";
  const isPlace = PLACES.some(([value]) => value === from);
  const form = {
    topic: el("input", { list: "tail-topics", required: true, autocomplete: "off", spellcheck: "false", value: query.get("topic") || "" }),
    partition: el("input", { type: "number", min: 0, max: 99999, value: query.get("partition") || "0" }),
    from: select(PLACES, isPlace ? from : "offset"),
    offset: el("input", { type: "number", min: 0, value: isPlace ? "" : from }),
  };
  const view = select(FORMS, query.get("view") || "text");
  const filter = el("input", { type: "search", autocomplete: "off", spellcheck: "false", placeholder: "text, or /regular expression/", value: query.get("filter") || "" });
  const start = el("button", { type: "submit", class: "main" }, "Start");
  const pause = el("button", { type: "button", disabled: true, "aria-keyshortcuts": "p" }, "Pause");
  const clear = el("button", { type: "button" }, "Clear");
  const state = el("span", { class: "state", role: "status" }, "Not started");
  const counts = el("span", { class: "quiet" });
  const wrong = el("p", { class: "hint", role: "alert" });
  const trouble = el("div");
  const list = el("ol", { class: "records", "aria-label": "Records, newest first" });
  const nothing = empty("Choose a topic and start. Records appear here as they are written, newest first.");
  const offsetField = field("Offset", form.offset);
  const shape = () => {
    offsetField.hidden = form.from.value !== "offset";
  };
  form.from.addEventListener("change", shape);
  shape();
  root.append(
    el("h1", {}, "Live tail"),
    el("form", { class: "form", onsubmit: begin }, field("Topic", form.topic), known, field("Partition", form.partition), field("From", form.from), offsetField, start),
    el("div", { class: "form bar" }, field("Filter", filter), field("Show as", view), pause, clear, el("div", { class: "states" }, state, counts)),
    wrong,
    trouble,
    nothing,
    list,
  );

  let kept = [];
  let bytes = 0;
  let seen = 0;
  let fresh = [];
  let timer = null;
  let test = () => true;
  let stream = null;
  let place = null;

  function begin(event) {
    event?.preventDefault();
    stream?.abort();
    forget();
    place = {
      topic: form.topic.value.trim(),
      partition: form.partition.value || "0",
      from: form.from.value === "offset" ? form.offset.value || "0" : form.from.value,
    };
    if (!place.topic) return form.topic.focus();
    const address = `#/tail?${new URLSearchParams({ ...place, view: view.value, filter: filter.value })}`;
    history.replaceState(null, "", address);
    return run();
  }

  async function run() {
    const mine = new AbortController();
    stream = mine;
    life.signal.addEventListener("abort", () => mine.abort(), { once: true });
    trouble.replaceChildren();
    pause.disabled = false;
    setText(pause, "Pause");
    for (let failures = 0; !mine.signal.aborted; ) {
      try {
        setText(state, "Connecting…");
        await events(paths.tail(place.topic, place.partition, place.from), {
          signal: mine.signal,
          onOpen() {
            failures = 0;
            trouble.replaceChildren();
            setText(state, "Live");
            state.dataset.kind = "live";
            waitingText();
          },
          onEvent: take,
        });
      } catch (error) {
        if (mine.signal.aborted || error.name === "AbortError") return;
        const lasting = error instanceof Problem && error.status >= 400 && error.status < 500 && error.status !== 429;
        if (lasting) return stopped(error);
        if (!(error instanceof Problem) && !(error instanceof TypeError)) console.error(error);
      }
      if (mine.signal.aborted) return;
      delete state.dataset.kind;
      setText(state, "Connection lost, trying again…");
      const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
      failures += 1;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  function stopped(error) {
    stream?.abort();
    stream = null;
    delete state.dataset.kind;
    setText(state, "Stopped");
    setText(pause, "Resume");
    trouble.replaceChildren(problemBox(error));
  }

  function toggle() {
    if (pause.disabled) return;
    if (stream && !stream.signal.aborted) {
      stream.abort();
      stream = null;
      delete state.dataset.kind;
      setText(state, "Paused");
      setText(pause, "Resume");
    } else run();
  }

  function take(event) {
    if (event.type === "error") {
      const { error } = JSON.parse(event.data);
      return stopped(new Problem(409, error.type, error.message, error.hint, error.request_id));
    }
    const record = JSON.parse(event.data);
    record.bytes = event.data.length;
    place.from = String(record.offset + 1);
    seen += 1;
    kept.push(record);
    bytes += record.bytes;
    while (kept.length > KEPT_MAX || (bytes > KEPT_BYTES_MAX && kept.length > 1)) bytes -= kept.shift().bytes;
    if (test(record)) fresh.push(record);
    timer ??= setTimeout(draw, DRAW_MS);
    return undefined;
  }

  function draw() {
    timer = null;
    const added = fresh.slice(-SHOWN_MAX).reverse();
    fresh = [];
    list.prepend(...added.map((record) => recordNode(record, view.value)));
    while (list.children.length > SHOWN_MAX) list.lastChild.remove();
    waitingText();
  }

  function waitingText() {
    nothing.hidden = list.children.length > 0;
    if (!nothing.hidden) setText(nothing.firstChild, kept.length ? "No record matches the filter." : "Waiting for records.");
    const matching = kept.length && filter.value ? `, ${number(kept.filter(test).length)} match` : "";
    setText(counts, `${plural(seen, "record")} seen, ${number(kept.length)} kept${matching}`);
  }

  function again() {
    setText(wrong, "");
    try {
      test = matcher(filter.value);
    } catch (error) {
      setText(wrong, `The filter is no regular expression: ${error.message}`);
      return;
    }
    fresh = [];
    const shown = kept.filter(test).slice(-SHOWN_MAX).reverse();
    list.replaceChildren(...shown.map((record) => recordNode(record, view.value)));
    if (place) waitingText();
  }

  function forget() {
    kept = [];
    fresh = [];
    bytes = 0;
    seen = 0;
    list.replaceChildren();
    if (place) waitingText();
  }

  filter.addEventListener("input", again);
  view.addEventListener("change", again);
  pause.addEventListener("click", toggle);
  clear.addEventListener("click", () => {
    forget();
    say("Cleared");
  });
  document.addEventListener("console:pause", toggle, { signal: life.signal });
  life.signal.addEventListener("abort", () => clearTimeout(timer));
  offerTopics(known, life);
  again();
  if (form.topic.value) begin();
  else byId("main").querySelector("input")?.focus();
}

/** Names of topics for an input; without them it still works. */
export async function offerTopics(list, life) {
  try {
    const { topics } = await get("/topics", life.signal);
    list.replaceChildren(...topics.map(({ topic }) => el("option", { value: topic })));
    return topics;
  } catch {
    return [];
  }
}
