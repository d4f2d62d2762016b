"""Numbers of a run: what clients saw, whether brokers grew, and samples rolled up to thirty seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.loadtest._scenario import Scenario

__all__ = ["client_summary", "client_windows", "memory_growth", "metrics_windows", "together", "warnings_of"]

WINDOW_S = 30.0
"""Seconds of a line in the rolled up files."""
GENERATOR_BUSY = 0.9
"""Share of a core above which a generator is thought to hold the run back."""
BEHIND_S = 0.5
"""Seconds that a paced generator may be late before its latencies are doubted."""
GREW_SHARE, GREW_BYTES = 0.10, 32 << 20
"""Growth of a broker's memory that is worth a warning: both of them."""
SETTLED = 0.25
"""Part of a run after which a broker's memory should not grow: caches and pools are full by then."""
NINES = (0.0, 0.301, 0.602, 1.0, 1.301, 2.0, 2.301, 3.0)
"""Where the chart of percentiles has points: 0, 50, 75, 90, 95, 99, 99.5 and 99.9 percent."""


def client_summary(
    scenario: Scenario, ledger: Mapping[str, npt.NDArray[Any]], ends: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What clients meant, were told, and spent."""
    acked = ledger["outcome"] == 0
    latencies = np.sort(ledger["latency_s"][acked]) * 1000
    wall_s = max([scenario.duration_s, *(each["wall_s"] for each in ends)])
    records = int(ledger["count"][acked].sum())
    meant = int(ledger["count"].sum())
    cpu_s = sum(each["cpu_s"] for each in ends)
    share = max([each["cpu_s"] / each["wall_s"] for each in ends], default=0.0)
    return {
        "processes": scenario.processes,
        "requests": len(ledger["outcome"]),
        "requests_acked": len(latencies),
        "attempts": int(ledger["attempts"].sum()),
        "records_meant": meant,
        "records_acked": records,
        "bytes_meant": meant * scenario.record_bytes,
        "bytes_acked": records * scenario.record_bytes,
        "wall_s": wall_s,
        "records_per_s": records / wall_s,
        "mb_per_s": records * scenario.record_bytes / wall_s / 1e6,
        "latency_ms": {
            name: _percentile(latencies, part)
            for name, part in (("p50", 50), ("p95", 95), ("p99", 99), ("p999", 99.9), ("max", 100))
        },
        "percentiles_ms": {str(nines): _percentile(latencies, 100 - 100 / 10**nines) for nines in NINES},
        "cpu_s": cpu_s,
        "cpu_share": share,
        "cpu_us_per_record": cpu_s * 1e6 / max(records, 1),
        "generator_is_bottleneck": share > GENERATOR_BUSY,
        "behind_s": max([each["behind_s"] for each in ends], default=0.0),
    }


def warnings_of(
    scenario: Scenario, client: Mapping[str, Any], memory: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What makes the numbers doubtful, or a broker."""
    found = []
    if client["generator_is_bottleneck"]:
        found.append(f"the generator is the bottleneck: {client['cpu_share']:.0%} of a core; add processes")
    if scenario.rate_bytes_per_s and client["behind_s"] > BEHIND_S:
        late = client["behind_s"]
        found.append(f"the offered rate was not reached: requests began up to {late:.1f} s late")
    for name, each in memory.items():
        if each["grew"]:
            grown = each["growth_bytes"] / 2**20
            found.append(f"the memory of {name} grew by {grown:.0f} MiB after the first quarter of the run")
    return found


def _percentile(latencies: npt.NDArray[np.float64], share: float) -> float:
    return float(np.percentile(latencies, share)) if len(latencies) else 0.0


def memory_growth(samples: Sequence[Mapping[str, Any]], duration_s: float) -> dict[str, dict[str, Any]]:
    """Resident bytes of each broker: what it had when it was settled, what it had in the end."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({each["broker"] for each in samples}):
        own = [each for each in samples if each["broker"] == name and "rss_bytes" in each]
        own = [each for each in own if 0 <= each["t_s"] <= duration_s]
        settled = [each["rss_bytes"] for each in own if SETTLED <= each["t_s"] / duration_s < 2 * SETTLED]
        late = [each["rss_bytes"] for each in own if each["t_s"] / duration_s >= 1 - SETTLED]
        if not settled or not late:
            continue
        before, after = float(np.median(settled)), float(np.median(late))
        growth = after - before
        found[name] = {
            "settled_bytes": int(before),
            "end_bytes": int(after),
            "max_bytes": int(max(each["rss_bytes"] for each in own)),
            "growth_bytes": int(growth),
            "growth_share": growth / before,
            "grew": growth > GREW_BYTES and growth / before > GREW_SHARE,
        }
    return found


# -- roll-ups


def client_windows(samples: Sequence[Mapping[str, Any]], record_bytes: int) -> list[dict[str, Any]]:
    """A line per thirty seconds over all generators; of percentiles the worst, which bounds that of all."""
    return [
        {
            "t_s": (number + 1) * WINDOW_S,
            **{
                name: sum(each[name] for each in group)
                for name in ("requests", "acked_records", "failed_records", "unknown_records")
            },
            "acked_bytes": sum(each["acked_records"] for each in group) * record_bytes,
            **{f"worst_{name}": _worst(group, name) for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms")},
            "cpu_s": sum(_last_by(group, "process", "cpu_s").values()),
        }
        for number, group in _windows(samples)
    ]


def metrics_windows(
    samples: Sequence[Mapping[str, Any]], hosts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A line per thirty seconds: the last that brokers, their processes and the machine told in it."""
    machine = dict(_windows(hosts))
    lines = []
    for number, group in _windows(samples):
        last = {each["broker"]: dict(each) for each in group}
        host = machine.get(number, [{}])[-1]
        lines.append({"t_s": (number + 1) * WINDOW_S, "brokers": list(last.values()), "host": dict(host)})
    return lines


def _windows(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[Mapping[str, Any]]]]:
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for each in samples:
        groups.setdefault(max(0, int(each["t_s"] // WINDOW_S)), []).append(each)
    return sorted(groups.items())


def _last_by(group: Sequence[Mapping[str, Any]], key: str, name: str) -> dict[Any, float]:
    return {each[key]: each[name] for each in group}


def _worst(group: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max([each[name] for each in group if each.get(name) is not None], default=None)


def together(samples: Sequence[Mapping[str, Any]], every_s: float, record_bytes: int) -> list[dict[str, Any]]:
    """The samples of all processes, step by step; the worst of their percentiles."""
    by_time: dict[int, list[Mapping[str, Any]]] = {}
    for each in samples:
        by_time.setdefault(round(each["t_s"] / every_s), []).append(each)
    return [
        {
            "t_s": step * every_s,
            "mb_per_s": sum(each["acked_records"] for each in group) * record_bytes / every_s / 1e6,
            **{name: _worst(group, name) for name in ("p50_ms", "p95_ms", "p99_ms")},
        }
        for step, group in sorted(by_time.items())
    ]
