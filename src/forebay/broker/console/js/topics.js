// The topics, with a filter.

import { each, get, paths } from "./api.js";
import { el, field, setText } from "./dom.js";
import { duration, number, plural, size, time } from "./format.js";
import { Table } from "./table.js";

const DETAILS_MAX = 50;
const LOOK_MS = 5000;

export function topics(root, { life }) {
  const trouble = el("div");
  const filter = el("input", { type: "search", autocomplete: "off", spellcheck: "false" });
  const count = el("p", { class: "quiet", role: "status" });
  const details = new Map();
  let found = [];
  const table = new Table({
    caption: "Topics",
    key: (row) => row.topic_id,
    none: "No topics. The first record that is produced to a topic creates it.",
    columns: [
      { title: "Topic", cell: (row) => ({ text: row.topic, href: `#/topics/${encodeURIComponent(row.topic)}` }) },
      { title: "Partitions", number: true, cell: (row) => number(row.partitions) },
      { title: "Records", number: true, cell: (row) => number(details.get(row.topic)?.records) },
      { title: "State", cell: (row) => stateOf(row, details.get(row.topic)) },
      { title: "Retention", tight: true, cell: (row) => retention(row.settings) },
      { title: "Compaction", cell: (row) => (row.settings.compaction ? "on" : "off") },
      { title: "Created", tight: true, cell: (row) => time(row.created_at_ms).slice(0, 16) },
    ],
  });
  const draw = () => {
    const wanted = filter.value.trim().toLowerCase();
    const rows = found.filter((row) => row.topic.toLowerCase().includes(wanted));
    table.update(rows);
    setText(count, rows.length === found.length ? plural(found.length, "topic") : `${number(rows.length)} of ${plural(found.length, "topic")}`);
    return rows;
  };
  filter.addEventListener("input", draw);
  root.append(el("h1", {}, "Topics"), trouble, el("div", { class: "form" }, field("Filter by name", filter), count), table.node);

  life.every(LOOK_MS, trouble, async () => {
    found = (await get("/topics", life.signal)).topics.sort((one, other) => (one.topic < other.topic ? -1 : 1));
    const rows = draw().slice(0, DETAILS_MAX);
    await each(rows, async (row) => {
      const { offsets = [] } = await get(paths.topic(row.topic), life.signal);
      details.set(row.topic, {
        records: offsets.reduce((total, one) => total + one.records, 0),
        fenced: offsets.filter((one) => one.log_state !== "OPEN").length,
      });
    });
    draw();
  });
}

function stateOf(row, detail) {
  if (detail?.fenced) return { text: `${number(detail.fenced)} fenced`, kind: "warn" };
  return { text: row.state.toLowerCase(), kind: row.state.toLowerCase() === "active" ? "good" : "" };
}

export function retention(settings) {
  const parts = [];
  if (settings.retention_ms) parts.push(duration(settings.retention_ms / 1000));
  if (settings.retention_bytes) parts.push(size(settings.retention_bytes));
  return parts.join(", ") || "forever";
}
