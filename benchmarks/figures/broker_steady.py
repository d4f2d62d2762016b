"""Ten minutes at 70 % of the peak: a broker that does not grow, and an account that is exact.

It is `loadtest/steady.toml`, run as `forebay bench run` does: a broker on a directory and two generators as
processes of their own. The peak is measured first. Every record that was acknowledged is then looked for in
the log, at its offset. One run gives all figures; a quick one takes seconds and shows only that it works.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, CannotMeasure, Figure, Measure, Sample, Variant, Variants, at_most
from forebay.loadtest import Run, load_scenario

__all__ = ["broker_steady"]

SCENARIO = Path(__file__).resolve().parent.parent.parent / "loadtest" / "steady.toml"
QUICK_S = 8.0
BYTES_PER_S_MAX = 120_000_000
"""What a run may write: decides how long one may take where the disk is small."""
KEPT_FREE_BYTES = 2 << 30
"""What of the disk stays free."""
GROWTH_SHARE = 10.0
"""Percent by which a broker's memory may differ between the second and the last quarter of a run."""


@suite.benchmark(
    "broker-steady",
    "At 70 % of the peak for ten minutes nothing is lost, nothing is written twice, and no memory grows.",
    Figure("records lost, twice or misplaced", of="faults", target=at_most(0.0), measure=Measure.PLAIN),
    Figure("differences in the account", of="differences", target=at_most(0.0), measure=Measure.PLAIN),
    Figure("growth of memory, %", of="growth", target=at_most(GROWTH_SHARE), measure=Measure.PLAIN),
    Figure("rate, MB/s", of="rate", measure=Measure.PLAIN),
    Figure("minutes", of="minutes", measure=Measure.PLAIN),
    jobs=True,
)
def broker_steady(bench: Bench) -> Iterator[Variants]:
    """One run before the first turn; turns only tell what came of it."""
    scenario = load_scenario(SCENARIO)
    room_s = (shutil.disk_usage(bench.directory).free - KEPT_FREE_BYTES) / BYTES_PER_S_MAX
    seconds = QUICK_S if bench.quick else min(scenario.duration_s, room_s)
    if seconds < QUICK_S:
        raise CannotMeasure("the disk has no room for a run")
    scenario = dataclasses.replace(scenario, duration_s=seconds, peak_s=min(scenario.peak_s, seconds))
    summary = asyncio.run(Run(scenario, bench.directory, bench.say).run())
    account = summary["reconciliation"]
    faults = sum(account[name] for name in ("lost", "misplaced", "duplicated", "resurrected", "strangers"))
    growth = max((each["growth_share"] for each in summary["memory"].values()), default=0.0)

    def told(value: float, unit: str) -> Variant:
        return Variant(lambda _: Sample(value), unit)

    yield {
        "faults": told(faults, "records"),
        "differences": told(len(account["differences"]), "differences"),
        "growth": told(max(0.0, 100 * growth), "%"),
        "rate": told(summary["client"]["mb_per_s"], "MB/s"),
        "minutes": told(summary["client"]["wall_s"] / 60, "min"),
    }
