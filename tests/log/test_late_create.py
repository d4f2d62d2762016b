"""What a request leaves that creates a partition and arrives after its topic was deleted: nobody reads it.

A copy of a request whose reply was lost may come at any time. Writers take what it makes for none, see
`test_writer_neighbours`; so do readers and planners, and `verify` names it.
"""

from __future__ import annotations

import pytest
from tests.log.compaction_bed import Bed

from forebay.log import OffsetOutOfRange, Positions, UnknownTopic
from forebay.log._keys import CATALOG_PARTITION_KEY, topic_key
from forebay.log._records import Cursor, encode_record
from forebay.testing import Actor, World


async def left_over(*, made_again: bool = True) -> Bed:
    """A topic that was deleted, made again perhaps, and a copy of the first request to its partition."""
    bed = Bed()
    home = bed.keys.partition_key
    await bed.append(2)
    late = await bed.coordinator.get(bed.keys.control, partition_key=home)
    assert late is not None
    await bed.append(3)
    await bed.writer.catalog.delete("t")
    if made_again:
        await bed.writer.catalog.create("t")
    await bed.coordinator.put(bed.keys.cursor, encode_record(Cursor(offset=1)), partition_key=home)
    await bed.coordinator.put(bed.keys.control, late.value, partition_key=home)
    return bed


async def test_readers_do_not_see_what_a_late_request_made() -> None:
    bed = await left_over()
    reader = bed.reader()
    offsets = await reader.offsets("t", 0)
    assert (offsets.earliest, offsets.next, offsets.records) == (6, 6, 0)
    assert await reader.offsets_each([("t", 0)]) == [offsets]
    assert [each async for each in reader.scan("t", 0)] == []
    with pytest.raises(OffsetOutOfRange) as refused:
        await reader.read("t", 0, 1)
    assert refused.value.earliest == 6
    positions = Positions(bed.coordinator, clock=bed.clock, randomness=bed.random)
    [seen] = (await positions.look(lambda _: True)).offsets
    assert (seen.earliest, seen.next) == (6, 6)


async def test_readers_of_a_deleted_topic_hear_that_there_is_none() -> None:
    bed = await left_over(made_again=False)
    with pytest.raises(UnknownTopic):
        await bed.reader().read("t", 0, 1)


async def test_a_reader_that_passed_over_it_sees_the_append_that_replaces_it() -> None:
    bed = await left_over()
    reader = bed.reader()
    assert (await reader.read("t", 0, 6)).records() == []
    bed.sent = []
    await bed.append(1)
    assert (await reader.read("t", 0, 6)).records() == bed.sent


@pytest.mark.parametrize("made_again", [False, True], ids=["deleted", "made again"])
async def test_verify_names_what_a_late_request_made(made_again: bool) -> None:
    bed = await left_over(made_again=made_again)
    report = await bed.verify()
    [found] = report.partitions
    assert report.ok and found.records == 0 and found.problems == []
    assert found.leftover.startswith(f"{bed.keys.control} begins at offset 1, its topic at 6")
    assert found.as_json()["leftover"] == found.leftover
    bed.writer = bed.new_writer()
    await bed.append(1)
    [found] = (await bed.verify()).partitions
    assert (found.records, found.leftover) == (1, "") and "leftover" not in found.as_json()


async def test_a_topic_that_was_made_again_during_the_look_is_not_called_left_over() -> None:
    bed = Bed()
    await bed.append(1)
    get = bed.coordinator.get

    async def after_the_control_record(key: str, *, partition_key: str | None = None) -> object:
        if key == topic_key("t"):
            bed.coordinator.get = get  # type: ignore[method-assign]
            await bed.writer.catalog.delete("t")
            await bed.writer.catalog.create("t")
        return await get(key, partition_key=partition_key)

    bed.coordinator.get = after_the_control_record  # type: ignore[method-assign,assignment]
    [found] = (await bed.verify()).partitions
    assert found.leftover == ""


async def test_a_catalog_entry_that_cannot_be_read_keeps_nobody_from_its_records() -> None:
    bed = Bed()
    await bed.append(2)
    await bed.coordinator.put(topic_key("t"), b"{", partition_key=CATALOG_PARTITION_KEY)
    assert (await bed.reader().read("t", 0, 1)).records() == bed.sent


@pytest.mark.parametrize(("appends", "looks"), [(1, 1), (2, 0)])
def test_a_new_partition_costs_a_reader_one_look_at_the_catalog_and_a_grown_one_none(
    appends: int, looks: int
) -> None:
    async def append(me: Actor) -> None:
        await _bed_of(me).append(*[1] * appends)

    async def read(me: Actor) -> None:
        reader = _bed_of(me).reader()
        for _ in range(3):
            await reader.read("t", 0, 1)

    async def main(world: World) -> int:
        await world.spawn("writer", append).join()
        await world.spawn("reader", read).join()
        return world.requests.count("reader", "coordinator.get")

    assert World(seed=1).run(main) == looks


def _bed_of(me: Actor) -> Bed:
    bed = Bed()
    bed.store, bed.coordinator = me.store, me.coordinator  # type: ignore[assignment]
    bed.writer = bed.new_writer(str(me))
    return bed
