"""Every metric has a row in the documentation, and every name that the design gives is there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.kit.metrics import MetricsRegistry
from forebay.kit.metrics_views import prometheus_text
from forebay.quiver import QuiverFull
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


SEED = {
    'quiver_gc_evictions_total{reason="size"}',
    "quiver_retention_size_emergency_total",
    "quiver_ingest_throttle_total",
    'quiver_subscriber_dropped_segments_total{subscriber="a"}',
    'quiver_subscriber_dropped_segments_total{subscriber="b"}',
    "quiver_segment_dropped_total",
    'quiver_core_bytes{core_id="0"}',
    "quiver_core_cap_fraction",
    "quiver_open_segment_bytes",
    "quiver_acklog_records_since_checkpoint",
    'quiver_subscriber_gap_set_size{subscriber="a"}',
}
"""What the seed names, as a scrape shows it."""


def test_page_for_prometheus_has_every_name_of_the_seed_with_a_figure_that_moves() -> None:
    registry = MetricsRegistry()
    cap = dataclasses.replace(SMALL, size_cap_bytes=262_144, wal_spare_files=0)

    async def dropping(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(cap, size_cap_policy="drop_oldest")
        async with store(world, disk, config, metrics=registry) as quiver:
            for name in ("a", "b"):
                await quiver.register(name)
            held = None
            for number in range(150):
                await quiver.ingest(batch(number, 60))
                await quiver.flush()
                if number == 0:
                    held = await quiver.next("a", 0)
                if number == 1 and (second := await quiver.next("a", 0)) is not None:
                    await second.ack()
                    quiver._gauge()
                    found = samples(registry)
                    assert found['quiver_subscriber_gap_set_size{subscriber="a"}'] == 1
                    assert held is not None
                    await held.ack()
            await quiver.ingest(batch(1_000))
            quiver._gauge()

    async def refusing(world: World, disk: SimDisk) -> None:
        async with store(world, disk, cap, metrics=registry) as quiver:
            await quiver.register("a")
            with pytest.raises(QuiverFull):
                for number in range(1_000):
                    await quiver.ingest(batch(number, 60))

    simulate(dropping)
    found = samples(registry)
    still = {name for name in SEED if not found.get(name)}
    assert still == {"quiver_ingest_throttle_total", 'quiver_subscriber_gap_set_size{subscriber="a"}'}
    simulate(refusing)
    assert samples(registry)["quiver_ingest_throttle_total"] == 1


def samples(registry: MetricsRegistry) -> dict[str, float]:
    lines = [line for line in prometheus_text(registry).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


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
