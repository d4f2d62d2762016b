from __future__ import annotations

import asyncio
import dataclasses
import errno
from typing import Literal

import pytest
from tests.quiver.harness import SMALL, batch, drain, numbers, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import UsageError
from forebay.kit.metrics import Histogram, MetricsRegistry
from forebay.quiver import Delivery, Quiver, QuiverConfig, QuiverFull, SubscriberStats, UnknownSubscriber
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000)


async def segments(quiver: Quiver, count: int, *, since: int = 0) -> None:
    """One segment for each number."""
    for number in range(since, since + count):
        await quiver.ingest(batch(number))
        await quiver.flush()


async def take(quiver: Quiver, name: str) -> Delivery:
    delivery = await quiver.next(name, 1)
    assert delivery is not None
    return delivery


def stats_of(quiver: Quiver, name: str) -> SubscriberStats:
    [found] = [each for each in quiver.stats().subscribers if each.name == name]
    return found


def test_start_position_is_what_was_asked_for() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("pin")
            await segments(quiver, 3)
            await quiver.register("all", "earliest")
            await quiver.register("new", "latest")
            await quiver.register("some", 2)
            await segments(quiver, 1, since=3)
            assert await drain(quiver, "all") == [0, 1, 2, 3]
            assert await drain(quiver, "new") == [3]
            assert await drain(quiver, "some") == [1, 2, 3]
            for wrong in ("first", 0, -1):
                with pytest.raises(UsageError):
                    await quiver.register("other", wrong)

    simulate(scenario)


def test_newcomer_does_not_wait_for_segments_that_are_gone() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.register("a")
        await segments(quiver, 3)
        first, second, third = [await take(quiver, "a") for _ in range(3)]
        assert await second.ack()
        await quiver.maintain()
        await quiver.register("late")
        assert await drain(quiver, "late") == [0, 2]
        assert stats_of(quiver, "late").high_water == 3
        assert stats_of(quiver, "late").dropped == {}
        assert await first.ack()
        assert await third.ack()
        await quiver.maintain()
        for name in ("a", "late"):
            await quiver.unregister(name)
        for power_loss in (False, True):
            async with store(world, disk.after_crash(power_loss=power_loss)) as again:
                assert again.report.is_clean, "what was deleted on purpose is not lost"
                assert again.stats().next_segment == 4

    simulate(scenario)


def test_registering_again_keeps_the_position_also_after_a_restart() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await quiver.register("b")
            await segments(quiver, 2)
            assert await drain(quiver, "a") == [0, 1]
            await quiver.register("a")
            assert await drain(quiver, "a") == []
        async with store(world, disk.after_crash(power_loss=True), SLOW) as quiver:
            await quiver.register("a")
            assert await drain(quiver, "a") == []
            assert await drain(quiver, "b") == [0, 1]

    simulate(scenario)


def test_high_water_mark_waits_at_a_hole_and_the_gap_set_is_kept_over_a_restart() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.register("a")
        await quiver.register("pin")
        await segments(quiver, 4)
        held = [await take(quiver, "a") for _ in range(4)]
        for each in (held[1], held[3]):
            assert await each.ack()
        who = stats_of(quiver, "a")
        assert (who.high_water, who.gap_set_size, who.lag_segments, who.in_flight) == (0, 2, 2, 2)
        left = disk.after_crash(power_loss=True)
        async with store(world, left, SLOW) as again:
            who = stats_of(again, "a")
            assert (who.high_water, who.gap_set_size, who.lag_segments) == (0, 2, 2)
            assert await drain(again, "a") == [0, 2]
            assert (stats_of(again, "a").high_water, stats_of(again, "a").gap_set_size) == (4, 0)

    simulate(scenario)


def test_any_resolved_segment_is_reclaimed_not_only_the_first_ones() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await segments(quiver, 4)
            first = await take(quiver, "a")
            assert await drain(quiver, "a", timeout_s=0.1) == [1, 2, 3]
            await quiver.maintain()
            assert list(disk.files("segments/")) == ["segments/0000000000000001.arrow"]
            assert await first.ack()
            await quiver.maintain()
            assert disk.files("segments/") == {}

    simulate(scenario)


def test_nacked_segment_comes_again_after_a_pause_and_blocks_nobody() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await segments(quiver, 3)
            first = await take(quiver, "a")
            nacked_at = world.now
            assert await first.nack()
            order = [await take(quiver, "a") for _ in range(3)]
            assert [(each.segment, each.attempt) for each in order] == [(2, 1), (3, 1), (1, 2)]
            assert 0.05 <= world.now - nacked_at <= 0.2
            assert not await first.nack(), "the claim is another delivery's now"
            assert await order[2].ack()

    simulate(scenario)


def test_lapsed_lease_delivers_again_and_the_first_ack_wins() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await segments(quiver, 1)
            slow = await take(quiver, "a")
            again = await quiver.next("a", 60)
            assert again is not None
            assert again.segment == slow.segment
            assert world.now >= 5
            assert await slow.ack()
            assert not await again.ack()

    simulate(scenario)


