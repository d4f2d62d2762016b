// Overview: how much, how fast, what goes wrong, what it costs, who this is.

import { get } from "./api.js";
import { LineChart } from "./chart.js";
import { card, el, facts, setText } from "./dom.js";
import { dollars, duration, number, plural, rate, size, time } from "./format.js";
import { history, look, quantile } from "./samples.js";
import { Table } from "./table.js";

const LOOK_MS = 2000;
const COST_MS = 5000;

export function overview(root, { life }) {
  const trouble = el("div");
  const costTrouble = el("div");
  const cards = {
    in: card("Records in", "per second"),
    out: card("Records out", "per second"),
    latency: card("Produce p99", "last 30 s"),
    errors: card("Errors", "per second"),
    pending: card("Not yet durable"),
    cost: card("Cost per month", "requests at the current rate"),
  };
  const charts = {
    records: new LineChart({ title: "Records per second", names: ["in", "out"], format: rate }),
    bytes: new LineChart({ title: "Bytes per second", names: ["in", "out"], format: size, base: 1024 }),
    latency: new LineChart({ title: "Produce latency", names: ["p50", "p99"], format: duration }),
    errors: new LineChart({ title: "Errors per second", names: ["errors", "backpressure"], format: rate }),
  };
  const who = el("div");
  const paths = pathTable();
  const cost = costTable();
  const basis = el("p", { class: "quiet" });
  root.append(
    el("h1", {}, "Overview"),
    trouble,
    el("section", { class: "cards", "aria-label": "Now" }, Object.values(cards).map((one) => one.node)),
    el("section", { class: "charts", "aria-label": "Last five minutes" }, Object.values(charts).map((one) => one.node)),
    el("div", { class: "columns" },
      el("section", {}, el("h2", {}, "Cost by flush interval"), costTrouble, cost.node, basis),
      el("section", {}, el("h2", {}, "This broker"), who)),
    el("section", {}, el("h2", {}, "Requests by path"), paths.node),
  );

  life.every(LOOK_MS, trouble, async () => {
    const seen = await look(life.signal);
    showNow(cards, seen);
    charts.records.update({ in: history["records in"], out: history["records out"] });
    charts.bytes.update({ in: history["bytes in"], out: history["bytes out"] });
    charts.latency.update(history);
    charts.errors.update(history);
    paths.update(pathRows(seen));
    showBroker(who, seen.now.raw);
  });
  // The first rates need two looks: do not let people wait for the second.
  const soon = setTimeout(() => document.dispatchEvent(new CustomEvent("console:refresh")), 700);
  life.signal.addEventListener("abort", () => clearTimeout(soon));
  life.every(COST_MS, costTrouble, async () => {
    const found = await get("/cost", life.signal);
    cards.cost.set(dollars(found.dollars_per_month), `by the last ${duration(Math.round(found.window_seconds))}`);
    cost.update(found.intervals);
    setText(basis, `Requests of this broker to the store, by ${found.basis}; storage and traffic are not in it. The line marked “now” is measured, the others are estimates: a longer interval makes fewer, larger objects, and every acknowledgement waits for it.`);
  });
}

function showNow(cards, { now, base, recent }) {
  const produce = now.paths.get("/produce");
  const raw = now.raw;
  cards.in.set(rate(recent?.recordsIn), recent ? `${size(recent.bytesIn)}/s` : "per second");
  cards.out.set(rate(recent?.recordsOut), recent ? `${size(recent.bytesOut)}/s` : "per second");
  const p99 = produce && base ? quantile(produce, base.paths.get("/produce"), 0.99) : null;
  cards.latency.set(duration(p99), p99 === null && base ? "nothing was produced lately" : "last 30 s");
  cards.errors.set(rate(recent?.errors), `${number(now.errors)} since the start`);
  cards.pending.set(size(raw.batcher.pending_bytes), `accepted, ${plural(raw.batcher.pending_groups ?? 0, "batch", "batches")}`);
}

function showBroker(place, raw) {
  const { broker, batch, http, wal } = raw;
  const pairs = [
    ["Broker", broker.broker_id],
    ["Roles", broker.roles.join(", ")],
    ["Address", `${broker.host}:${broker.port}`],
    ["Version", broker.version],
    ["Started", `${time(broker.started_at_ms)} (${duration(broker.uptime_seconds)} ago)`],
    ["Flush", `after ${number(batch.batch_max_delay_ms)} ms or ${size(batch.batch_max_bytes)}`],
    ["Connections", number(http.connections)],
    ["Objects written", `${number(wal.blobs)}, ${size(wal.bytes)}`],
    ["Waiting readers", number(raw.consume.waiting)],
  ];
  const dl = place.firstChild;
  if (!dl) place.append(facts(pairs));
  else pairs.forEach(([, value], at) => setText(dl.children[at].lastChild, value));
}

function costTable() {
  return new Table({
    caption: "Cost by flush interval",
    key: (row) => row.batch_max_delay_ms,
    none: "This broker does not write: it flushes nothing.",
    columns: [
      { title: "Flush after", number: true, cell: (row) => ({ text: duration(row.batch_max_delay_ms / 1000), kind: row.current ? "on" : "" }) },
      { title: "Flushes/s", number: true, cell: (row) => rate(row.flushes_per_second) },
      { title: "Cost per month", number: true, cell: (row) => dollars(row.dollars_per_month) },
      { title: "", cell: (row) => (row.current ? { text: "now", kind: "on", title: "The setting of this broker: measured" } : "") },
    ],
  });
}

function pathTable() {
  return new Table({
    caption: "Requests by path",
    key: (row) => row.path,
    none: "No requests yet.",
    columns: [
      { title: "Path", cell: (row) => row.path },
      { title: "Requests", number: true, cell: (row) => number(row.requests) },
      { title: "4xx", number: true, cell: (row) => number(row.refused) },
      { title: "5xx", number: true, cell: (row) => ({ text: number(row.failed), kind: row.failed ? "bad" : "" }) },
      { title: "p50", number: true, cell: (row) => duration(row.p50) },
      { title: "p95", number: true, cell: (row) => duration(row.p95) },
      { title: "p99", number: true, cell: (row) => duration(row.p99) },
    ],
  });
}

function pathRows({ now }) {
  const found = new Map();
  for (const { labels, value } of now.statuses) {
    const row = found.get(labels.path) || { path: labels.path, requests: 0, refused: 0, failed: 0 };
    const status = Number(labels.status);
    row.requests += value;
    if (status >= 500) row.failed += value;
    else if (status >= 400) row.refused += value;
    found.set(labels.path, row);
  }
  for (const [path, row] of found) {
    const spread = now.paths.get(path);
    for (const name of ["p50", "p95", "p99"]) row[name] = spread?.count ? spread[name] : null;
  }
  return [...found.values()].filter((row) => !row.path.startsWith("/console")).sort((one, other) => other.requests - one.requests);
}
