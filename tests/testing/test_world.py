from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from forebay import testing
from forebay.errors import ForebayError, Unavailable
from forebay.kit.conditions import ABSENT
from forebay.testing import (
    INSTANT,
    Actor,
    ActorCrashed,
    Constant,
    Deadlock,
    Faults,
    Forbidden,
    Latencies,
    SimulationError,
    World,
    run_seeds,
    seeds,
)


async def nothing(world: World) -> None:
    return


async def forever(me: Actor) -> None:
    await asyncio.Event().wait()


def test_public_names_are_there() -> None:
    assert all(hasattr(testing, name) for name in testing.__all__)
    assert testing.__all__ == sorted(testing.__all__, key=lambda name: (not name.isupper(), name))


def test_run_returns_the_result_of_main() -> None:
    async def main(world: World) -> int:
        await world.clock().sleep(5)
        return int(world.now)

    assert World(1).run(main) == 5


def test_a_world_runs_once() -> None:
    world = World(1)
    world.run(nothing)
    with pytest.raises(SimulationError, match="runs once"):
        world.run(nothing)


async def test_a_world_does_not_run_inside_a_running_loop() -> None:
    world = World(1)
    with pytest.raises(SimulationError, match="plain function"):
        world.run(nothing)
    world.close()


def test_errors_carry_the_seed() -> None:
    async def main(world: World) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as raised:
        World(4711).run(main)
    assert any("seed 4711" in note for note in raised.value.__notes__)


def test_failure_of_an_actor_nobody_joined_is_raised() -> None:
    async def fail(me: Actor) -> None:
        raise ValueError("nobody looked")

    async def main(world: World) -> None:
        world.spawn("a", fail)
        await world.clock().sleep(1)

    with pytest.raises(ValueError, match="nobody looked"):
        World(1).run(main)


def test_failure_of_an_actor_explains_a_deadlock() -> None:
    async def fail(me: Actor) -> None:
        raise ValueError("the reason")

    async def main(world: World) -> None:
        world.spawn("a", fail)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock) as raised:
        World(1).run(main)
    assert isinstance(raised.value.__cause__, ValueError)


def test_swallowed_use_of_a_thread_still_fails_the_run() -> None:
    async def sneaky(me: Actor) -> None:
        try:
            await asyncio.to_thread(print)
        except Exception:
            me.world.note(me.name, "swallowed", "")

    async def main(world: World) -> None:
        world.spawn("a", sneaky)
        await world.join()

    with pytest.raises(Forbidden):
        World(1).run(main)


def test_join_gives_result_or_says_crashed() -> None:
    async def answer(me: Actor, number: int) -> int:
        await me.clock.sleep(1)
        return number

    async def main(world: World) -> None:
        assert await world.spawn("a", answer, 42).join() == 42
        victim = world.spawn("b", answer, 43)
        victim.crash()
        with pytest.raises(ActorCrashed):
            await victim.join()
        with pytest.raises(ValueError, match="already"):
            world.spawn("a", answer, 1)

    World(1).run(main)


def test_nothing_of_a_crashed_actor_happens_any_more() -> None:
    said: list[str] = []

    async def child(me: Actor) -> None:
        await me.clock.sleep(1)
        said.append("child")

    async def work(me: Actor) -> None:
        asyncio.create_task(child(me))  # noqa: RUF006 - it dies with its actor
        try:
            await me.clock.sleep(2)
            said.append("work")
        except BaseException:
            said.append("except")
            raise
        finally:
            await me.store.put("from-the-dead", b"x")
            me.world.history.append("s", ["from the dead"])
            said.append("finally")

    async def main(world: World) -> list[str]:
        actor = world.spawn("a", work)
        await world.clock().sleep(0.5)
        actor.crash()
        await world.clock().sleep(10)
        assert [key async for key in world.bucket.list()] == []
        return list(said)

    world = World(1)
    assert world.run(main) == []
    assert world.history.calls == []
    assert world.requests.count() == 0


