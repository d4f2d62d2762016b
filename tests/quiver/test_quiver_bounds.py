"""Bounds that hold when something is stuck: a full disk, segments that cannot be written, a long backlog."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import random

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import AccessDenied, ForebayError, StorageFull, Unavailable
from forebay.formats import quiver_segment
from forebay.quiver import _finalizer
from forebay.quiver._ack_state import Subscriber
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=86_400_000, maintenance_interval_ms=3_600_000)


@pytest.mark.parametrize("capacity", [150_000, 200_000, 300_000])
def test_store_that_fills_its_disk_is_emptied_by_its_readers_and_goes_on(capacity: int) -> None:
    config = dataclasses.replace(SMALL, size_cap_bytes=1 << 24)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            await world.clock().sleep(1)
            disk.capacity = capacity
            durable = []
            for number in range(400):
                try:
                    await quiver.ingest(batch(number, 60))
                    durable.append(number)
                except StorageFull:
                    pass
            assert 10 < len(durable) < 400
            # A segment that found no room is overtaken by those behind it.
            assert sorted(await drain(quiver, "a", timeout_s=3)) == durable
            await quiver.maintain()
            await quiver.ingest(batch(1_000))
            assert await drain(quiver, "a", timeout_s=3) == [1_000]
            assert disk.used_bytes < capacity / 2

    simulate(scenario)


@pytest.mark.parametrize("power_loss", [False, True])
def test_store_killed_on_a_full_disk_is_emptied_by_its_readers_after_it_is_opened_again(
    power_loss: bool,
) -> None:
    config = dataclasses.replace(SMALL, size_cap_bytes=1 << 24, ack_file_bytes=32_768)

    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, config).open()
        await quiver.register("a")
        await world.clock().sleep(1)
        await quiver.ingest(batch(999))
        assert await drain(quiver, "a") == [999]
        await world.clock().sleep(1)
        disk.capacity = 300_000
        durable = []
        for number in range(400):
            try:
                await quiver.ingest(batch(number, 60))
                durable.append(number)
            except StorageFull:
                pass
        left = disk.after_crash(power_loss=power_loss)
        # Somebody else has taken what was left.
        left.capacity = left.used_bytes
        left.clock = world.clock()
        async with store(world, left, config) as quiver:
            assert sorted(await drain(quiver, "a", timeout_s=3)) == durable
            await quiver.ingest(batch(1_000))
            assert await drain(quiver, "a", timeout_s=3) == [1_000]

    simulate(scenario)


def test_memory_has_a_bound_while_segments_are_slower_than_producers() -> None:
    bound = 65_536
    config = dataclasses.replace(SLOW, open_bytes_max=bound, wal_bytes_max=1 << 22, size_cap_bytes=1 << 25)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            most = 0

            async def produce(first: int) -> None:
                nonlocal most
                for number in range(first, first + 40):
                    await quiver.ingest(batch(number, 200))
                    most = max(most, quiver.stats().open_bytes)

            disk.delays["segments"] = 0.05
            await asyncio.gather(*(produce(each * 40) for each in range(8)))
            assert most < 1.5 * bound
            await quiver.flush()
            assert sorted(await drain(quiver, "a")) == list(range(320))

    simulate(scenario)


def test_producers_hear_why_where_memory_is_full_of_segments_that_cannot_be_written() -> None:
    config = dataclasses.replace(SLOW, open_bytes_max=65_536, wal_bytes_max=1 << 22, size_cap_bytes=1 << 25)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            disk.faults += [("write", "segments/", errno.EIO)] * 1_000
            durable = []
            with pytest.raises(Unavailable):
                for number in range(1_000):
                    await quiver.ingest(batch(number, 60))
                    durable.append(number)
            disk.faults.clear()
            assert len(durable) > 20
            await world.clock().sleep(2)
            await quiver.flush()
            assert sorted(await drain(quiver, "a")) == durable

    simulate(scenario)


def test_figures_of_a_backlog_do_not_look_at_every_segment() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            for name in ("a", "b"):
                await quiver.register(name)
            for number in range(30):
                await quiver.ingest(batch(number))
                await quiver.flush()
            rng = random.Random(3)
            for _ in range(12):
                delivery = await quiver.next(rng.choice("ab"), 0)
                assert delivery is not None
                await rng.choice([delivery.ack, delivery.nack, delivery.reject])()
            await quiver.maintain()
            for each in quiver.stats().subscribers:
                who = quiver._acks.state.subscribers[each.name]
                left = [info for number, info in quiver._segments.items() if not who.is_resolved(number)]
                assert (each.lag_segments, each.pinned_bytes) == (len(left), sum(i.file_bytes for i in left))
            looked = Looked(quiver._segments)
            quiver._backlog._segments = looked
            quiver.stats()
            assert looked.count < 10

    simulate(scenario)


class Looked(dict):  # type: ignore[type-arg]
    """Counts looks."""

    count = 0

    def __contains__(self, key: object) -> bool:
        self.count += 1
        return super().__contains__(key)

    def values(self) -> object:  # type: ignore[override]
        self.count += len(self)
        return super().values()

    def items(self) -> object:  # type: ignore[override]
        self.count += len(self)
        return super().items()


def test_expiry_that_failed_is_tried_again() -> None:
    config = dataclasses.replace(SLOW, retain_ms=10_000)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            for number in range(3):
                await quiver.ingest(batch(number))
                await quiver.flush()
            await world.clock().sleep(11)
            disk.faults.append(("write", "ack/", errno.ENOSPC))
            with pytest.raises(ForebayError):
                await quiver.maintain()
            await quiver.maintain()
            assert quiver.stats().segments == 0

    simulate(scenario)


def test_what_opening_puts_aside_is_held_to_the_bound() -> None:
    config = dataclasses.replace(SLOW, dead_letter_bytes_max=12_000)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            for number in range(6):
                await quiver.ingest(batch(number, 100))
                await quiver.flush()
        left = disk.after_crash(power_loss=False)
        for name, data in left.files("segments/").items():
            left.flip(name, len(data) - 20)
        async with store(world, left, config) as quiver:
            assert quiver.report.segments_quarantined == 6
            aside = sum(map(len, left.files("quarantine/").values()))
            assert 0 < aside <= 12_000
            assert quiver.stats().subscribers[0].dropped == {"lost": 6}

    simulate(scenario)


def test_losses_are_told_by_a_metric_also_after_a_restart() -> None:
    config = dataclasses.replace(SLOW, retain_ms=10_000)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(1))
            await quiver.flush()
            await world.clock().sleep(11)
            await quiver.maintain()
        async with store(world, disk, config) as quiver:
            quiver._gauge()
            recorded = quiver._metrics.losses_ever.labels
            assert recorded("0", "segments", "expired").value == 1
            assert recorded("0", "rows", "expired").value == 10

    simulate(scenario)


def test_what_no_reader_would_take_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are cut at the number of batches and at the size of a footer that readers take."""
    config = dataclasses.replace(SLOW, segment_bytes=1 << 20, wal_bytes_max=1 << 20, size_cap_bytes=1 << 24)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            for number in range(60):
                await quiver.ingest(batch(number, 1), context={"tenant": f"{number:0100}"})
            await quiver.flush()
            metas = [view.meta async for view in quiver.read()]
            assert len(metas) > 3
            assert max(len(meta.sources) for meta in metas) <= 25
            left = disk.after_crash(power_loss=True)
        async with store(world, left, config) as quiver:
            assert quiver.report.is_clean
            assert await drain(quiver, "a") == list(range(60))

    monkeypatch.setattr(_finalizer, "SOURCES_MAX", 25)
    monkeypatch.setattr(quiver_segment, "FOOTER_BYTES_MAX", 2_500)
    simulate(scenario)


