// Looks at /metrics, kept while the page lives, and what follows from two of them.

import { get } from "./api.js";

const KEPT_MS = 300_000;
const WINDOW_MS = 30_000;
const LATE_MS = 10_000;

/** Failures of the server's making, and batches that were not taken. */
const BAD_OUTCOMES = new Set(["backpressure", "refused", "unknown"]);

const samples = [];
export const history = { "records in": [], "records out": [], "bytes in": [], "bytes out": [], p50: [], p99: [], errors: [], backpressure: [] };

const sum = (series, keep = () => true) =>
  (Array.isArray(series) ? series : [{ labels: {}, value: series || 0 }]).filter((one) => keep(one.labels)).reduce((total, one) => total + one.value, 0);

function digest(found) {
  return {
    at: performance.timeOrigin + performance.now(),
    started: found.broker.started_at_ms,
    id: found.broker.broker_id,
    recordsIn: sum(found.produce.records),
    bytesIn: sum(found.produce.bytes),
    recordsOut: sum(found.consume.records),
    bytesOut: sum(found.consume.bytes),
    requests: sum(found.http.requests),
    errors: sum(found.http.requests, (labels) => Number(labels.status) >= 400) + sum(found.produce.batches, (labels) => BAD_OUTCOMES.has(labels.outcome)),
    backpressure: sum(found.produce.batches, (labels) => labels.outcome === "backpressure"),
    paths: new Map((found.http.request_duration_seconds || []).map((one) => [one.labels.path, one])),
    statuses: found.http.requests || [],
    raw: found,
  };
}

/** A quantile of what came between two looks, from buckets that count upwards. */
export function quantile(now, before, share) {
  const count = now.count - (before ? before.count : 0);
  if (count <= 0) return null;
  let low = 0;
  let below = 0;
  for (let place = 0; place < now.buckets.length; place += 1) {
    const { le, count: upTo } = now.buckets[place];
    const here = upTo - (before ? before.buckets[place].count : 0);
    if (here >= share * count) return low + ((le - low) * (share * count - below)) / (here - below || 1);
    low = le;
    below = here;
  }
  return low;
}

/** Ask, remember, compare. */
export async function look(signal) {
  const now = digest(await get("/metrics", signal));
  const last = samples.at(-1);
  // Another process, or the same one started anew: its counters have nothing to do with the old ones.
  if (last && (last.started !== now.started || last.id !== now.id)) {
    samples.length = 0;
    for (const points of Object.values(history)) points.length = 0;
  }
  const before = samples.at(-1);
  samples.push(now);
  while (now.at - samples[0].at > KEPT_MS) samples.shift();
  const base = samples.find((one) => now.at - one.at <= WINDOW_MS && one !== now) || null;
  const rates = before && now.at - before.at < LATE_MS ? between(before, now) : null;
  const recent = base ? between(base, now) : null;
  remember(now, rates, base);
  return { now, base, recent };
}

function between(before, now) {
  const seconds = (now.at - before.at) / 1000;
  const names = ["recordsIn", "bytesIn", "recordsOut", "bytesOut", "requests", "errors", "backpressure"];
  return Object.fromEntries(names.map((name) => [name, Math.max(0, now[name] - before[name]) / seconds]));
}

function remember(now, rates, base) {
  const add = (name, value) => {
    history[name].push([now.at, value ?? null]);
    while (now.at - history[name][0][0] > KEPT_MS) history[name].shift();
  };
  add("records in", rates?.recordsIn);
  add("records out", rates?.recordsOut);
  add("bytes in", rates?.bytesIn);
  add("bytes out", rates?.bytesOut);
  add("errors", rates?.errors);
  add("backpressure", rates?.backpressure);
  const produce = now.paths.get("/produce");
  const earlier = base?.paths.get("/produce");
  add("p50", produce && base ? quantile(produce, earlier, 0.5) : null);
  add("p99", produce && base ? quantile(produce, earlier, 0.99) : null);
}
