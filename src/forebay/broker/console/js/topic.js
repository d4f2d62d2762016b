// One topic: its settings and its partitions.

import { each, get, paths, post } from "./api.js";
import { el, facts, problemBox, say, setText } from "./dom.js";
import { duration, number, plural, size, time } from "./format.js";
import { Table } from "./table.js";
import { retention } from "./topics.js";

const LOOK_MS = 5000;
const SIZES_MS = 20_000;
const PAGE = 200;

export function topic(root, { params, life }) {
  const name = params.topic;
  const part = encodeURIComponent(name);
  const trouble = el("div");
  const damage = el("div");
  const about = el("div");
  const sizes = new Map();
  const states = new Map();
  const more = el("button", { type: "button", hidden: true }, "Show more partitions");
  let rows = [];
  let shown = PAGE;
  const table = partitionTable(part, sizes, states);
  const draw = () => {
    table.update(rows.slice(0, shown));
    more.hidden = rows.length <= shown;
  };
  more.addEventListener("click", () => {
    shown += PAGE;
    draw();
    document.dispatchEvent(new CustomEvent("console:refresh"));
  });
  root.append(
    el("p", { class: "crumbs" }, el("a", { href: "#/topics" }, "Topics"), " / "),
    el("h1", {}, el("bdi", {}, name)),
    trouble,
    damage,
    el("div", { class: "row" },
      el("a", { class: "button", href: `#/tail?topic=${part}&partition=0&from=-100` }, "Live tail"),
      el("a", { class: "button", href: `#/produce?topic=${part}` }, "Produce"),
      compactButton({ topic: name }, life)),
    about,
    el("h2", {}, "Partitions"),
    table.node,
    more,
  );

  life.every(LOOK_MS, trouble, async () => {
    const found = await get(paths.topic(name), life.signal);
    rows = found.offsets || [];
    damage.replaceChildren(...(found.problems || []).map((message) => problemBox({ type: "Damaged", message })));
    if (!about.firstChild) about.append(settings(found));
    const compaction = await get(`/compaction?${new URLSearchParams({ topic: name })}`, life.signal);
    for (const one of compaction.partitions) states.set(one.partition, one);
    draw();
  });
  life.every(SIZES_MS, el("div"), async () => {
    const numbers = rows.length ? rows.slice(0, shown) : (await get(paths.topic(name), life.signal)).offsets || [];
    await each(numbers.slice(0, shown), async ({ partition }) => {
      sizes.set(partition, await get(`${paths.partition(name, partition, "objects")}?limit=0`, life.signal));
    });
    draw();
  });
}

function settings(found) {
  const kept = found.settings;
  return facts([
    ["Partitions", number(found.partitions)],
    ["Retention", retention(kept)],
    ["Compaction", kept.compaction ? `after ${duration(kept.compact_min_age_ms / 1000)}, objects of ${size(kept.target_bytes)}` : "off"],
    ["Created", time(found.created_at_ms)],
    ["Id", found.topic_id],
  ]);
}

function partitionTable(part, sizes, states) {
  return new Table({
    caption: "Partitions",
    key: (row) => row.partition,
    columns: [
      { title: "Partition", number: true, cell: (row) => ({ text: number(row.partition), href: `#/topics/${part}/${row.partition}`, label: `Partition ${row.partition}` }) },
      { title: "State", cell: (row) => logState(row.log_state) },
      { title: "Epoch", number: true, cell: (row) => number(row.epoch) },
      { title: "Earliest", number: true, cell: (row) => number(row.earliest) },
      { title: "Next", number: true, cell: (row) => number(row.next) },
      { title: "Records", number: true, cell: (row) => number(row.records) },
      { title: "Size", number: true, cell: (row) => sizeOf(sizes.get(row.partition)) },
      { title: "Entries", number: true, cell: (row) => number(sizes.get(row.partition)?.entries) },
      { title: "Compaction cursor", number: true, cell: (row) => number(states.get(row.partition)?.cursor) },
      { title: "Compaction lag", number: true, cell: (row) => number(states.get(row.partition)?.lag_records) },
      { title: "Compaction", cell: (row) => compactionState(states.get(row.partition)?.state) },
    ],
  });
}

const sizeOf = (found) => (found ? `${found.complete ? "" : "> "}${size(found.bytes)}` : "–");

export const logState = (state) => ({ text: state.toLowerCase(), kind: state === "OPEN" ? "good" : "warn" });

export const compactionState = (state) => (state ? { text: state.toLowerCase().replaceAll("_", " "), kind: "on" } : { text: "idle", kind: "" });

/** A button that runs one pass of compaction, and says what came of it. */
export function compactButton(message, life) {
  const result = el("span", { role: "status" });
  const button = el("button", { type: "button" }, "Compact now");
  button.addEventListener("click", async () => {
    button.disabled = true;
    setText(result, "Compacting…");
    try {
      const { partitions } = await post("/compaction", message, { signal: life.signal });
      const failed = partitions.filter((one) => one.error);
      const records = partitions.reduce((total, one) => total + one.records, 0);
      const why = partitions.find((one) => one.reason)?.reason;
      if (failed.length) setText(result, `${plural(failed.length, "partition")} failed: ${failed[0].error}`);
      else if (records) setText(result, `${plural(records, "record")} compacted.`);
      else setText(result, `Nothing to compact${why ? `: ${why}` : ""}.`);
      document.dispatchEvent(new CustomEvent("console:refresh"));
    } catch (error) {
      if (error.name === "AbortError") return;
      result.replaceChildren(problemBox(error));
      say(error.message);
    } finally {
      button.disabled = false;
    }
  });
  return [button, result];
}
