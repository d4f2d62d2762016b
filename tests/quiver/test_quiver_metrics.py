"""Every metric has a row in the documentation, and every name that the design gives is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.kit.metrics import MetricsRegistry
from forebay.quiver._metrics import QuiverMetrics
from forebay.testing.world import World

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "quiver.md"

DESIGN = {
    "quiver.gc.evictions_total": ("reason",),
    "quiver.retention.size_emergency_total": (),
    "quiver.ingest.throttle_total": (),
    "quiver.subscriber.dropped_segments_total": ("subscriber",),
    "quiver.segment.dropped_total": (),
    "quiver.core.bytes": ("core_id",),
    "quiver.core.cap_fraction": (),
    "quiver.open_segment.bytes": (),
    "quiver.acklog.records_since_checkpoint": (),
    "quiver.subscriber.gap_set_size": ("subscriber",),
    "quiver.wal.unsynced_bytes": (),
    "quiver.wal.unsynced_age_seconds": (),
    "quiver.wal.fsync_seconds": (),
    "quiver.wal.bytes": (),
    "quiver.wal.group_size": (),
    "quiver.wal.replayed_entries_total": (),
    "quiver.segment.finalize_seconds": (),
    "quiver.segment.finalize_failures_total": (),
    "quiver.segment.quarantined_total": (),
    "quiver.recovery.damaged_total": ("kind",),
    "quiver.acklog.bytes": (),
    "quiver.acklog.checkpoint_age_seconds": (),
    "quiver.subscriber.lag_segments": ("subscriber",),
    "quiver.subscriber.oldest_pending_age_seconds": ("subscriber",),
    "quiver.subscriber.orphaned_pinned_bytes": ("subscriber",),
    "quiver.disk.bytes_actual": (),
    "quiver.disk.bytes_accounted": (),
    "quiver.clock.jump_total": (),
}


def families() -> dict[str, tuple[str, ...]]:
    registry = MetricsRegistry()
    QuiverMetrics(registry)
    return {each.name: each.label_names for each in registry.families() if each.name.startswith("quiver.")}


@pytest.mark.parametrize("name", DESIGN)
def test_metric_that_the_design_names_is_there_with_its_labels(name: str) -> None:
    assert families()[name] == DESIGN[name]


def test_table_of_metrics_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(quiver\.[a-z_.]+)(?:\{([a-z_, ]+)\})?` \|", PAGE.read_text(), re.MULTILINE)
    documented = {name: tuple(labels.split(", ")) if labels else () for name, labels in rows}
    assert documented == families()


def test_gauges_of_a_removed_subscriber_go_with_it() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SMALL) as quiver:
            await quiver.register("a")
            await quiver.register("b")
            await quiver.ingest(batch(1))
            assert await drain(quiver, "a") == [1]
            quiver._gauge()
            lag = quiver._metrics.lag
            assert {key: series.value for key, series in lag.series()} == {("a",): 0, ("b",): 1}
            await quiver.unregister("b")
            quiver._gauge()
            assert [key for key, _ in lag.series()] == [("a",)]

    simulate(scenario)
