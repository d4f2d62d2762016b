"""From times to offsets."""

from __future__ import annotations

import random

import pytest
from tests.log.hand_log import HandLog, numbered

from forebay.log._keys import PartitionKeys
from forebay.log._resolve import PartitionView
from forebay.testing import Actor, World


async def timed(count: int, size: int = 2) -> HandLog:
    """Appends of `size` records at 1,000, 2,000 and so on."""
    log = HandLog()
    for _ in range(count):
        await log.append(numbered(log.control.sequence_counter, size))
        log.now_ms += 1_000
    return log


def expected(count: int, size: int, time_ms: int) -> int:
    """What a list would say."""
    late = [number for number in range(count) if (number + 1) * 1_000 >= time_ms]
    return late[0] * size + 1 if late else count * size + 1


@pytest.mark.parametrize("count", [1, 2, 3, 40, 100])
async def test_every_time_gives_the_first_append_not_older(count: int) -> None:
    log = await timed(count)
    for number in range(count + 2):
        for time_ms in (number * 1_000 - 1, number * 1_000, number * 1_000 + 1):
            found = await log.reader().offset_for_time(*log.place, time_ms)
            assert found == expected(count, 2, time_ms), time_ms


async def test_times_inside_a_compacted_range_are_found_exactly_and_whole_entries_cheaply() -> None:
    log = await timed(40)
    await log.compact(1, 30)
    await log.compact(31, 60)
    for number in range(42):
        time_ms = number * 1_000
        assert await log.reader().offset_for_time(*log.place, time_ms) == expected(40, 2, time_ms)
    assert await log.reader().offset_for_time(*log.place, 20_000, whole_entries=True) == 31


async def test_leftovers_inside_a_compacted_range_do_not_mislead() -> None:
    log = HandLog()
    appends = []
    for start in range(1, 80, 2):
        appends.append(await log.append(numbered(start, 2)))
        log.now_ms += 1_000
    await log.compact(1, 78)
    for pending in appends[3:38]:
        await log.put_entry(pending.end_offset, pending.index_entry())
        await log.vacuum(pending)
    for number in range(42):
        assert await log.reader().offset_for_time(*log.place, number * 1_000) == expected(
            40, 2, number * 1_000
        )


@pytest.mark.parametrize("time_ms", [1_000, 3_500, 20_000, 39_000])
async def test_a_compaction_that_comes_between_does_not_mislead(time_ms: int) -> None:
    """The search began with the cursor of before, by which leftovers of the range would count."""
    log = HandLog()
    appends = []
    for start in range(1, 80, 2):
        appends.append(await log.append(numbered(start, 2)))
        log.now_ms += 1_000
    reader = log.reader()
    view = reader._resolver.view

    async def compacted_first(keys: PartitionKeys) -> PartitionView:
        reader._resolver.view = view  # type: ignore[method-assign]
        await log.compact(1, 78)
        for pending in appends[3:38]:
            await log.put_entry(pending.end_offset, pending.index_entry())
        return await view(keys)

    reader._resolver.view = compacted_first  # type: ignore[method-assign]
    assert await reader.offset_for_time(*log.place, time_ms) == expected(40, 2, time_ms)


async def test_times_of_their_own_are_never_searched() -> None:
    log = HandLog()
    for start in range(1, 9, 2):
        await log.append(numbered(start, 2), timestamps_ms=[10**9, 5])
        log.now_ms += 1_000
    assert await log.reader().offset_for_time(*log.place, 2_500) == 5
    await log.compact(1, 6)
    # When each record was appended is lost with the compaction: the start of the range is early, not late.
    assert await log.reader().offset_for_time(*log.place, 2_500) == 1
    assert await log.reader().offset_for_time(*log.place, 3_500) == 7


async def test_trimmed_offsets_are_never_returned() -> None:
    log = await timed(10)
    await log.trim(6)
    assert await log.reader().offset_for_time(*log.place, 0) == 6
    assert await log.reader().offset_for_time(*log.place, 5_000) == 9


async def test_random_logs_agree_with_a_list() -> None:
    randomness = random.Random(5)
    for _ in range(10):
        log, times = HandLog(), []
        for _ in range(randomness.randint(1, 60)):
            size = randomness.randint(1, 3)
            await log.append(numbered(log.control.sequence_counter, size))
            times += [log.now_ms] * size
            log.now_ms += randomness.choice([0, 0, 1, 500])
        for time_ms in range(900, log.now_ms + 600, 97):
            late = [place for place, time in enumerate(times) if time >= time_ms]
            wanted = late[0] + 1 if late else len(times) + 1
            assert await log.reader().offset_for_time(*log.place, time_ms) == wanted


def test_a_lookup_costs_the_logarithm_of_the_log() -> None:
    def requests(count: int) -> int:
        async def main(world: World) -> int:
            log = HandLog(store=world.bucket, coordinator=world.keys)
            for start in range(1, count + 1):
                await log.append(numbered(start, 1))
                log.now_ms += 1_000

            async def look(me: Actor) -> None:
                reader = HandLog(store=me.store, coordinator=me.coordinator).reader()
                assert await reader.offset_for_time("orders", 0, 1_000 * (count // 3)) == count // 3

            await world.spawn("reader", look).join()
            return world.requests.count("reader")

        return World(seed=1).run(main)

    assert requests(2_000) <= requests(250) + 4


async def test_the_time_of_a_record_is_that_of_its_append() -> None:
    log = await timed(4)
    assert await log.reader().time_of(*log.place, 5) == 3_000
    assert await log.reader().time_of(*log.place, 9) is None
    await log.compact(1, 6)
    assert await log.reader().time_of(*log.place, 5) == 1_000
