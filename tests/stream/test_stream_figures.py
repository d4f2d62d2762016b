"""Figures that do not depend on the machine: requests that are counted, and time that is virtual."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.stream.logs import STREAM, HandClock, tier_of

from forebay.formats import stream_manifest as fmt
from forebay.storage import ANY, MemoryStore
from forebay.storage._api import Buffer, DeleteResult, When
from forebay.stream import (
    BlockCache,
    ReaderConfig,
    RemoteTier,
    Spec,
    StreamReader,
    StreamWriter,
    TierConfig,
)
from forebay.stream._manifest import FragmentInfo, Manifest, next_group
from forebay.testing import World

LATENCY_S = 0.025
AHEAD_BYTES = 512 * 1024
BLOCK_BYTES = 64 * 1024


class LateStore(MemoryStore):
    """Answers range requests after 25 ms, any number of them at once."""

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        await asyncio.sleep(LATENCY_S)
        return await super().get_ranges(key, ranges)


async def test_read_ahead_hides_the_latency_of_a_distant_bucket(tmp_path: Path) -> None:
    with StreamWriter(tmp_path, epoch=1, clock=HandClock()) as writer:
        for _ in range(400):
            writer.append([random.Random(1).randbytes(1000)] * 50)
        writer.commit()
    store = LateStore()
    await tier_of(tmp_path, store, config={"fragment_bytes": 4 << 20, "branching": 1024}).run_once()

    async def read(world: World) -> float:
        clock = world.clock()
        reader = StreamReader(
            STREAM,
            store,
            cache=BlockCache(),
            config=ReaderConfig(block_bytes=BLOCK_BYTES, ahead_bytes=AHEAD_BYTES),
            clock=clock,
            randomness=random.Random(2),
        )
        begin = clock.monotonic()
        size = sum([chunk.header.length async for chunk in reader.chunks(Spec("first"))])
        return size / (clock.monotonic() - begin)

    rate = await asyncio.to_thread(lambda: World(seed=1).run(read))
    assert rate >= 0.9 * AHEAD_BYTES / LATENCY_S


class CountingStore(MemoryStore):
    """Counts what changes it, and how many bytes that takes."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = self.bytes = self.root_bytes = 0

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        self.requests += 1
        self.bytes += len(data)
        if key.endswith(".manifest"):
            self.root_bytes = max(self.root_bytes, len(data))
        return await super().put(key, data, when)

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        self.requests += 1
        return await super().delete(keys)


def tree_of(fragments: int, branching: int) -> Manifest:
    """The root over so many fragments; the nodes below it exist only by name."""
    entries = np.zeros(fragments, fmt.ENTRY_DTYPE)
    offsets = np.arange(fragments, dtype=np.uint64)
    entries["offset"] = entries["first_ts"] = entries["last_ts"] = offsets
    entries["low"] = 100
    for kind in (fmt.GROUP, fmt.KILO_GROUP, fmt.MEGA_GROUP):
        lowest = fmt.kinds_of(entries) == kind - 1
        first = int(np.argmax(lowest))
        keep = 1 if kind == fmt.GROUP else 0
        count = max(int(lowest.sum()) - keep, 0) // branching
        groups = [
            fmt.group_entry(kind, entries[first + n * branching : first + (n + 1) * branching], n)
            for n in range(count)
        ]
        if groups:
            entries = fmt.join_entries(entries[:first], *groups, entries[first + count * branching :])
    assert next_group(entries, branching) is None
    return Manifest(0, fragments, 0, 0, 100 * fragments, entries)


@pytest.mark.parametrize(("branching", "fragments"), [(16, 60_000), (64, 250_000)])
async def test_an_append_costs_the_same_however_long_the_stream_is(branching: int, fragments: int) -> None:
    costs = {}
    for size in (fragments // 16, fragments):
        store = CountingStore()
        config = TierConfig(branching=branching)
        tier = RemoteTier(
            STREAM, store, epoch=1, config=config, clock=HandClock(), randomness=random.Random(1)
        )
        await tier.resolve()
        tier.persisted = tree_of(size, branching)
        store.requests = store.bytes = 0
        rounds = 2 * branching
        for _ in range(rounds):
            at = tier.next_offset
            tier.append([FragmentInfo(at, at + 1, at, at, 100)])
            await tier.persist()
        costs[size] = (store.requests / rounds, store.bytes / rounds)
        # Up to M entries of each of the four kinds, and the header.
        assert store.root_bytes <= 49 + 4 * 30 * (branching + 1)
    (few, few_bytes), (many, many_bytes) = costs[fragments // 16], costs[fragments]
    assert many <= few + 0.1
    assert many_bytes <= few_bytes + 30 * 3 * branching
