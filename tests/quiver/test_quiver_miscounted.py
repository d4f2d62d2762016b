"""A group that cannot be encoded is certainly not done, and the log goes on."""

from __future__ import annotations

import asyncio

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk
from tests.quiver.test_quiver_here import append, frames, outcome, started, until_here

from forebay.errors import NotDone
from forebay.quiver import Quiver
from forebay.testing.world import World


@pytest.mark.parametrize("is_here", [False, True])
@pytest.mark.parametrize(("body", "size", "time_ns"), [(b"xyz", 2, 0), (b"xyz", 4, 0), (b"xyz", 3, 1 << 63)])
def test_group_whose_bytes_were_miscounted_is_not_done_and_the_log_goes_on(
    is_here: bool, body: bytes, size: int, time_ns: int
) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        log = started(disk, world)
        if is_here:
            await until_here(log)
        before = frames(disk)
        wrong = log.append(1, time_ns, [body], size, is_waited_for=is_here)
        beside = append(log)
        assert wrong.done.done() is is_here
        with pytest.raises(NotDone):
            await asyncio.wait_for(outcome(log, wrong), 10)
        if is_here:
            await beside.done
        else:
            with pytest.raises(NotDone):
                await beside.done
        good = append(log)
        await outcome(log, good)
        assert log.pending_bytes == 0
        await asyncio.wait_for(log.close(), 10)
        written = [*before, good.sequence] if not is_here else [*before, beside.sequence, good.sequence]
        assert frames(disk) == written

    simulate(scenario)


def test_store_goes_on_after_a_batch_that_was_miscounted_and_keeps_all_others() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SMALL) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(0))
            await miscounted(quiver)
            await quiver.ingest(batch(2))
            left = disk.after_crash(power_loss=True)
        async with store(world, left, SMALL) as quiver:
            assert quiver.report.is_clean
            assert await drain(quiver, "a") == [0, 2]

    async def miscounted(quiver: Quiver) -> None:
        append_ = quiver._wal.append

        def short(
            type_: int, time_ns: int, body: object, size: int, *rest: object, **named: object
        ) -> object:
            return append_(type_, time_ns, body, size - 1, *rest, **named)  # type: ignore[arg-type]

        quiver._wal.append = short  # type: ignore[assignment, method-assign]
        with pytest.raises(NotDone):
            await asyncio.wait_for(quiver.ingest(batch(1)), 10)
        del quiver._wal.append

    simulate(scenario)
