"""Services under the simulated world: virtual time, shuffled scheduling, stores that fail."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

from forebay.kit.ids import ulid_time_ms
from forebay.kit.periodic import PeriodicConfig, PeriodicService
from forebay.kit.service import HealthStatus, ServiceGroup
from forebay.testing import Actor, Faults, World


class Outcome:
    """What a run left behind."""

    def __init__(self) -> None:
        self.began_s: list[float] = []
        self.overlaps = 0
        self.statuses: set[HealthStatus] = set()
        self.final: HealthStatus | None = None
        self.trace = ""


def run(seed: int) -> Outcome:
    """An hour of a chore that writes to a store, which fails for a while and heals."""
    outcome = Outcome()
    under_way = 0

    async def owner(me: Actor) -> None:
        async def chore() -> None:
            nonlocal under_way
            outcome.overlaps += under_way
            outcome.began_s.append(me.clock.monotonic())
            under_way += 1
            try:
                await me.store.put(f"chore/{me.ids.ulid()}", b"done")
            finally:
                under_way -= 1

        config = PeriodicConfig(interval_ms=30_000, jitter=0.2, backoff_max_ms=120_000, failures_max=2)
        services = [
            PeriodicService(name, work, config, clock=me.clock, randomness=me.random)
            for name, work in (("chore", chore), ("idle", nothing))
        ]
        async with ServiceGroup("all", services) as group:
            for _ in range(360):
                await me.clock.sleep(10)
                outcome.statuses.add(group.health().status)
            await services[0].trigger()
            outcome.final = group.health().status

    async def nothing() -> None:
        return

    async def main(world: World) -> None:
        world.spawn("owner", owner)
        await world.clock().sleep(600)
        world.inject(Faults(before=0.9), on="store")
        await world.clock().sleep(900)
        world.heal()
        await world.join()

    world = World(seed)
    world.run(main)
    outcome.trace = world.trace_hash()
    return outcome


@pytest.mark.parametrize("seed", range(3))
def test_a_chore_lives_through_an_outage_without_overlapping_itself(seed: int) -> None:
    outcome = run(seed)
    assert outcome.overlaps == 0
    assert HealthStatus.HEALTHY in outcome.statuses
    assert outcome.statuses & {HealthStatus.DEGRADED, HealthStatus.FAILED}
    assert outcome.final is HealthStatus.HEALTHY
    waits = [after - before for before, after in pairwise(outcome.began_s)]
    assert min(waits[:-1]) >= 30 * 0.8
    assert 30 < len(outcome.began_s) < 3_600 / (30 * 0.8)


def test_the_same_seed_gives_the_same_passes() -> None:
    one, two, other = run(11), run(11), run(12)
    assert (one.trace, one.began_s) == (two.trace, two.began_s)
    assert other.began_s != one.began_s


def test_after_a_crash_at_any_moment_a_new_life_runs_to_its_end() -> None:
    lives: list[str] = []

    async def owner(me: Actor) -> None:
        async def chore() -> None:
            await me.store.put("chore", me.ids.token().encode())

        config = PeriodicConfig(interval_ms=100, failures_max=2)
        service = PeriodicService("chore", chore, config, clock=me.clock, randomness=me.random)
        async with ServiceGroup("all", [service]):
            for _ in range(5):
                await service.trigger()
        lives.append("ended")

    async def main(world: World, step: int) -> int:
        actor = world.spawn("owner", owner)
        world.crash_at(actor, step=step)
        await world.clock().sleep(60)
        if actor.crashed:
            actor.restart()
        await world.join()
        return actor.crashes

    crashes = 0
    for step in range(40):
        lives.clear()
        crashes += World(step).run(partial(main, step=step))
        assert lives[-1:] == ["ended"], step
    assert crashes > 20


def test_ids_of_a_world_carry_its_time() -> None:
    async def main(world: World) -> tuple[int, int]:
        await world.clock().sleep(3_600)
        return ulid_time_ms(world.ids().ulid()), world.clock().now_ms()

    made, now = World(5).run(main)
    assert made == now
