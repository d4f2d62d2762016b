"""What planners ask: the ends of many partitions in one round trip, sizes without touching an object."""

from __future__ import annotations

import random

import pytest
from tests.log.writing import group, writer_in

from forebay.log import Compactor, CompactorConfig, OffsetOutOfRange, Positions, Trimmer
from forebay.testing import Actor, World


def positions_of(me: Actor) -> Positions:
    return Positions(me.coordinator, clock=me.clock, randomness=random.Random(1))


def in_world(work: object) -> None:
    async def main(world: World) -> None:
        await world.spawn("planner", work).join()  # type: ignore[arg-type]

    World(1).run(main)


def test_a_thousand_partitions_are_one_round_trip() -> None:
    async def work(me: Actor) -> None:
        writer, positions = writer_in(me), positions_of(me)
        await writer.catalog.create("t", partitions=1000)
        await writer.append_shared([group("t", number, b"x") for number in range(0, 1000, 2)])
        first = await positions.look(lambda topic: True)
        before = me.coordinator.link.counter("get")[0]
        began = me.clock.monotonic()
        seen = await positions.look(lambda topic: True, first.topics)
        one = me.clock.monotonic() - began
        assert me.coordinator.link.counter("get")[0] == before + 1
        assert [each.next for each in seen.offsets] == [2, 1] * 500
        began = me.clock.monotonic()
        await me.coordinator.get("llog-catalog/topics/t", partition_key="llog-catalog")
        assert one < 3 * (me.clock.monotonic() - began) + 0.05

    in_world(work)


def test_new_topics_and_partitions_are_seen_and_deleted_ones_are_not() -> None:
    async def work(me: Actor) -> None:
        writer, positions = writer_in(me), positions_of(me)
        await writer.append_shared([group("a", 0, b"x"), group("b", 0, b"x")])
        first = await positions.look(lambda topic: True)
        assert [(each.topic, each.partition) for each in first.offsets] == [("a", 0), ("b", 0)]
        await writer.append_shared([group("a", 2, b"x", b"y"), group("c", 0, b"x")])
        await writer.catalog.delete("b")
        seen = await positions.look(lambda topic: topic.topic != "x", first.topics)
        assert [(each.topic, each.partition, each.next) for each in seen.offsets] == [
            ("a", 0, 2),
            ("a", 1, 1),
            ("a", 2, 3),
            ("c", 0, 2),
        ]

    in_world(work)


def test_spans_cover_a_range_exactly_before_and_after_compaction_and_trim() -> None:
    async def work(me: Actor) -> None:
        writer, positions = writer_in(me), positions_of(me)
        for _ in range(10):
            await writer.append_shared([group("t", 0, *[b"x" * 100] * 10)])
        await writer.close()
        objects = me.store.link.counter("get_ranges")[0]
        spans = await positions.spans("t", 0, 15, 78)
        assert (spans[0].start, spans[-1].end, sum(each.records for each in spans)) == (15, 78, 63)
        assert len(spans) == 7 and spans[1].size_bytes > 1000 and spans[0].size_bytes < spans[1].size_bytes
        some = await positions.spans("t", 0, 1, 101, bytes_max=2500)
        assert 2500 <= sum(each.size_bytes for each in some) < 5000
        config = CompactorConfig(min_age_ms=0, wait_for_full_ms=0)
        compactor = Compactor(
            me.store, me.coordinator, clock=me.clock, ids=me.ids, randomness=me.random, config=config
        )
        await compactor.compact_once("t", 0)
        [whole] = await positions.spans("t", 0, 15, 78)
        assert (whole.start, whole.end) == (15, 78)
        trimmer = Trimmer(me.coordinator, clock=me.clock, randomness=me.random)
        await trimmer.trim("t", 0, 50)
        with pytest.raises(OffsetOutOfRange):
            await positions.spans("t", 0, 15, 78)
        [[left], nothing] = await positions.spans_many([("t", 0, 50, 1000), ("t", 0, 60, 60)])
        assert (left.start, left.end, nothing) == (50, 101, [])
        assert objects == 0

    in_world(work)
