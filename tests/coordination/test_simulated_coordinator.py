"""The simulated coordinator: the contract, then faults, shards with fates of their own, and leases.

The behaviour suite is made of coroutine functions that take a `coordinator` or a `tenant`. The simulated
tenant lives on its own event loop, so here the very same functions run inside a world, each with every set of
arguments that it is parametrized with.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.coordination import ABSENT, Coordinator, Delete, DeleteRange, Put, Record, Session, children
from forebay.errors import (
    Closed,
    OutcomeUnknown,
    PreconditionFailed,
    SessionExpired,
    Unavailable,
    UsageError,
)
from forebay.testing import INSTANT, Actor, Constant, Faults, Latencies, World

FIXED = Latencies(Constant(4), decides_at=0.5)

# It looks into the sessions of two tenants; the same claim for this one is below.
LEFT_OUT = {"test_session_lives_while_its_owner_does"}
SUITE = sorted(path.stem for path in Path(__file__).parent.glob("test_coordination_*.py"))


class SteppingClock:
    """Virtual time that also moves without letting anybody run, as the suite's manual clock does."""

    def __init__(self, world: World) -> None:
        self._world = world

    def step(self, seconds: float) -> None:
        self._world.loop._now += seconds

    async def advance(self, seconds: float) -> None:
        await self._world.clock().sleep(seconds)


async def eventually(holds: Callable[[], Awaitable[object]]) -> object:
    for _ in range(10_000):
        if found := await holds():
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("it never held")