def test_segments_kept_mapped_have_a_bound_and_so_has_what_is_known_of_retries() -> None:
    config = dataclasses.replace(SLOW, maps_max=3, retry_base_ms=60_000, retry_cap_ms=60_000)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            for number in range(40):
                await quiver.ingest(batch(number))
                await quiver.flush()
            deliveries = quiver._deliveries
            held = [await quiver.next("a", 0) for _ in range(10)]
            assert len(deliveries.reader._views) == 3
            for each in held[:6]:
                assert each is not None
                await each.nack()
            desk = deliveries._desks["a"]
            assert (len(desk.claims), len(desk.attempts), len(desk.later), len(desk.ready)) == (4, 6, 6, 0)
            await world.clock().sleep(61)
            assert await drain(quiver, "a", timeout_s=0) == list(range(40))
            assert (len(desk.claims), len(desk.attempts), len(desk.later), len(desk.ready)) == (0, 0, 0, 0)

    simulate(scenario)


def test_step_of_a_delivery_does_not_look_at_all_that_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(SLOW, retry_base_ms=60_000, retry_cap_ms=60_000)
    looks = 0

    class Watched(Subscriber):
        def is_resolved(self, segment: int) -> bool:
            nonlocal looks
            looks += 1
            return super().is_resolved(segment)

    async def scenario(world: World, disk: SimDisk) -> None:
        nonlocal looks
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            for number in range(200):
                await quiver.ingest(batch(number, 1))
                await quiver.flush()
            counts = []
            for _ in range(200):
                looks = 0
                delivery = await quiver.next("a", 0)
                counts.append(looks)
                assert delivery is not None
                await delivery.nack()
            assert max(counts) == max(counts[:10]) > 0

    monkeypatch.setattr("forebay.quiver._ack_state.Subscriber", Watched)
    simulate(scenario)


def test_read_only_file_system_fails_at_open() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        for operation in ("mkdir", "lock"):
            disk.faults.append((operation, "", errno.EROFS))
            with pytest.raises(AccessDenied):
                await store(world, disk).open()
        async with store(world, disk) as quiver:
            assert quiver.report.is_clean

    simulate(scenario)


def test_loss_counts_only_those_who_had_not_resolved_what_went() -> None:
    config = dataclasses.replace(SLOW, retain_ms=10_000)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            for name in ("a", "b"):
                await quiver.register(name)
            for number in range(2):
                await quiver.ingest(batch(number))
                await quiver.flush()
            assert await drain(quiver, "a") == [0, 1]
            delivery = await quiver.next("b", 0)
            assert delivery is not None
            await delivery.ack()
            await world.clock().sleep(11)
            await quiver.maintain()
            dropped = {each.name: each.dropped for each in quiver.stats().subscribers}
            assert dropped == {"a": {}, "b": {"expired": 1}}
            assert quiver.stats().losses["segments.expired"] == 1

    simulate(scenario)
