// Small charts of SVG, made by calls. Colours come from classes, so that they follow the theme.

import { el, setText, svg } from "./dom.js";

const WIDTH = 480;
const HEIGHT = 130;
const LEFT = 76;
const TOP = 10;
const BOTTOM = 20;
const GAP_MS = 8000;
const MINUTE_MS = 60_000;
const SPAN_MAX_MS = 5 * MINUTE_MS;
const STEPS = [1, 2, 2.5, 5, 10];

/** The next round number: of bytes a round number of KiB, MiB and so on. */
function ceiling(value, base) {
  if (!(value > 0)) return base === 10 ? 1 : base;
  const unit = base ** Math.max(0, Math.floor(Math.log(value) / Math.log(base)));
  const scale = unit * 10 ** Math.floor(Math.log10(value / unit));
  return scale * STEPS.find((step) => step * scale >= value * 0.999);
}

/** Lines over time. `update` takes {name: [[ms, value or null], ...]}. */
export class LineChart {
  constructor({ title, names, format, base = 10 }) {
    this.names = names;
    this.format = format;
    this.base = base;
    this.plot = svg("g");
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": title }, this.plot);
    this.values = names.map(() => el("output", {}, "–"));
    this.title = title;
    const legend = el(
      "figcaption",
      {},
      el("strong", {}, title),
      names.map((name, place) => el("span", { class: `legend s${place}` }, `${name} `, this.values[place])),
    );
    this.node = el("figure", { class: "figure" }, legend, this.picture);
  }

  update(series) {
    const all = this.names.map((name) => series[name] || []);
    const latest = Math.max(0, ...all.map((points) => (points.length ? points.at(-1)[0] : 0)));
    const oldest = Math.min(latest, ...all.flatMap((points) => (points.length ? [points[0][0]] : [])));
    const span = Math.min(SPAN_MAX_MS, Math.max(1, Math.ceil((latest - oldest) / MINUTE_MS)) * MINUTE_MS);
    const from = latest - span;
    const visible = all.map((points) => points.filter(([at]) => at >= from));
    const top = ceiling(Math.max(0, ...visible.flat().map(([, value]) => value ?? 0)), this.base);
    const across = (at) => LEFT + ((at - from) / span) * (WIDTH - LEFT - 6);
    const up = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    const nodes = [0, 0.5, 1].flatMap((share) => [
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 6, y1: up(top * share), y2: up(top * share) }),
      svg("text", { x: LEFT - 6, y: up(top * share) + 4, "text-anchor": "end" }, this.format(top * share)),
    ]);
    nodes.push(svg("text", { x: LEFT, y: HEIGHT - 4 }, `${span / MINUTE_MS} min ago`));
    nodes.push(svg("text", { x: WIDTH - 6, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
    visible.forEach((points, place) => nodes.push(...lines(points, place, across, up)));
    this.plot.replaceChildren(...nodes);
    const told = this.names.map((name, place) => {
      const value = all[place].length ? all[place].at(-1)[1] : null;
      const text = value === null ? "–" : this.format(value);
      setText(this.values[place], text);
      return `${name} ${text}`;
    });
    this.picture.setAttribute("aria-label", `${this.title}: ${told.join(", ")}`);
  }
}

function lines(points, place, across, up) {
  const runs = [];
  let run = [];
  let last = -Infinity;
  for (const [at, value] of points) {
    if ((value === null || at - last > GAP_MS) && run.length) {
      runs.push(run);
      run = [];
    }
    if (value !== null) run.push(`${across(at).toFixed(1)},${up(value).toFixed(1)}`);
    last = at;
  }
  if (run.length) runs.push(run);
  return runs.map((found) =>
    found.length === 1
      ? svg("circle", { class: `dot s${place}`, cx: found[0].split(",")[0], cy: found[0].split(",")[1], r: 2 })
      : svg("polyline", { class: `line s${place}`, points: found.join(" ") }),
  );
}

/** A share of a bar, for tables and states. */
export function meter(share, text) {
  const width = Math.max(0, Math.min(1, share)) * 100;
  return svg(
    "svg",
    { viewBox: "0 0 100 8", preserveAspectRatio: "none", class: "meter", role: "img", "aria-label": text },
    svg("rect", { class: "rest", width: 100, height: 8 }),
    svg("rect", { class: "done", width, height: 8 }),
  );
}
