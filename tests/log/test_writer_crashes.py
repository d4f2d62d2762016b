"""The crash matrix: a writer dies after every single step of an append, and the log is whole."""

from __future__ import annotations

import pytest
from tests.log.writing import group, read_log, writer_in

from forebay.log import AppendGroup
from forebay.testing import Actor, Constant, Latencies, World, check

PARTITIONS = 2


def _groups(name: str) -> list[AppendGroup]:
    return [
        group("t", partition, f"{name}.0".encode(), f"{name}.1".encode()) for partition in range(PARTITIONS)
    ]


async def _recorded(me: Actor, names: list[str]) -> None:
    """Append to all partitions, once per name, and put the last entries into the index."""
    writer = writer_in(me)
    for name in names:
        calls = [
            me.world.history.append(f"t:{partition}", [f"{name}.0", f"{name}.1"])
            for partition in range(PARTITIONS)
        ]
        for call, result in zip(calls, await writer.append_shared(_groups(name)), strict=True):
            assert result.start_offset is not None
            call.ok(offset=result.start_offset - 1)
    await writer.close()


def _run(step: int | None, in_flight: bool, decides_at: float, *, first: bool) -> tuple[bool, int, int]:
    """Crash after `step` steps; a second writer goes on. Returns crashed, the steps, records in the log."""

    async def main(world: World) -> tuple[bool, int, int]:
        if not first:
            await world.spawn("before", _recorded, ["before"]).join()
        victim = world.spawn("victim", _recorded, ["victim"])
        if step is not None:
            victim.crash_at(step, in_flight)
        await world.join()
        crashed, steps = victim.crashed, victim.steps
        await world.clock().sleep(60)
        left = len(await read_log(world.bucket, world.keys))
        await world.spawn("after", _recorded, ["after"]).join()
        for partition in range(PARTITIONS):
            log = await read_log(world.bucket, world.keys, "t", partition)
            world.history.final(f"t:{partition}", [record.decode() for record in log])
        assert check(world.history) == []
        return crashed, steps, left

    latencies = Latencies(Constant(10), decides_at=decides_at)
    return World(1, store_latencies=latencies, coordinator_latencies=latencies).run(main)


@pytest.mark.parametrize("first", [True, False], ids=["first append", "later append"])
@pytest.mark.parametrize("decides_at", [0.0, 1.0])
@pytest.mark.parametrize("in_flight", [True, False])
def test_a_crash_after_any_step_of_an_append_leaves_a_whole_log(
    in_flight: bool, decides_at: float, first: bool
) -> None:
    crashed, steps, whole = _run(None, in_flight, decides_at, first=first)
    assert not crashed
    assert steps >= 4
    outcomes = [_run(step, in_flight, decides_at, first=first) for step in range(steps)]
    assert [outcome[:2] for outcome in outcomes] == [(True, step) for step in range(steps)]
    # The matrix cuts on both sides of the commit: some victims left their append behind, some did not.
    assert {left for _, _, left in outcomes} == {whole - 2, whole}