def test_request_in_flight_at_a_crash_arrives_or_not() -> None:
    def arrived(seed: int, in_flight: bool | None) -> bool:
        async def put(me: Actor) -> None:
            await me.store.put("k", b"v")

        async def main(world: World) -> bool:
            actor = world.spawn("a", put)
            await world.clock().sleep(0.005)
            actor.crash(in_flight)
            await world.clock().sleep(5)
            return [info.key async for info in world.bucket.list()] == ["k"]

        return World(seed, store_latencies=Latencies(Constant(10), decides_at=1.0)).run(main)

    assert {arrived(seed, None) for seed in range(20)} == {True, False}
    assert {arrived(seed, True) for seed in range(5)} == {True}
    assert {arrived(seed, False) for seed in range(5)} == {False}


def test_crash_at_a_step_runs_exactly_so_many_steps() -> None:
    async def count(me: Actor, ran: list[int]) -> None:
        for number in range(5):
            ran.append(number)
            await asyncio.sleep(0)

    def steps_run(step: int) -> int:
        ran: list[int] = []

        async def main(world: World) -> None:
            actor = world.spawn("a", count, ran)
            world.crash_at(actor, step=step)
            await world.join()
            assert actor.crashed == (step < 6)
            assert actor.steps == min(step, 6)

        World(1).run(main)
        return len(ran)

    assert [steps_run(step) for step in range(9)] == [0, 1, 2, 3, 4, 5, 5, 5, 5]


def test_restart_begins_a_new_life_with_new_ids() -> None:
    async def work(me: Actor, made: list[str]) -> None:
        made.append(me.ids.ulid())
        made.append(me.ids.token())
        await forever(me)

    async def main(world: World) -> list[str]:
        made: list[str] = []
        actor = world.spawn("a", work, made)
        await world.clock().sleep(1)
        actor.crash()
        actor.restart()
        await world.clock().sleep(1)
        actor.restart()
        await world.clock().sleep(1)
        assert (actor.lives, actor.crashes) == (3, 2)
        return made

    made = World(1).run(main)
    assert len(set(made)) == 6
    assert made[0] < made[2] < made[4]


def test_random_crashes_hit_and_the_actor_comes_back() -> None:
    async def work(me: Actor, done: list[int]) -> None:
        while len(done) < 50:
            await me.clock.sleep(0.1)
            done.append(me.lives)

    async def main(world: World) -> int:
        done: list[int] = []
        actor = world.spawn("a", work, done)
        actor.crash_randomly(0.1, restart_after_s=1)
        await world.join()
        assert done == sorted(done)
        assert not actor.crashed
        return actor.crashes

    assert all(World(seed).run(main) > 0 for seed in range(5))


def test_paused_actor_stands_still_while_the_world_goes_on() -> None:
    async def tick(me: Actor, at: list[float]) -> None:
        for _ in range(5):
            await me.clock.sleep(1)
            at.append(me.world.now)

    async def main(world: World) -> list[float]:
        at: list[float] = []
        actor = world.spawn("a", tick, at)
        await world.clock().sleep(2.5)
        actor.pause(10)
        await world.join()
        return at

    assert World(1).run(main) == [1.0, 2.0, 12.5, 13.5, 14.5]


def test_request_of_a_paused_actor_goes_on() -> None:
    async def put(me: Actor) -> float:
        await me.store.put("k", b"v")
        return me.world.now

    async def main(world: World) -> None:
        actor = world.spawn("a", put)
        await world.clock().sleep(0.005)
        actor.pause()
        await world.clock().sleep(1)
        assert (await world.bucket.get("k")).data == b"v"
        actor.resume()
        assert await actor.join() == pytest.approx(1.005)

    World(1, store_latencies=Latencies(Constant(10))).run(main)