def test_leaving_a_delivery_without_outcome_releases_it() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await segments(quiver, 1)
            with pytest.raises(ValueError, match="oops"):
                async with await take(quiver, "a"):
                    raise ValueError("oops")
            assert (await take(quiver, "a")).segment == 1
            assert world.now < 5

    simulate(scenario)


def test_failed_read_releases_the_claim() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await segments(quiver, 2)
            disk.faults.append(("read", "0000000000000001.arrow", errno.EIO))
            assert (await take(quiver, "a")).segment == 2
            assert (await take(quiver, "a")).segment == 1

    simulate(scenario)


def test_removed_subscriber_pins_nothing_and_stays_removed() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await quiver.register("gone")
            await segments(quiver, 3)
            assert await drain(quiver, "a") == [0, 1, 2]
            assert stats_of(quiver, "gone").pinned_bytes > 0
            assert not stats_of(quiver, "gone").is_active
            assert await quiver.unregister("gone")
            await quiver.maintain()
            assert disk.files("segments/") == {}
            with pytest.raises(UnknownSubscriber):
                await quiver.next("gone")
        async with store(world, disk.after_crash(power_loss=True)) as quiver:
            assert [each.name for each in quiver.stats().subscribers] == ["a"]
            assert not await quiver.unregister("gone")

    simulate(scenario)


@pytest.mark.parametrize("outcome", ["ack", "nack", "reject"])
def test_outcome_behind_a_removal_does_not_bring_the_subscriber_back(outcome: str) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.register("gone")
        await quiver.register("stays")
        await segments(quiver, 3)
        delivery = await take(quiver, "gone")
        # The removal is on its way to the disk, and the outcome follows it.
        await asyncio.gather(quiver.unregister("gone"), getattr(delivery, outcome)(), return_exceptions=True)
        assert not quiver.has_subscriber("gone")
        assert await drain(quiver, "stays") == [0, 1, 2]
        await quiver.maintain()
        assert quiver.stats().segments == 0
        crashed = disk.after_crash(power_loss=True)
        async with store(world, crashed, SLOW) as quiver:
            assert not quiver.has_subscriber("gone")
            await quiver.register("gone", "latest")
            assert stats_of(quiver, "gone").lag_segments == 0

    simulate(scenario)


def test_rejected_segment_goes_to_the_dead_letters_and_is_told_apart() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await segments(quiver, 1)
            delivery = await take(quiver, "a")
            data = disk.files()["segments/0000000000000001.arrow"]
            assert await delivery.reject()
            await quiver.maintain()
            assert disk.files("segments/") == {}
            assert disk.files("dead/") == {"dead/0000000000000001.a.arrow": data}
        async with store(world, disk) as quiver:
            assert stats_of(quiver, "a").dropped == {"rejected": 1}
            assert quiver.stats().used_bytes >= len(data)

    simulate(scenario)


def test_outcome_is_durable_before_it_is_told_and_before_the_file_goes() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.register("a")
        await segments(quiver, 1)
        delivery = await take(quiver, "a")
        since = len(disk.history)
        assert await delivery.ack()
        await quiver.maintain()
        history = disk.history[since:]
        sync = next(at for at, line in enumerate(history) if line.startswith("sync ack/"))
        unlink = next(at for at, line in enumerate(history) if line.startswith("remove segments/"))
        assert sync < unlink

    simulate(scenario)


def test_replay_of_the_ack_log_stays_short() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            for number in range(150):
                await segments(quiver, 1, since=number)
                assert await (await take(quiver, "a")).ack()
                await quiver.maintain()
            assert sum(map(len, disk.files("ack/").values())) < 5 * SLOW.ack_file_bytes
            assert len(disk.files("ack/")) <= 6
        async with store(world, disk) as quiver:
            assert stats_of(quiver, "a").high_water == 150

    simulate(scenario)


def test_waiting_reader_is_woken_by_the_segment() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            waiting = asyncio.create_task(quiver.next("a"))
            await world.clock().sleep(10)
            await segments(quiver, 1)
            delivery = await waiting
            assert delivery is not None
            assert numbers(delivery) == [0]
            assert await quiver.next("a", 0.5) is None

    simulate(scenario)


# Retention.


def capped(policy: Literal["backpressure", "drop_oldest"]) -> QuiverConfig:
    return dataclasses.replace(SMALL, size_cap_bytes=300_000, size_cap_policy=policy)


def test_backpressure_refuses_before_the_cap_is_passed_and_ends_when_readers_catch_up() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, capped("backpressure")) as quiver:
            await quiver.register("a")
            taken = 0
            with pytest.raises(QuiverFull) as caught:
                for taken in range(10_000):
                    await quiver.ingest(batch(taken, 40))
                    assert disk.used_bytes <= 300_000
            assert caught.value.hint
            assert taken > 20
            await quiver.flush()
            assert disk.used_bytes <= 300_000
            assert sorted(await drain(quiver, "a")) == list(range(taken))
            await quiver.maintain()
            await quiver.ingest(batch(0))

    simulate(scenario)


