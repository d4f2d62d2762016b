"""A store that dies at an operation of its disk, and what must be true of the one that is opened then."""

from __future__ import annotations

import asyncio
import dataclasses
import random

from tests.quiver.harness import SMALL, batch, numbers, store
from tests.quiver.sim_disk import SimCrash, SimDisk

from forebay.errors import ForebayError
from forebay.quiver import Quiver
from forebay.testing.actor import Actor
from forebay.testing.world import World

HELD = dataclasses.replace(SMALL, segment_hold_ms=150, retry_base_ms=10)


class Life:
    """What is known across crashes. `held`: subscribers get segments before they are files."""

    def __init__(self, *, held: bool = False) -> None:
        self.config = HELD if held else SMALL
        self.is_held = held
        self.next_number = 0
        self.acknowledged: set[int] = set()
        self.refused: set[int] = set()
        self.resolved: dict[str, set[int]] = {"a": set(), "b": set()}
        """Numbers whose ack returned."""
        self.delivered: dict[str, set[int]] = {"a": set(), "b": set()}
        self.registered: set[str] = set()
        self.problems: list[str] = []
        self.spared = 0.0
        """Segments of the last life that were never files."""

    async def run(self, world: World, disk: SimDisk, rounds: int) -> None:
        quiver = await store(world, disk, self.config).open()
        for name in ("a", "b"):
            await quiver.register(name)
            self.registered.add(name)
        readers = [asyncio.create_task(self.read(world, quiver, name)) for name in ("a", "b")]
        try:
            for number in range(rounds):
                if number % 2 == 0:
                    await asyncio.gather(*(self.produce(quiver) for _ in range(3)))
                else:
                    # One after the other: the later ones are written in the loop's own thread.
                    for _ in range(3):
                        await self.produce(quiver)
                if self.is_held:
                    # Time for a segment to come of age, and for subscribers to keep up.
                    await world.clock().sleep(2 * self.config.segment_open_ms / 1000)
            await quiver.flush()
        finally:
            results = await asyncio.gather(*readers, return_exceptions=True)
        for problem in results:
            if isinstance(problem, BaseException):
                raise problem
        self.spared = quiver._metrics.spared.labels().value
        await quiver.close()

    async def read_the_rest(self, world: World, disk: SimDisk) -> None:
        """Open what is left once more, and compare."""
        disk.clock = world.clock()
        async with store(world, disk, self.config) as quiver:
            # A group of which the middle was lost looks like damage, and nothing in it was acknowledged.
            assert quiver.report.is_clean or disk.tears_sectors, quiver.report
            for name in ("a", "b"):
                await quiver.register(name)
                await self.read(world, quiver, name)
        assert not self.problems, self.problems
        for name, seen in self.delivered.items():
            assert self.acknowledged <= seen, f"{name} never got {self.acknowledged - seen}"

    async def produce(self, quiver: Quiver) -> None:
        number = self.next_number
        self.next_number += 1
        try:
            await quiver.ingest(batch(number, 20, plain=self.is_held))
        except ForebayError:
            self.refused.add(number)
            return
        self.acknowledged.add(number)

    async def read(self, world: World, quiver: Quiver, name: str) -> None:
        while (delivery := await quiver.next(name, 0.6)) is not None:
            found = set(numbers(delivery))
            if again := found & self.resolved[name]:
                self.problems.append(f"{name} got {again} again after its ack was durable")
            self.delivered[name] |= found
            if self.is_held and name == "b" and delivery.segment % 7 == 3:
                # One of the two is slow: a file is written of what the other is done with.
                await world.clock().sleep(2 * self.config.segment_hold_ms / 1000)
            if delivery.segment % (7 if self.is_held else 3) == 1 and delivery.attempt == 1:
                await delivery.nack()
            elif await delivery.ack():
                self.resolved[name] |= found


def crash_once(
    seed: int,
    crash_at: int,
    *,
    power_loss: bool,
    again_at: int | None = None,
    fail_at: tuple[int, int] | None = None,
    tears_sectors: bool = False,
    held: bool = False,
) -> int:
    """Crash at an operation, reopen (perhaps crash again), and read everything. Returns operations made."""
    disk = SimDisk(random.Random(seed))
    disk.tears_sectors = tears_sectors
    life = Life(held=held)

    async def one(me: Actor, world: World, current: SimDisk, rounds: int) -> None:
        try:
            await life.run(world, current, rounds)
        except SimCrash:
            await asyncio.get_running_loop().create_future()
        except ForebayError:
            assert fail_at is not None

    async def main(world: World) -> int:
        current = disk
        for number, at in enumerate([crash_at, again_at]):
            if at is None:
                continue
            current.clock, current.crash_at = world.clock(), at
            stopped = asyncio.Event()
            current.on_crash = stopped.set
            current.fail_at = fail_at
            actor = world.spawn(f"life-{number}", one, world, current, 15)
            done = asyncio.ensure_future(actor.settled())
            crash = asyncio.ensure_future(stopped.wait())
            await asyncio.wait({done, crash}, return_when=asyncio.FIRST_COMPLETED)
            if not stopped.is_set():
                crash.cancel()
                if fail_at is None:
                    if held:
                        assert life.spared, "nobody had a segment that was never a file"
                    assert current.run_here_count >= 8, "both ways to the disk are crashed on"
                    return current.operations
            actor.crash()
            await done
            current = current.after_crash(power_loss=power_loss)
        await life.read_the_rest(world, current)
        return 0

    return World(seed, seconds_max=1_000_000).run(main)