def test_clocks_are_skewed_drift_and_step_but_monotonic_never_steps() -> None:
    async def main(world: World) -> None:
        one, two, main_clock = world.clock("one"), world.clock("two"), world.clock()
        assert one.now_ms() != two.now_ms()
        assert abs(one.now_ms() - main_clock.now_ms()) <= 60_000
        before, wall = one.monotonic(), one.now_ms()
        one.step(-3_600_000)
        assert one.now_ms() == wall - 3_600_000
        assert one.monotonic() == before
        await main_clock.sleep(10_000)
        assert one.monotonic() - before == pytest.approx(10_000, rel=1e-3)
        assert one.monotonic() - before != 10_000

    World(3, skew_ms=60_000, drift_ppm=200).run(main)


def test_sleep_is_counted_by_the_drifting_clock() -> None:
    async def main(world: World) -> None:
        clock = world.clock("one")
        before = clock.monotonic()
        await clock.sleep(100)
        assert clock.monotonic() - before == pytest.approx(100)

    World(3, drift_ppm=50_000).run(main)


def test_adding_an_actor_does_not_change_what_another_draws() -> None:
    async def draw(me: Actor, drawn: dict[str, list[object]]) -> None:
        await me.store.put(f"{me.name}/k", b"v")
        drawn[me.name] = [me.random.random(), me.ids.token(), me.world.now, me.clock.skew_ms]

    def run(*names: str) -> dict[str, list[object]]:
        drawn: dict[str, list[object]] = {}

        async def main(world: World) -> None:
            for name in names:
                world.spawn(name, draw, drawn)
            await world.join()

        World(5, skew_ms=1000).run(main)
        return drawn

    alone, together = run("b"), run("a", "b", "c")
    assert alone["b"] == together["b"]
    assert together["a"] != together["b"]


def test_requests_and_bytes_are_counted_by_actor_and_operation() -> None:
    async def work(me: Actor) -> None:
        await me.store.put("k", b"12345")
        await me.store.get("k")
        await me.coordinator.put("d/k", b"123")
        await me.coordinator.get("d/k")

    async def main(world: World) -> None:
        actor = world.spawn("a", work)
        await world.join()
        assert list(world.requests) == [
            ("a", "coordinator.get", (1, 0, 3)),
            ("a", "coordinator.write", (1, 3, 0)),
            ("a", "store.get", (1, 0, 5)),
            ("a", "store.put", (1, 5, 0)),
        ]
        before = world.requests.snapshot()
        actor.restart()
        await world.join()
        assert world.requests.since(before).count("a", "store") == 2
        assert world.requests.total("a").bytes_sent == 16
        assert world.requests.count("b") == 0

    World(1).run(main)


def test_trace_tells_every_effect_crash_and_pause() -> None:
    async def work(me: Actor) -> None:
        await me.store.put("k", b"v", ABSENT)
        await forever(me)

    async def main(world: World) -> None:
        actor = world.spawn("a", work)
        await world.clock().sleep(1)
        actor.pause(1)
        await world.clock().sleep(2)
        actor.crash()

    world = World(1)
    world.run(main)
    told = [(event.actor, event.what, event.outcome) for event in world.events]
    assert told == [
        ("a", "spawn", ""),
        ("a", "store.put", "ok"),
        ("a", "pause", ""),
        ("a", "resume", ""),
        ("a", "crash", ""),
    ]


def test_heal_ends_faults_partitions_pauses_and_random_crashes() -> None:
    async def put(me: Actor) -> None:
        while True:
            try:
                await me.store.put("k", b"v")
                return
            except Unavailable:
                await me.clock.sleep(1)

    async def main(world: World) -> None:
        actor = world.spawn("a", put)
        actor.crash_randomly(0.0)
        world.partition(actor)
        actor.pause()
        await world.clock().sleep(100)
        assert not actor.done
        world.heal()
        await world.join()

    World(1, faults=Faults(before=1.0)).run(main)