@pytest.mark.parametrize("subscribers", [0, 1, 2])
def test_drop_oldest_keeps_the_newest_and_tells_everybody_what_went(subscribers: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        names = ["a", "b"][:subscribers]
        config = capped("drop_oldest")
        async with store(world, disk, config) as quiver:
            for name in names:
                await quiver.register(name)
            for number in range(400):
                await quiver.ingest(batch(number, 40))
                assert disk.used_bytes <= 300_000
            await quiver.flush()
            losses = quiver.stats().losses
            assert losses["segments.size"] > 0
            for name in names:
                assert stats_of(quiver, name).dropped == {"size": losses["segments.size"]}
            for name in names:
                found = await drain(quiver, name)
                assert found == list(range(found[0], 400))
                assert stats_of(quiver, name).gap_set_size == 0
        async with store(world, disk.after_crash(power_loss=True)) as quiver:
            assert quiver.stats().losses == losses

    simulate(scenario)


def test_segment_under_a_lease_is_not_the_one_that_is_dropped() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(capped("drop_oldest"), lease_ms=1_000_000)
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(0, 40))
            await quiver.flush()
            held = await take(quiver, "a")
            for number in range(1, 400):
                await quiver.ingest(batch(number, 40))
            assert quiver.stats().losses["segments.size"] > 0
            assert await held.ack()

    simulate(scenario)


def test_time_retention_goes_by_ingestion_time_over_claims_and_says_expired() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SLOW, retain_ms=10_000, lease_ms=1_000_000)
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            await segments(quiver, 2)
            held = await take(quiver, "a")
            await world.clock().sleep(11)
            await quiver.maintain()
            assert disk.files("segments/") == {}
            assert stats_of(quiver, "a").dropped == {"expired": 2}
            assert numbers(held) == [0], "an open map stays readable"
            assert not await held.ack()
            assert quiver.stats().losses["segments.expired"] == 2

    simulate(scenario)


def test_clock_steps_neither_expire_early_nor_give_negative_ages() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SLOW, retain_ms=100_000)
        clock = world.clock()
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            await segments(quiver, 1)
            clock.step(-3_600_000)
            await quiver.maintain()
            assert stats_of(quiver, "a").oldest_pending_ms == 0
            clock.step(10 * 3_600_000)
            await quiver.maintain()
            assert quiver.stats().segments == 1, "a jump pauses expiry"
            await clock.sleep(700)
            await quiver.maintain()
            assert quiver.stats().segments == 0

    simulate(scenario)


def test_headroom_keeps_processed_segments_until_space_is_needed() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SLOW, headroom_bytes=6_000)
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            await segments(quiver, 10)
            await drain(quiver, "a")
            await quiver.maintain()
            kept = sum(map(len, disk.files("segments/").values()))
            assert 0 < kept <= 6_000
            assert max(disk.files("segments/")) == "segments/0000000000000010.arrow"

    simulate(scenario)


def test_failed_deletion_is_tried_again() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            await segments(quiver, 2)
            disk.faults.append(("remove", "segments/0000000000000001", errno.EBUSY))
            await drain(quiver, "a")
            await world.clock().sleep(1)
            assert disk.files("segments/") == {}

    simulate(scenario)


def test_accounted_bytes_are_the_bytes_of_the_files() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.register("a")
            for number in range(60):
                await quiver.ingest(batch(number))
                if number % 7 == 0 and (delivery := await quiver.next("a", 0.01)) is not None:
                    await delivery.ack()
            await quiver.flush()
            await quiver.maintain()
            await quiver.maintain()
            assert quiver.stats().used_bytes == disk.used_bytes

    simulate(scenario)


def test_rows_are_counted_by_signal_and_by_what_became_of_them() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        registry = MetricsRegistry()
        config = dataclasses.replace(SLOW, retry_base_ms=0, maintenance_interval_ms=100)
        async with store(world, disk, config, metrics=registry) as quiver:
            await quiver.register("a")
            for number in range(3):
                await quiver.ingest(batch(number), signal="traces")
                await quiver.flush()
            await world.clock().sleep(0.2)

            def value(name: str, *labels: str) -> float:
                [family] = [each for each in registry.families() if each.name == name]
                [series] = [each for values, each in family.series() if values == labels]
                assert not isinstance(series, Histogram)
                return series.value

            assert value("quiver.items.queued", "traces") == 30
            assert value("quiver.disk.bytes_actual") == disk.used_bytes
            for outcome in ("nack", "ack", "reject"):
                delivery = await quiver.next("a", 10)
                assert delivery is not None
                await getattr(delivery, outcome)()
            assert value("quiver.items.requeued_total", "a", "traces") == 10
            assert value("quiver.items.delivered_total", "a", "traces") == 10
            assert value("quiver.items.rejected_total", "a", "traces") == 10
            assert value("quiver.subscriber.retries_total", "a") == 1
            await world.clock().sleep(0.2)
            assert value("quiver.items.queued", "traces") == 10
            assert value("quiver.gc.reclaimed_bytes_total") > 0
            assert value("quiver.core.bytes", "0") == quiver.stats().used_bytes

    simulate(scenario)
