"""Retention by age and by size, per topic."""

from __future__ import annotations

import random

import pytest
from tests.log.hand_log import HandLog, numbered

from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import Catalog, TopicSettings
from forebay.log._retention import Retention
from forebay.log._trim import Trimmer


class Clock(SystemClock):
    """Real sleeps, and a time that is set."""

    def __init__(self, now_ms: int) -> None:
        self.time_ms = now_ms

    def now_ms(self) -> int:
        return self.time_ms


async def kept(
    settings: TopicSettings, *, sizes: list[int], now_ms: int, compact: tuple[int, int] | None = None
) -> tuple[HandLog, Retention]:
    """A log with an append every second, from 1,000 on."""
    log = HandLog()
    for size in sizes:
        await log.append(numbered(log.control.sequence_counter, size))
        log.now_ms += 1_000
    if compact:
        await log.compact(*compact)
    clock, randomness = Clock(now_ms), random.Random(1)
    catalog = Catalog(log.store, log.coordinator, clock=clock, ids=IdSource(), randomness=randomness)
    await catalog.create("orders", partitions=1, settings=settings)
    trimmer = Trimmer(log.coordinator, clock=clock, randomness=randomness)
    return log, Retention(log.reader(), catalog, trimmer, clock=clock, randomness=randomness)


async def earliest(log: HandLog) -> int:
    return (await log.reader().offsets(*log.place)).earliest


@pytest.mark.parametrize(("age_ms", "expected"), [(10_000, 1), (3_500, 3), (1_000, 9), (500, 9), (499, 11)])
async def test_records_older_than_the_age_go(age_ms: int, expected: int) -> None:
    log, retention = await kept(TopicSettings(retention_ms=age_ms), sizes=[2] * 5, now_ms=5_500)
    report = await retention.run_once()
    assert await earliest(log) == expected
    assert report.records == expected - 1
    assert await log.everything() == numbered(expected, 11 - expected)


async def test_a_compacted_range_goes_only_when_its_newest_append_is_too_old() -> None:
    settings = TopicSettings(retention_ms=2_600)
    log, retention = await kept(settings, sizes=[2] * 5, now_ms=5_500, compact=(1, 8))
    await retention.run_once()
    assert await earliest(log) == 1
    log, retention = await kept(settings, sizes=[2] * 5, now_ms=6_700, compact=(1, 8))
    await retention.run_once()
    assert await earliest(log) == 9


async def test_the_oldest_entries_go_until_the_rest_fits() -> None:
    log, _ = await kept(TopicSettings(), sizes=[2] * 5, now_ms=0)
    pending = log.control.pending
    assert pending is not None and pending.byte_length is not None
    bound = pending.byte_length * 2
    log, retention = await kept(TopicSettings(retention_bytes=bound), sizes=[2] * 5, now_ms=0)
    await retention.run_once()
    assert await earliest(log) == 7


async def test_the_newest_entry_never_goes_by_size() -> None:
    log, retention = await kept(TopicSettings(retention_bytes=1), sizes=[2] * 5, now_ms=0)
    await retention.run_once()
    assert await log.everything() == numbered(9, 2)


async def test_a_topic_without_settings_keeps_everything() -> None:
    log, retention = await kept(TopicSettings(), sizes=[2] * 5, now_ms=10**12)
    assert (await retention.run_once()).trimmed == []
    assert await earliest(log) == 1


async def test_a_dry_run_says_and_does_nothing() -> None:
    log, retention = await kept(TopicSettings(retention_ms=1_000), sizes=[2] * 5, now_ms=5_500)
    report = await retention.run_once(dry_run=True)
    assert report.records == 8
    assert await earliest(log) == 1
    assert (await retention.run_once(topics=["others"])).records == 0


async def test_a_partition_that_fails_does_not_stop_the_others() -> None:
    log, retention = await kept(TopicSettings(retention_ms=1), sizes=[2] * 2, now_ms=10**6)
    catalog = Catalog(
        log.store, log.coordinator, clock=SystemClock(), ids=IdSource(), randomness=random.Random(1)
    )
    await catalog.create("broken", settings=TopicSettings(retention_ms=1))
    await log.coordinator.put("llog/broken/partitions/0/meta/control", b"{", partition_key="broken:0")
    report = await retention.run_once()
    assert list(report.failed) == ["broken:0"]
    assert await earliest(log) == 5


async def test_the_service_runs_passes() -> None:
    log, retention = await kept(TopicSettings(retention_ms=1), sizes=[2] * 2, now_ms=10**6)
    async with retention.service(interval_ms=3_600_000) as service:
        await service.trigger()
    assert await earliest(log) == 5
