"""The whole log on a real Oxia and a real S3: a server restart in the middle, and kill -9.

The servers are real, so is the time. The story is that of the simulated cast, shorter: writers, readers, two
compactors and vacuum at once; then every acknowledged record must be where its writer was told, once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from forebay.cli import run
from forebay.coordination import Coordinator, open_coordinator
from forebay.errors import ForebayError
from forebay.kit import IdSource, SystemClock
from forebay.log import (
    AppendGroup,
    Compactor,
    CompactorConfig,
    CompactorService,
    CompactorServiceConfig,
    DataLost,
    LogReader,
    LogWriter,
    Vacuum,
    VacuumConfig,
    WriterConfig,
    verify,
)
from forebay.storage import ObjectStore, open_store
from forebay.testing.kill import Child
from forebay.testing.servers import OxiaServer, SeaweedServer

TOPIC = "t"
WRITING = WriterConfig(upload_deadline_ms=2_000)
COMPACTING = CompactorConfig(
    target_bytes=4_000, entries_min=1, min_age_ms=0, wait_for_full_ms=0, commit_deadline_ms=2_000
)
VACUUMING = VacuumConfig(grace_ms=6_000, mark_gap_ms=500)
NIGHTLY_KILLS = 100


@pytest.fixture
def own_oxia(oxia: OxiaServer) -> Iterator[OxiaServer]:
    """A server of our own: it is restarted under load, and its catalog must name only our bucket."""
    with OxiaServer() as server:
        yield server


@dataclass(frozen=True)
class Deployment:
    store: ObjectStore
    coordinator: Coordinator
    parts: dict[str, Any]
    ids: IdSource

    def writer(self, name: str) -> LogWriter:
        return LogWriter(self.store, self.coordinator, ids=self.ids, config=WRITING, name=name, **self.parts)

    def reader(self) -> LogReader:
        return LogReader(self.store, self.coordinator, **self.parts)

    def compactor(self) -> Compactor:
        return Compactor(self.store, self.coordinator, ids=self.ids, config=COMPACTING, **self.parts)

    async def read_all(self, partition: int) -> tuple[int, list[str]]:
        """The earliest offset and all values."""
        reader = self.reader()
        earliest = (await reader.offsets(TOPIC, partition)).earliest
        scan = reader.scan_batches(TOPIC, partition)
        return earliest, [value.decode() async for batch in scan for value in batch.batch.records()]


@asynccontextmanager
async def opened(store_url: str, coordinator_url: str) -> AsyncIterator[Deployment]:
    clock = SystemClock()
    async with open_store(store_url) as store, open_coordinator(coordinator_url) as coordinator:
        parts: dict[str, Any] = {"clock": clock, "randomness": random.Random()}
        yield Deployment(store, coordinator, parts, IdSource(clock))


async def settled(deployment: Deployment, partitions: int) -> None:
    """Compact and vacuum what is left, then nothing may be wrong."""
    for partition in range(partitions):
        results = await deployment.compactor().compact_all(TOPIC, partition)
        assert results[-1].outcome == "idle" and results[-1].lag_records == 0, results[-1]
    report = await verify(deployment.store, deployment.coordinator, **deployment.parts)
    assert report.ok, report.as_json()
    hasty = VacuumConfig(grace_ms=0, mark_gap_ms=0)
    vacuum = Vacuum(deployment.store, deployment.coordinator, config=hasty, **deployment.parts)
    for _ in range(2):
        found = await vacuum.run_once()
    assert not found.failed and not found.stalled
    report = await verify(deployment.store, deployment.coordinator, **deployment.parts)
    assert report.ok and report.orphans == [], report.as_json()


# -- one process, everything at once, the coordinator restarted in the middle


class Cast:
    """Writers, readers and a compactor of one process, and what they were told."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.acked: list[tuple[int, int, str]] = []
        """Partition, offset, value."""
        self.unknown: set[str] = set()
        self.over = asyncio.Event()

    async def write(self, name: str, appends: int) -> None:
        writer = self.deployment.writer(name)
        for number in range(appends):
            values = [f"{name}/{number}.{part}" for part in range(3)]
            groups = [AppendGroup.of(TOPIC, p, [value.encode() for value in values]) for p in (0, 1)]
            for partition, result in enumerate(await writer.append_shared(groups)):
                if result.error is None:
                    assert result.start_offset is not None
                    self.acked += [
                        (partition, result.start_offset + place, value) for place, value in enumerate(values)
                    ]
                else:
                    self.unknown.update(values)

    async def read(self, partition: int) -> int:
        """From the start to the end, again and again; records seen."""
        reader, position, seen = self.deployment.reader(), 1, 0
        while not self.over.is_set():
            try:
                found = await reader.read(TOPIC, partition, position)
            except ForebayError as error:
                assert not isinstance(error, DataLost), error
                await asyncio.sleep(0.05)
                continue
            seen += len(found)
            position = found.next_offset if len(found) else 1
            await asyncio.sleep(0.02)
        return seen

    async def compact(self) -> None:
        compactor = self.deployment.compactor()
        while not self.over.is_set():
            try:
                await compactor.compact_once(TOPIC, random.randint(0, 1))
            except ForebayError as error:
                assert not isinstance(error, DataLost), error
            await asyncio.sleep(0.05)

    async def some_acked(self) -> None:
        while len(self.acked) < 100:  # noqa: ASYNC110 - the servers' time, not ours
            await asyncio.sleep(0.02)

    async def check(self) -> None:
        for partition in (0, 1):
            earliest, values = await self.deployment.read_all(partition)
            told = [(offset, value) for place, offset, value in self.acked if place == partition]
            assert earliest == 1
            assert [value for offset, value in told if values[offset - 1] != value] == []
            assert max(Counter(values).values()) == 1
            assert set(values) <= {value for _, value in told} | self.unknown


