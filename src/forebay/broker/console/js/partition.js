// One partition: its ends, its compaction, its objects, and where a record lies.

import { get, paths } from "./api.js";
import { meter } from "./chart.js";
import { card, el, facts, field, setText } from "./dom.js";
import { number, plural, size, time } from "./format.js";
import { Table } from "./table.js";
import { compactButton } from "./topic.js";

const LOOK_MS = 5000;
const PAGE = 50;

export function partition(root, { params, life }) {
  const { topic, partition: place } = params;
  const part = encodeURIComponent(topic);
  const trouble = el("div");
  const cards = {
    state: card("State"),
    records: card("Records"),
    size: card("Size"),
    lag: card("Compaction lag"),
  };
  const compaction = el("section");
  const table = objectTable();
  const from = el("input", { type: "number", min: 0, inputmode: "numeric", placeholder: "earliest" });
  const next = el("button", { type: "button" }, "Next page");
  const first = el("button", { type: "button" }, "First page");
  let start = null;
  let following = null;
  root.append(
    el("p", { class: "crumbs" }, el("a", { href: "#/topics" }, "Topics"), " / ", el("a", { href: `#/topics/${part}` }, el("bdi", {}, topic)), " / "),
    el("h1", {}, `Partition ${place}`),
    trouble,
    el("div", { class: "row" },
      el("a", { class: "button", href: `#/tail?topic=${part}&partition=${encodeURIComponent(place)}&from=-100` }, "Live tail"),
      el("a", { class: "button", href: `#/produce?topic=${part}&partition=${encodeURIComponent(place)}` }, "Produce"),
      compactButton({ topic, partition: Number(place) }, life)),
    el("section", { class: "cards", "aria-label": "Now" }, Object.values(cards).map((one) => one.node)),
    compaction,
    el("h2", {}, "Objects"),
    el("form", { class: "form", onsubmit: (event) => go(event, from.value === "" ? null : from.value) },
      field("From offset", from), el("button", { type: "submit" }, "Show"), first, next),
    table.node,
    explainSection(topic, place, life),
  );
  const refresh = () => document.dispatchEvent(new CustomEvent("console:refresh"));
  function go(event, offset) {
    event?.preventDefault();
    start = offset;
    refresh();
  }
  first.addEventListener("click", () => {
    from.value = "";
    go(null, null);
  });
  next.addEventListener("click", () => {
    from.value = following;
    go(null, following);
  });

  life.every(LOOK_MS, trouble, async () => {
    const base = paths.partition(topic, place, "objects");
    const whole = await get(`${base}?limit=${start === null ? PAGE : 0}`, life.signal);
    const page = start === null ? whole : await get(`${base}?${new URLSearchParams({ from: start, limit: PAGE })}`, life.signal);
    following = page.next_from ?? null;
    next.disabled = following === null;
    first.disabled = start === null;
    table.update(page.objects);
    showCards(cards, whole);
    compaction.replaceChildren(...compactionNodes(whole));
  });
}

function showCards(cards, found) {
  const shared = found.complete ? "" : "at least, ";
  cards.state.set(found.log_state.toLowerCase(), `epoch ${number(found.epoch)}`);
  cards.records.set(number(found.next - found.earliest), `offsets ${number(found.earliest)} to ${number(found.next - 1)}`);
  if (found.next <= found.earliest) cards.records.set("0", `next offset ${number(found.next)}`);
  cards.size.set(size(found.bytes), `${shared}in ${plural(found.entries, "entry", "entries")}, ${size(found.compacted_bytes)} compacted`);
  cards.lag.set(number(found.lag_records), `from offset ${number(found.cursor)} on`);
}

function compactionNodes(found) {
  const total = found.next - found.earliest;
  const done = Math.max(0, Math.min(found.cursor, found.next) - found.earliest);
  const share = total > 0 ? done / total : 0;
  const text = `${number(done)} of ${plural(total, "record")} compacted`;
  const nodes = [el("h2", {}, "Compaction"), meter(share, text), el("p", { class: "quiet" }, total > 0 ? text : "Nothing to compact.")];
  const now = found.compaction;
  if (now) {
    nodes.push(facts([
      ["Under way", now.state.toLowerCase().replaceAll("_", " ")],
      ["Offsets", `${number(now.start_offset)} to ${number(now.end_offset)}`],
      ["Begun", time(now.created_at_ms)],
      ["Object", now.object],
    ]));
  }
  return nodes;
}

function objectTable() {
  return new Table({
    caption: "Objects",
    key: (row) => `${row.end_offset} ${row.object} ${row.source}`,
    none: "No objects: nothing was written to this partition, or nothing from this offset on.",
    columns: [
      { title: "Offsets", number: true, cell: (row) => (row.records === 1 ? number(row.end_offset) : `${number(row.start_offset)} – ${number(row.end_offset)}`) },
      { title: "Records", number: true, cell: (row) => number(row.records) },
      { title: "Kind", cell: (row) => kindOf(row) },
      { title: "Size", number: true, cell: (row) => size(row.bytes) },
      { title: "Written", tight: true, cell: (row) => time(row.created_at_ms) },
      { title: "By", tight: true, cell: (row) => row.writer || "–" },
      { title: "Object", tight: true, cell: (row) => ({ text: shortened(row.object), title: row.object }) },
    ],
  });
}

function kindOf(row) {
  if (row.stale) return { text: `${row.source.toLowerCase()}, stale`, kind: "warn", title: "Covered by a compacted range, or trimmed" };
  return { text: row.source.toLowerCase(), kind: row.source === "COMPACTED" ? "good" : "" };
}

const TAIL_CHARS = 37;
const shortened = (uri) => (uri.length > TAIL_CHARS ? `…${uri.slice(-TAIL_CHARS)}` : uri);

function explainSection(topic, place, life) {
  const offset = el("input", { type: "number", min: 0, required: true, inputmode: "numeric" });
  const result = el("div", { "aria-live": "polite" });
  const form = el("form", { class: "form" }, field("Offset", offset), el("button", { type: "submit" }, "Where is it?"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const found = await get(`${paths.partition(topic, place, "explain")}?${new URLSearchParams({ offset: offset.value })}`, life.signal);
      result.replaceChildren(facts([
        ["Object", found.object],
        ["Bytes", `${number(found.byte_length)} from ${number(found.byte_offset)}`],
        ["Batch", `offsets ${number(found.batch_start)} to ${number(found.batch_end)}, ${found.source.toLowerCase()}`],
        ["Committed", time(found.committed_at_ms)],
        ["Written by", found.writer || "not known after compaction"],
        ["Value", `${number(found.value_bytes)} bytes, ${found.key_bytes === null ? "no key" : `key of ${number(found.key_bytes)} bytes`}`],
      ]));
    } catch (error) {
      setText(result, "");
      life.fail(result, error);
    }
  });
  return el("section", {}, el("h2", {}, "Where a record lies"), form, result);
}