class SimulatedTenant:
    """What the suite's fixture of this name offers, in a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._opened: list[Coordinator] = []

    def open(self) -> Coordinator:
        self._opened.append(self._world.coordinator(f"client-{len(self._opened)}"))
        return self._opened[-1]

    @property
    def clock(self) -> SteppingClock:
        return SteppingClock(self._world)

    async def close(self) -> None:
        for coordinator in self._opened:
            await coordinator.close()


def contract() -> Iterator[Any]:
    """Every function of the suite with every set of its arguments."""
    for name in SUITE:
        module = importlib.import_module(name)
        for title, function in sorted(vars(module).items()):
            if not title.startswith("test_") or not inspect.iscoroutinefunction(function):
                continue
            if title in LEFT_OUT:
                continue
            if not {"tenant", "coordinator"} & set(inspect.signature(function).parameters):
                continue  # of one other tenant, not of the contract
            sets: list[dict[str, Any]] = [{}]
            for mark in getattr(function, "pytestmark", []):
                if mark.name == "parametrize":
                    sets = [known | more for known in sets for more in _arguments(*mark.args)]
            for number, arguments in enumerate(sets):
                yield pytest.param(function, arguments, id=f"{title}-{number}")


def _arguments(names: str | Sequence[str], values: Sequence[Any]) -> Iterator[dict[str, Any]]:
    titles = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    for value in values:
        parts = getattr(value, "values", value) if len(titles) > 1 or hasattr(value, "values") else [value]
        yield dict(zip(titles, parts, strict=True))


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(("check", "arguments"), list(contract()))
def test_contract_holds_in_the_simulated_world(
    check: Callable[..., Awaitable[None]], arguments: dict[str, Any], shards: int
) -> None:
    async def main(world: World) -> None:
        tenant = SimulatedTenant(world)
        offered = {"tenant": tenant, "directory": "suite/some", "eventually": eventually, **arguments}
        wanted = inspect.signature(check).parameters
        if "coordinator" in wanted:
            offered["coordinator"] = tenant.open()
        await check(**{name: offered[name] for name in wanted})
        await tenant.close()

    World(1, coordinator_shards=shards, coordinator_latencies=INSTANT).run(main)


async def keys(world: World, directory: str = "d") -> list[str]:
    return await world.keys.list(*children(directory))


async def hold(me: Actor, timeout_ms: int = 3_000) -> None:
    session = await me.coordinator.open_session(timeout_ms)
    await me.coordinator.put("d/lease", me.name.encode(), ABSENT, session=session)
    await asyncio.Event().wait()


def test_actors_share_keys_and_race_for_them() -> None:
    async def claim(me: Actor) -> bool:
        try:
            await me.coordinator.put("d/leader", me.name.encode(), ABSENT)
        except PreconditionFailed:
            return False
        return True

    def winner(seed: int) -> str:
        async def main(world: World) -> str:
            actors = [world.spawn(name, claim) for name in "abc"]
            won = [actor.name for actor in actors if await actor.join()]
            assert len(won) == 1
            return won[0]

        return World(seed).run(main)

    assert {winner(seed) for seed in range(40)} == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("kind", "error", "there"),
    [
        ("before", Unavailable, False),
        ("throttle", Unavailable, False),
        ("after", OutcomeUnknown, True),
        ("lost", OutcomeUnknown, False),
        ("late", OutcomeUnknown, True),
    ],
)
def test_each_fault_of_a_write_is_a_result_not_an_exception(
    kind: str, error: type[Exception], there: bool
) -> None:
    async def main(world: World) -> None:
        world.fail_next("a", "write", kind, on="coordinator")
        results = await world.coordinator("a").write([Put("d/x", b"1"), Put("d/y", b"2")])
        assert [type(result.error) for result in results] == [error, error]
        await world.clock().sleep(60)
        assert await keys(world) == (["d/x", "d/y"] if there else [])

    World(1).run(main)


def test_put_raises_what_its_result_says() -> None:
    async def main(world: World) -> None:
        world.fail_next("a", "write", "after", on="coordinator")
        with pytest.raises(OutcomeUnknown):
            await world.coordinator("a").put("d/x", b"1")

    World(1).run(main)


def test_operations_of_one_partition_key_share_one_fate_and_shards_do_not() -> None:
    async def main(world: World) -> tuple[set[bool], bool]:
        seen = set()
        mixed = False
        for number in range(60):
            results = await world.coordinator("a").write(
                [
                    Put(f"d{number}/x", b"1", partition_key="p"),
                    Put(f"d{number}/y", b"2", partition_key="p"),
                    Put(f"e{number}/z", b"3"),
                ]
            )
            done = [result.error is None for result in results]
            seen.add(done[0] == done[1])
            mixed = mixed or done[0] != done[2]
        return seen, mixed

    world = World(1, coordinator_shards=4, faults=Faults(before=0.3))
    assert world.run(main) == ({True}, True)


def test_write_is_one_request_per_shard() -> None:
    def requests(shards: int) -> int:
        async def main(world: World) -> int:
            operations = [Put(f"d/{number}", b"v") for number in range(50)]
            await world.coordinator("a").write([*operations, Delete("d/0"), DeleteRange("d/10", "d/20")])
            assert len(await keys(world)) == 38  # without d/0, d/10 to d/19, and d/2 between them
            return world.requests.count("a", "coordinator.write")

        return World(1, coordinator_shards=shards).run(main)

    assert requests(1) == 1
    assert requests(4) == 4


def test_range_delete_done_in_some_shards_only_is_unknown() -> None:
    async def main(world: World) -> set[type[Exception] | None]:
        seen: set[type[Exception] | None] = set()
        for number in range(40):
            [result] = await world.coordinator("a").write([DeleteRange(*children(f"d{number}"))])
            seen.add(type(result.error) if result.error else None)
        return seen

    world = World(1, coordinator_shards=3, faults=Faults(before=0.4))
    assert world.run(main) == {None, Unavailable, OutcomeUnknown}


def test_reads_fail_with_unavailable() -> None:
    async def main(world: World) -> None:
        coordinator = world.coordinator("a")
        for call in (
            lambda: coordinator.get("d/k"),
            lambda: coordinator.ceiling("d/k"),
            lambda: coordinator.range_scan(*children("d")),
            lambda: coordinator.list(*children("d")),
        ):
            with pytest.raises(Unavailable):
                await call()

    World(1, faults=Faults(reset=1.0)).run(main)


def test_lease_of_a_living_actor_is_renewed() -> None:
    async def main(world: World) -> Record | None:
        world.spawn("a", hold)
        await world.clock().sleep(600)
        return await world.keys.get("d/lease")

    record = World(1, drift_ppm=1000).run(main)
    assert record is not None
    assert record.value == b"a"


def test_lease_of_a_crashed_actor_runs_out_and_another_takes_over() -> None:
    async def main(world: World) -> None:
        first = world.spawn("first", hold)
        await world.clock().sleep(100)
        first.crash()
        await world.clock().sleep(1)
        assert await keys(world) == ["d/lease"]
        await world.clock().sleep(3)
        assert await keys(world) == []
        world.spawn("second", hold)
        await world.clock().sleep(1)
        record = await world.keys.get("d/lease")
        assert record is not None
        assert record.value == b"second"

    World(1).run(main)


def test_paused_owner_finds_its_lease_gone_and_knows_it_at_once() -> None:
    async def work(me: Actor, told: list[bool]) -> None:
        session = await me.coordinator.open_session(2_000)
        await me.coordinator.put("d/lease", b"mine", ABSENT, session=session)
        for _ in range(100):
            told.append(session.alive)
            await me.clock.sleep(0.1)
        with pytest.raises(SessionExpired):
            await me.coordinator.put("d/lease", b"again", session=session)

    async def main(world: World) -> None:
        told: list[bool] = []
        actor = world.spawn("a", work, told)
        await world.clock().sleep(1)
        before = len(told)
        actor.pause(30)
        await world.clock().sleep(29)
        assert await keys(world) == []
        await world.join()
        assert all(told[:before])
        assert not any(told[before:])

    World(1).run(main)


def test_partitioned_owner_doubts_before_the_service_lets_go() -> None:
    async def work(me: Actor, held: list[Session]) -> None:
        session = await me.coordinator.open_session(3_000)
        await me.coordinator.put("d/lease", b"mine", ABSENT, session=session)
        me.world.partition(me, "coordinator")
        held.append(session)
        await asyncio.Event().wait()

    async def main(world: World) -> None:
        held: list[Session] = []
        world.spawn("a", work, held)
        async with world.keys.watch("d") as watch:
            await watch.changed()
            await world.clock().sleep(2)
            assert held[0].alive
            await watch.changed()
        assert await keys(world) == []
        assert not held[0].alive

    for seed in range(20):
        World(seed).run(main)


def test_closing_a_session_removes_its_keys() -> None:
    async def main(world: World) -> None:
        coordinator = world.coordinator("a")
        async with await coordinator.open_session() as session:
            await coordinator.put("d/k", b"v", session=session)
            assert await keys(world) == ["d/k"]
        assert await keys(world) == []
        assert not session.alive
        await session.close()

    World(1).run(main)


def test_session_of_another_world_is_refused() -> None:
    async def main(world: World) -> None:
        foreign = await world.keys.open_session()
        with pytest.raises(UsageError):
            await world.coordinator("a").put("d/k", b"v", session=foreign)
        await foreign.close()

    World(1).run(main)


def test_watch_wakes_after_a_change_and_through_a_partition_only_when_it_ends() -> None:
    async def watch(me: Actor) -> list[float]:
        woken = []
        async with me.coordinator.watch("d") as watch:
            for _ in range(2):
                await watch.changed()
                woken.append(me.world.now)
        return woken

    async def main(world: World) -> None:
        actor = world.spawn("a", watch)
        await world.clock().sleep(1)
        await world.keys.put("d/k", b"1")
        await world.clock().sleep(1)
        world.partition(actor, "coordinator", seconds=20)
        await world.keys.put("d/k", b"2")
        first, second = await actor.join()
        assert 1 < first < 2
        assert second >= 22

    World(1).run(main)


def test_watch_notices_the_end_of_a_crashed_owner() -> None:
    async def watch(me: Actor) -> float:
        async with me.coordinator.watch("d") as watch:
            await watch.changed()
            return me.world.now

    async def main(world: World) -> float:
        owner = world.spawn("owner", hold)
        await world.clock().sleep(1)
        watcher = world.spawn("watcher", watch)
        await world.clock().sleep(1)
        owner.crash()
        return float(await watcher.join())

    assert 2 < World(1).run(main) < 6


def test_new_life_has_a_view_of_its_own() -> None:
    async def work(me: Actor) -> None:
        await hold(me, 60_000)

    async def main(world: World) -> None:
        actor = world.spawn("a", work)
        await world.clock().sleep(1)
        view = actor.coordinator
        actor.crash()
        actor.restart(lambda me: me.coordinator.close())
        assert actor.coordinator is not view
        await world.join()
        assert await keys(world) == ["d/lease"]

    World(1).run(main)


def test_close_ends_sessions_and_watches_even_behind_a_partition() -> None:
    async def main(world: World) -> None:
        coordinator = world.coordinator("a")
        session = await coordinator.open_session()
        await coordinator.put("d/k", b"v", session=session)
        async with coordinator.watch("d") as watch:
            world.partition("a")
            await coordinator.close()
            with pytest.raises(Closed):
                await watch.changed()
        with pytest.raises(Closed):
            await coordinator.get("d/k")
        await world.clock().sleep(60)
        assert await keys(world) == []

    World(1, coordinator_latencies=FIXED).run(main)
