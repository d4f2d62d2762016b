"""Room for batches is asked for in pieces, and the bounds hold to the byte all the same."""

from __future__ import annotations

import asyncio
import dataclasses
import errno

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import StorageFull
from forebay.quiver import Quiver, QuiverFull, _admission
from forebay.quiver._budget import OwnBudget
from forebay.testing.world import World

WIDE = dataclasses.replace(SMALL, wal_file_bytes=1 << 20, wal_bytes_max=1 << 21, size_cap_bytes=1 << 26)
TIGHT = dataclasses.replace(WIDE, size_cap_bytes=1 << 22)


class Asked(OwnBudget):
    """Remembers what it was asked."""

    def __init__(self, cap_bytes: int) -> None:
        super().__init__(cap_bytes)
        self.questions: list[int] = []

    def is_over(self, bytes_: int) -> bool:
        self.questions.append(bytes_)
        return super().is_over(bytes_)


def projected(quiver: Quiver) -> int:
    return quiver._retention.projected_bytes(0)


def test_crowd_asks_once_and_what_is_granted_counts_until_its_group_is_over() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        budget = Asked(WIDE.size_cap_bytes)
        async with store(world, disk, WIDE, budget=budget) as quiver:
            await quiver.ingest(batch(0))
            before = projected(quiver)
            budget.questions.clear()
            crowd = [await quiver.submit(batch(number)) for number in range(1, 31)]
            assert len(budget.questions) == 1
            [asked] = budget.questions
            assert asked > before + _admission.GRANT_BYTES
            assert asked == projected(quiver), "others see all of it, from the first batch to the last"
            await asyncio.gather(*crowd)
            assert projected(quiver) < asked - _admission.GRANT_BYTES
            await quiver.register("a")
            await quiver.flush()
            assert sorted(await drain(quiver, "a")) == list(range(31))

    simulate(scenario)


@pytest.mark.parametrize("producers", [1, 7])
def test_cap_is_reached_by_the_same_batch_with_and_without_grants(
    producers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World, disk: SimDisk) -> int:
        done = 0

        async def produce(quiver: Quiver) -> None:
            nonlocal done
            while True:
                await quiver.ingest(batch(1, 60))
                done += 1

        async with store(world, disk, TIGHT) as quiver:
            await quiver.register("nobody")
            work = [produce(quiver) for _ in range(producers)]
            found = await asyncio.gather(*work, return_exceptions=True)
            assert {type(each) for each in found} == {QuiverFull}
            assert projected(quiver) <= TIGHT.size_cap_bytes
        return done

    granted = simulate(scenario)
    monkeypatch.setattr(_admission, "GRANT_BYTES", 0)
    assert granted == simulate(scenario) > 100


def test_grant_is_over_also_where_the_group_fails() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, WIDE) as quiver:
            await quiver.ingest(batch(0))
            disk.faults.append(("write", ".wal", errno.ENOSPC))
            with pytest.raises(StorageFull):
                await quiver.ingest(batch(1))
            assert quiver._retention.granted == 0
            await quiver.ingest(batch(2))

    simulate(scenario)


def test_crowd_that_waited_for_the_wal_does_not_pass_the_cap_together() -> None:
    config = dataclasses.replace(SMALL, size_cap_bytes=1 << 18)

    async def scenario(world: World, disk: SimDisk) -> None:
        disk.delays["segments"] = 0.05
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            crowd = [asyncio.ensure_future(quiver.ingest(batch(number, 900))) for number in range(40)]
            done = await asyncio.gather(*crowd, return_exceptions=True)
            await quiver.flush()
            assert sum(map(len, disk.files().values())) <= config.size_cap_bytes
            taken = sum(not isinstance(each, BaseException) for each in done)
            assert 0 < taken < 40
            assert all(isinstance(each, QuiverFull) for each in done if isinstance(each, BaseException))
            assert len(await drain(quiver, "a")) == taken

    simulate(scenario)