def test_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    async def work(me: Actor) -> None:
        for number in range(10):
            try:
                await me.store.put(f"k{number % 3}", me.name.encode())
                await me.coordinator.put("d/k", me.name.encode())
            except ForebayError:
                await me.clock.sleep(me.random.random())

    def fingerprint(seed: int) -> str:
        async def main(world: World) -> str:
            for name in "abc":
                world.spawn(name, work).crash_randomly(0.01, restart_after_s=1, crashes_max=3)
            await world.join()
            return world.trace_hash()

        return World(seed, faults=Faults.all(0.05), rotate_s=0.2).run(main)

    hashes = [fingerprint(seed) for seed in range(10)]
    assert hashes == [fingerprint(seed) for seed in range(10)]
    assert len(set(hashes)) == 10


def test_number_of_seeds_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_SEEDS", "7")
    assert seeds(3) == range(7)
    monkeypatch.delenv("FOREBAY_SEEDS")
    assert seeds(3) == range(3)


def test_failing_seed_is_named() -> None:
    def scenario(seed: int) -> int:
        if seed == 3:
            raise ValueError("broken")
        return seed

    with pytest.raises(ValueError, match="broken") as raised:
        list(run_seeds(scenario, range(10)))
    assert raised.value.__notes__ == ["the scenario failed with seed 3"]
    assert list(run_seeds(scenario, range(3))) == [0, 1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda world: world.inject(Faults(), on="disk"),
        lambda world: world.partition("a", "disk"),
        lambda world: world.fail_next("a", "put", "no such kind"),
        lambda world: world.spawn("main", forever),
        lambda world: world.spawn("a", forever).crash_randomly(2),
        lambda world: world.spawn("b", forever).crash_at(-1),
    ],
)
def test_wrong_usage_is_refused(wrong: Callable[[World], Awaitable[None]]) -> None:
    world = World(1, store_latencies=INSTANT)
    with pytest.raises(ValueError, match=r".+"):
        wrong(world)
    world.close()


def test_background_task_that_failed_unseen_fails_the_run() -> None:
    async def fail() -> None:
        raise ValueError("in the background")

    async def work(me: Actor) -> None:
        task = asyncio.create_task(fail())
        await me.clock.sleep(1)
        assert task.done()

    async def main(world: World) -> None:
        world.spawn("a", work)
        await world.join()

    with pytest.raises(ValueError, match="in the background"):
        World(1).run(main)


def test_actor_ends_with_its_function_and_takes_along_what_it_left_running() -> None:
    async def tick(me: Actor, ticks: list[float]) -> None:
        while True:
            await me.clock.sleep(1)
            ticks.append(me.world.now)

    async def work(me: Actor, ticks: list[float]) -> None:
        asyncio.create_task(tick(me, ticks))  # noqa: RUF006 - left running on purpose
        await me.clock.sleep(3.5)

    async def main(world: World) -> list[float]:
        ticks: list[float] = []
        actor = world.spawn("a", work, ticks)
        await world.clock().sleep(10)
        assert actor.done
        assert not actor.crashed
        return list(ticks)

    assert World(1).run(main) == [1.0, 2.0, 3.0]


def test_sets_of_tasks_are_walked_in_the_same_order_every_run() -> None:
    async def wait(me: Actor, number: int, order: list[int]) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            order.append(number)

    async def work(me: Actor, order: list[int]) -> None:
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(30):
                    group.create_task(wait(me, number, order))
                await me.clock.sleep(1)
                raise ValueError("abort")

    def order(garbage: int) -> list[int]:
        kept = [bytearray(number * 7 % 500) for number in range(garbage)]
        walked: list[int] = []

        async def main(world: World) -> None:
            world.spawn("a", work, walked)
            await world.join()

        World(1).run(main)
        del kept
        return walked

    assert order(0) == order(777) == order(4321)
