"""A run as one page: numbers, what does not fit, and charts. No script, no library, nothing from outside."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

__all__ = ["html_report", "line_chart"]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 260, 64, 34, 16, 150
COLOURS = ("#2563eb", "#16a34a", "#d97706", "#dc2626", "#7c3aed", "#0891b2")
_STYLE = """
:root{color-scheme:light dark;--ink:#111;--paper:#fff;--rule:#d4d4d8;--soft:#71717a;--bad:#b91c1c;
--good:#15803d}
@media(prefers-color-scheme:dark){:root{--ink:#eee;--paper:#18181b;--rule:#3f3f46;--soft:#a1a1aa;--bad:#f87171;
--good:#4ade80}}
body{font:15px/1.5 system-ui,sans-serif;max-width:920px;margin:2rem auto;padding:0 1rem;color:var(--ink);
background:var(--paper)}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse}
td,th{padding:.2rem .9rem .2rem 0;text-align:right;border-bottom:1px solid var(--rule)}
td:first-child,th:first-child{text-align:left}.bad{color:var(--bad)}.good{color:var(--good)}
svg{width:100%;height:auto}svg text{fill:var(--soft);font:11px system-ui,sans-serif}
svg .rule{stroke:var(--rule);stroke-width:1}pre{white-space:pre-wrap}
"""

SHARES = ((0.0, "0 %"), (0.301, "50 %"), (1.0, "90 %"), (2.0, "99 %"), (3.0, "99.9 %"))
"""Where the axis of percentiles has marks: equal steps are equal numbers of nines."""

Line = tuple[str, Sequence[tuple[float, float]]]


def html_report(
    summary: dict[str, Any], samples: Sequence[dict[str, Any]], brokers: Sequence[dict[str, Any]]
) -> str:
    """The page of a run, from its summary and the samples of clients and brokers."""
    account, client = summary["reconciliation"], summary["client"]
    verdict = (
        '<p class="good">Reconciliation exact: what clients were told, what brokers counted and what is '
        "in the log agree.</p>"
        if account["exact"]
        else '<p class="bad">Reconciliation found differences:</p><ul class="bad">'
        + "".join(f"<li>{html.escape(each)}</li>" for each in account["differences"])
        + "</ul>"
    )
    notes = "".join(f'<p class="bad">{html.escape(each)}</p>' for each in summary["warnings"])
    rows = [
        ("throughput", f"{client['mb_per_s']:.1f} MB/s, {client['records_per_s']:,.0f} records/s"),
        ("acknowledged", f"{account['records_acked']:,} records"),
        ("failed / unknown", f"{account['records_failed']:,} / {account['records_unknown']:,}"),
        ("in the log", f"{account['records_in_log']:,} records"),
        *((name, f"{client['latency_ms'][name]:.1f} ms") for name in ("p50", "p95", "p99", "p999", "max")),
        ("generator CPU", f"{client['cpu_share']:.0%} of a core, busiest of {client['processes']} processes"),
        *(
            (
                f"memory of {name}",
                f"{_mib(each['settled_bytes'])} settled, {_mib(each['end_bytes'])} at the end",
            )
            for name, each in summary["memory"].items()
        ),
    ]
    table = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows
    )
    charts = [
        ("Throughput", line_chart(_throughput(samples), "MB/s")),
        ("Latency over time", line_chart(_latency(samples), "ms")),
        ("Latency by percentile", line_chart(_percentiles(client["percentiles_ms"]), "ms", SHARES)),
        ("Brokers: processor time", line_chart(_brokers(brokers), "cores")),
        ("Brokers: memory", line_chart(_memory(brokers), "MiB")),
    ]
    body = "".join(f"<h2>{name}</h2>{chart}" for name, chart in charts)
    name = html.escape(summary["run"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"<h1>{name}</h1>{verdict}{notes}<table>{table}</table>{body}</html>\n"
    )


def _throughput(samples: Sequence[dict[str, Any]]) -> list[Line]:
    return [("acknowledged", [(each["t_s"], each["mb_per_s"]) for each in samples])]


def _latency(samples: Sequence[dict[str, Any]]) -> list[Line]:
    return [
        (name, [(each["t_s"], each[f"{name}_ms"]) for each in samples if each.get(f"{name}_ms") is not None])
        for name in ("p50", "p95", "p99")
    ]


def _percentiles(found: dict[str, float]) -> list[Line]:
    points = [(float(nines), value) for nines, value in found.items()]
    return [("all requests", points)]


def _brokers(samples: Sequence[dict[str, Any]]) -> list[Line]:
    lines: dict[str, list[tuple[float, float]]] = {}
    last: dict[str, tuple[float, float]] = {}
    for each in samples:
        name, now = each["broker"], each.get("cpu_s")
        if now is None:
            continue
        if name in last and each["t_s"] > last[name][0]:
            share = (now - last[name][1]) / (each["t_s"] - last[name][0])
            lines.setdefault(name, []).append((each["t_s"], share))
        last[name] = (each["t_s"], now)
    return list(lines.items())


def _memory(samples: Sequence[dict[str, Any]]) -> list[Line]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in samples:
        if "rss_bytes" in each and each["t_s"] >= 0:
            lines.setdefault(each["broker"], []).append((each["t_s"], each["rss_bytes"] / 2**20))
    return list(lines.items())


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def line_chart(lines: Sequence[Line], unit: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    """A chart as SVG, with these marks across or with seconds. Without points it says so."""
    points = [point for _, line in lines for point in line]
    if not points:
        return "<p>No samples.</p>"
    x_max = max(1e-9, *(x for x, _ in points))
    y_max = _nice(max(1e-9, *(y for _, y in points)))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + x / x_max * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y / y_max * (HEIGHT - BOTTOM - TOP),
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for step in range(5):
        _, y = place(0, y_max * step / 4)
        parts.append(f'<line class="rule" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_max * step / 4:g}</text>')
    for at, label in marks or [(x_max * step / 4, f"{x_max * step / 4:.3g} s") for step in range(5)]:
        x, _ = place(at, 0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{label}</text>')
    for number, (name, line) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        y = TOP + 14 + number * 16
        label = f"{html.escape(name)} ({unit})"
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{y}" style="fill:{colour}">{label}</text>')
    return "".join([*parts, "</svg>"])


def _nice(value: float) -> float:
    """The next round number."""
    scale = 10.0 ** (len(f"{int(value)}") - 1) if value >= 1 else 0.1
    for step in (1, 2, 4, 5, 8, 10):
        if step * scale >= value:
            return step * scale
    return 10 * scale
