"""What the simulated store does beyond the contract: latency, faults, partitions, counting.

The contract itself is checked by the behaviour suite, which runs on this store too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from forebay.errors import (
    Closed,
    ForebayError,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    Unavailable,
)
from forebay.kit.conditions import ABSENT
from forebay.storage import MemoryStore
from forebay.testing import Actor, Constant, Faults, Latencies, SimStore, SimulationError, World
from forebay.testing.sim_store import at_once

FIXED = Latencies(Constant(25), {"put": Constant(60)}, decides_at=1.0)
Work = Callable[[Actor], Coroutine[Any, Any, object]]


def run(work: Work, prepare: Callable[[World], None] = lambda world: None, seed: int = 1) -> Any:
    """Run one actor to its end, let late things arrive, and return its result with the world."""

    async def main(world: World) -> Any:
        prepare(world)
        result = await world.spawn("a", work).join()
        await world.clock().sleep(60)
        return result, {
            info.key: (await world.bucket.get(info.key)).data async for info in world.bucket.list()
        }

    return World(seed, store_latencies=FIXED).run(main)


def failing(kind: str, operation: str = "put") -> Callable[[World], None]:
    return lambda world: world.fail_next("a", operation, kind)


async def put(me: Actor) -> str:
    try:
        await me.store.put("k", b"v", ABSENT)
    except ForebayError as error:
        return f"{type(error).__name__} at {me.world.now:.3f}"
    return f"ok at {me.world.now:.3f}"


async def get(me: Actor) -> str:
    await me.world.bucket.put("k", b"v")
    try:
        await me.store.get("k")
    except ForebayError as error:
        return f"{type(error).__name__} at {me.world.now:.3f}"
    return f"ok at {me.world.now:.3f}"


def test_operations_take_their_own_time() -> None:
    assert run(put)[0] == "ok at 0.060"
    assert run(get)[0] == "ok at 0.025"


@pytest.mark.parametrize(
    ("kind", "seen", "there"),
    [
        ("before", "Unavailable at 0.060", False),
        ("throttle", "Unavailable at 0.006", False),
        ("after", "OutcomeUnknown at 0.060", True),
        ("lost", "OutcomeUnknown at 0.060", False),
        ("late", "OutcomeUnknown at 0.060", True),
        ("duplicate", "ok at 0.060", True),
        ("slow", "ok at 1.200", True),
    ],
)
def test_each_fault_of_a_write_does_what_it_says(kind: str, seen: str, there: bool) -> None:
    assert run(put, failing(kind)) == (seen, {"k": b"v"} if there else {})


@pytest.mark.parametrize(
    ("kind", "seen"),
    [("before", "Unavailable at 0.025"), ("reset", "Unavailable at 0.025"), ("slow", "ok at 0.500")],
)
def test_each_fault_of_a_read_does_what_it_says(kind: str, seen: str) -> None:
    assert run(get, failing(kind, "get"))[0] == seen


def test_late_write_takes_effect_after_the_caller_gave_up() -> None:
    async def work(me: Actor) -> bool:
        with pytest.raises(OutcomeUnknown):
            await me.store.put("k", b"v")
        return "k" in [info.key async for info in me.world.bucket.list()]

    there_at_once, objects = run(work, failing("late"))
    assert not there_at_once
    assert objects == {"k": b"v"}


def test_duplicate_of_an_unconditional_put_comes_back_over_a_newer_one() -> None:
    async def work(me: Actor) -> None:
        await me.store.put("k", b"old")
        await me.clock.sleep(1)
        await me.store.put("k", b"new")

    seen = {run(work, failing("duplicate"), seed)[1]["k"] for seed in range(20)}
    assert seen == {b"old", b"new"}


def test_duplicate_of_a_conditional_put_is_refused() -> None:
    async def work(me: Actor) -> None:
        version = await me.store.put("k", b"old", ABSENT)
        await me.store.put("k", b"new", version)

    for seed in range(20):
        assert run(work, failing("duplicate"), seed)[1] == {"k": b"new"}


def test_rates_are_kept() -> None:
    async def work(me: Actor) -> int:
        unknown = 0
        for number in range(1000):
            try:
                await me.store.put(f"k{number % 10}", b"v")
            except OutcomeUnknown:
                unknown += 1
        return unknown

    unknown, _ = run(work, lambda world: world.inject(Faults(after={"put": 0.1, "get": 1.0}), on="store"))
    assert 60 < unknown < 140


@pytest.mark.parametrize("decides_at", [0.0, 0.5, 1.0])
def test_conditional_put_is_decided_when_the_latency_says(decides_at: float) -> None:
    async def main(world: World) -> bool:
        put = asyncio.ensure_future(world.store("a").put("k", b"v", ABSENT))
        await asyncio.sleep(0.007)
        there = "k" in [info.key async for info in world.bucket.list()]
        await put
        return there

    latencies = Latencies(Constant(10), decides_at=decides_at)
    assert World(1, store_latencies=latencies).run(main) == (decides_at < 0.7)


def test_of_two_racing_puts_the_first_decided_wins_whoever_asked_first() -> None:
    async def main(world: World) -> bool:
        slow = asyncio.ensure_future(world.store("slow").put("k", b"slow", ABSENT))
        await asyncio.sleep(0.001)
        fast = asyncio.ensure_future(world.store("fast").put("k", b"fast", ABSENT))
        results = await asyncio.gather(slow, fast, return_exceptions=True)
        losers = [result for result in results if isinstance(result, PreconditionFailed)]
        assert len(losers) == 1
        return isinstance(results[0], str)

    winners = {World(seed, store_latencies=Latencies()).run(main) for seed in range(30)}
    assert winners == {True, False}


def test_cancelled_put_takes_effect_or_not() -> None:
    async def work(me: Actor) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(me.store.put("k", b"v"), 0.03)

    assert {len(run(work, seed=seed)[1]) for seed in range(20)} == {0, 1}


def test_partition_leaves_the_caller_without_an_answer_and_without_effect() -> None:
    async def work(me: Actor) -> set[str]:
        seen = set()
        for number in range(12):
            seen.add((await put(me)).split()[0])
            with pytest.raises(Unavailable):
                await me.store.get(f"k{number}")
        return seen

    seen, objects = run(work, lambda world: world.partition("a", "store"))
    assert seen == {"OutcomeUnknown", "Unavailable"}
    assert objects == {}


def test_partition_of_replies_hides_an_effect() -> None:
    assert run(put, lambda world: world.partition("a", "store", replies_only=True)) == (
        "OutcomeUnknown at 5.060",
        {"k": b"v"},
    )


def test_partition_ends_after_its_time_and_concerns_one_actor() -> None:
    async def main(world: World) -> None:
        world.partition("a", "store", seconds=10)
        await world.store("b").put("k", b"b")
        with pytest.raises(Unavailable):
            await world.store("a").get("k")
        await world.clock().sleep(10)
        assert (await world.store("a").get("k")).data == b"b"

    World(1).run(main)


def test_spectator_meets_no_faults() -> None:
    async def main(world: World) -> None:
        for number in range(50):
            await world.store().put(f"k{number}", b"v")

    World(1, faults=Faults(before=1.0)).run(main)


def test_body_is_copied_when_it_is_sent() -> None:
    async def work(me: Actor) -> None:
        body = bytearray(b"first")
        sending = asyncio.ensure_future(me.store.put("k", body))
        await asyncio.sleep(0)
        body[:] = b"later"
        await sending

    assert run(work)[1] == {"k": b"first"}


def test_pages_are_one_request_each() -> None:
    async def work(me: Actor) -> list[int]:
        for number in range(7):
            await me.world.bucket.put(f"k{number}", b"")
        return [len(page) async for page in me.store.list_pages("k", page_keys=3)]

    async def main(world: World) -> None:
        assert await world.spawn("a", work).join() == [3, 3, 1]
        assert world.requests.count("a", "store.list") == 3

    World(1).run(main)


async def _closed(store: SimStore, call: Callable[[SimStore], Awaitable[object]]) -> None:
    with pytest.raises(Closed):
        await call(store)


def test_closed_view_refuses_and_the_world_gives_a_new_one() -> None:
    async def main(world: World) -> None:
        store = world.store("a")
        await store.close()
        await _closed(store, lambda store: store.put("k", b""))
        await _closed(store, lambda store: store.delete(["k"]))
        await _closed(store, lambda store: store.head("k"))
        assert world.store("a") is not store
        with pytest.raises(NotFound):
            await world.store("a").get("k")

    World(1).run(main)


def test_effect_that_waits_is_refused() -> None:
    async def waits() -> None:
        await asyncio.sleep(1)

    with pytest.raises((SimulationError, RuntimeError)):
        at_once(waits())
    assert at_once(MemoryStore().delete([])) == []
