"""Subscribers, retention and recovery against a model that is too simple to be wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.quiver.harness import SMALL, batch, numbers
from tests.quiver.sim_disk import SimDisk

from forebay.kit.clock import SystemClock
from forebay.quiver import Delivery, Quiver

NAMES = st.sampled_from(["a", "b", "c"])
CONFIG = dataclasses.replace(
    SMALL,
    segment_open_ms=86_400_000,
    maintenance_interval_ms=3_600_000,
    lease_ms=86_400_000,
    retry_base_ms=0,
    retry_cap_ms=0,
)


class Model(RuleBasedStateMachine):
    """One segment per batch; time stands still; the disk may be killed or lose power at rest."""

    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.disk = SimDisk(random.Random(5))
        self.written: list[int] = []
        self.needs: dict[str, set[int]] = {}
        self.held: list[tuple[str, Delivery]] = []

    def run(self, work: object) -> object:
        return self.runner.run(work)  # type: ignore[arg-type]

    @initialize()
    def begin(self) -> None:
        self.open()

    def open(self) -> None:
        async def work() -> Quiver:
            return await Quiver(
                self.disk, self.config, clock=SystemClock(), randomness=random.Random(3)
            ).open()

        self.quiver: Quiver = self.run(work())  # type: ignore[assignment]
        self.held = []

    @rule()
    def ingest(self) -> None:
        self.run(self.make_segment(len(self.written)))
        for needs in self.needs.values():
            needs.add(len(self.written))
        self.written.append(len(self.written))

    async def make_segment(self, number: int) -> None:
        await self.quiver.ingest(batch(number))
        await self.quiver.flush()

    @rule(name=NAMES, latest=st.booleans())
    def register(self, name: str, latest: bool) -> None:
        async def work() -> set[int]:
            await self.quiver.maintain()
            there = {number - 1 for number in self.quiver._segments}
            await self.quiver.register(name, "latest" if latest else "earliest")
            return there

        there: set[int] = self.run(work())  # type: ignore[assignment]
        self.needs.setdefault(name, set() if latest else there)

    @rule(name=NAMES)
    def unregister(self, name: str) -> None:
        self.run(self.quiver.unregister(name))
        self.needs.pop(name, None)
        self.held = [each for each in self.held if each[0] != name]

    @rule(name=NAMES)
    def take(self, name: str) -> None:
        if name not in self.needs:
            return
        delivery: Delivery | None = self.run(self.quiver.next(name, 0))  # type: ignore[assignment]
        free = self.needs[name] - {numbers(each)[0] for who, each in self.held if who == name}
        if delivery is None:
            assert not free
            return
        assert numbers(delivery) == [min(free)]
        self.held.append((name, delivery))

    @rule(data=st.data(), outcome=st.sampled_from(["ack", "nack", "reject", "release"]))
    def settle(self, data: st.DataObject, outcome: str) -> None:
        if not self.held:
            return
        name, delivery = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if outcome == "release":
            delivery.release()
            return
        assert self.run(getattr(delivery, outcome)())
        if outcome != "nack":
            self.needs[name].discard(numbers(delivery)[0])

    @rule()
    def maintain(self) -> None:
        self.run(self.quiver.maintain())
        if self.needs:
            there = {number - 1 for number in self.quiver._segments}
            assert there == set().union(*self.needs.values())

    @rule(power_loss=st.booleans())
    def crash(self, power_loss: bool) -> None:
        self.disk = self.disk.after_crash(power_loss=power_loss)
        self.runner.close()
        self.runner = asyncio.Runner()
        self.open()
        assert self.quiver.report.is_clean

    @rule()
    def restart(self) -> None:
        self.run(self.quiver.close())
        self.open()

    @invariant()
    def positions_agree(self) -> None:
        if not hasattr(self, "quiver"):
            return
        whole = self.quiver.stats()
        assert whole.rows == sum(each.rows for each in self.quiver._segments.values())
        assert whole.segment_bytes == sum(each.file_bytes for each in self.quiver._segments.values())
        stats = {each.name: each for each in whole.subscribers}
        assert stats.keys() == self.needs.keys()
        for name, needs in self.needs.items():
            assert stats[name].lag_segments == len(needs)
            pinned = sum(self.quiver._segments[each + 1].file_bytes for each in needs)
            assert stats[name].pinned_bytes == pinned
            first_needed = min(needs, default=len(self.written)) + 1
            assert stats[name].high_water == first_needed - 1

    def teardown(self) -> None:
        if hasattr(self, "quiver"):
            self.run(self.quiver.close())
        self.runner.close()


class HeldModel(Model):
    """The same where subscribers that keep up get segments that are no files, for as long as they like."""

    config = dataclasses.replace(CONFIG, segment_bytes=2_048, segment_hold_ms=60_000)

    async def make_segment(self, number: int) -> None:
        await self.quiver.ingest(batch(number, 100, plain=True))
        while number + 1 not in self.quiver._segments:
            await self.quiver._finalizer.changed()

    @rule()
    def flush(self) -> None:
        self.run(self.quiver.flush())
        assert not self.quiver._finalizer.held


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestModel = Model.TestCase
HeldModel.TestCase.settings = Model.TestCase.settings
TestHeldModel = HeldModel.TestCase