def service_of(deployment: Deployment) -> CompactorService:
    config = CompactorServiceConfig(
        interval_ms=100,
        discovery_interval_ms=500,
        vacuum_interval_ms=700,
        session_timeout_ms=5_000,
        compaction=COMPACTING,
        vacuum=VACUUMING,
    )
    return CompactorService(
        deployment.store, deployment.coordinator, ids=deployment.ids, config=config, **deployment.parts
    )


async def test_the_cast_on_real_servers_survives_a_restart_of_the_coordinator(
    seaweed: SeaweedServer, own_oxia: OxiaServer
) -> None:
    urls = seaweed.url("log-cast"), own_oxia.url()
    async with opened(*urls) as ours, opened(*urls) as theirs:
        cast = Cast(ours)
        async with service_of(theirs), asyncio.TaskGroup() as background:
            readers = [background.create_task(cast.read(partition)) for partition in (0, 1)]
            background.create_task(cast.compact())
            async with asyncio.TaskGroup() as writing:
                for number in range(3):
                    writing.create_task(cast.write(f"w{number}", 25))
                await cast.some_acked()
                await asyncio.to_thread(own_oxia.kill)
                await asyncio.to_thread(own_oxia.start)
            cast.over.set()
        assert all(reader.result() for reader in readers) and len(cast.acked) > 200
        await settled(ours, 2)
        await cast.check()


# -- processes that are killed


async def child_write(report: Any, store: str, coordinator: str, life: str) -> None:
    async with opened(store, coordinator) as deployment:
        writer = deployment.writer(f"writer {life}")
        number = 0
        while True:
            values = [f"{life}/{number}.{part}" for part in range(2)]
            report.attempt(values)
            group = AppendGroup.of(TOPIC, 0, [value.encode() for value in values])
            [result] = await writer.append_shared([group])
            if result.error is None:
                report.ack([result.start_offset, values])
                report.mark("acked")
            number += 1


async def child_compact(report: Any, store: str, coordinator: str) -> None:
    async with opened(store, coordinator) as deployment:
        compactor = deployment.compactor()
        report.mark("ready")
        while True:
            try:
                result = await compactor.compact_once(TOPIC, 0)
            except ForebayError as error:
                assert not isinstance(error, DataLost), error
                continue
            report.mark(result.outcome)


def _kill_over_and_over(store: str, coordinator: str, kills: int, seed: int) -> None:
    """Half of the kills hit writers, half compactors, at random moments."""
    draw = random.Random(seed)
    urls = {"store": store, "coordinator": coordinator}
    acked: list[tuple[int, list[str]]] = []
    attempted: list[str] = []
    compactor = Child(child_compact, arguments=urls)
    compactor.start()
    try:
        for life in range((kills + 1) // 2):
            with Child(child_write, arguments={**urls, "life": f"{seed}-{life}"}) as writer:
                writer.wait_for("acked", count=draw.randint(1, 8))
                compactor.wait_for("ready")
                writer.kill()
                acked += [(offset, values) for offset, values in writer.acknowledged]
                attempted += [value for values in writer.attempted for value in values]
            if 2 * life + 1 < kills:
                compactor.restart()
    finally:
        compactor.close()
    asyncio.run(_check_after_kills(store, coordinator, acked, attempted))


async def _check_after_kills(
    store: str, coordinator: str, acked: list[tuple[int, list[str]]], attempted: list[str]
) -> None:
    async with opened(store, coordinator) as deployment:
        await settled(deployment, 1)
        _, values = await deployment.read_all(0)
        for offset, sent in acked:
            assert values[offset - 1 : offset - 1 + len(sent)] == sent
        assert max(Counter(values).values()) == 1
        assert set(values) <= set(attempted)
        assert len(acked) >= 1


def test_killed_writers_and_compactors_lose_nothing(seaweed: SeaweedServer, own_oxia: OxiaServer) -> None:
    store, coordinator = seaweed.url("log-kills"), own_oxia.url()
    _kill_over_and_over(store, coordinator, kills=5, seed=1)
    assert run(["verify", "--store", store, "--coordinator", coordinator]) == 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_hundred_kills_lose_nothing(seaweed: SeaweedServer, own_oxia: OxiaServer) -> None:
    _kill_over_and_over(seaweed.url("log-many-kills"), own_oxia.url(), kills=NIGHTLY_KILLS, seed=2)
