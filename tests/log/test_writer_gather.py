"""Objects that are written from where the records lie: the same bytes, and as few copies as may be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from forebay.coordination import MemoryCoordinator
from forebay.formats.bytes_batch import BytesBatch, decode, encode_batch
from forebay.formats.bytes_batch_piece import open_piece
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import AppendGroup, LogReader, LogWriter, MemoryTailCache, ReadRequest
from forebay.log._upload import BUFFERS_MAX
from forebay.storage import ANY, LocalStore
from forebay.storage._api import When


class Watched(LocalStore):
    """Notes of how many buffers each object was written."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.buffers: list[int] = []

    async def put(self, key: str, data: bytes | bytearray | memoryview, when: When = ANY) -> str:
        self.buffers.append(1)
        return await super().put(key, data, when)

    async def put_parts(self, key: str, parts: Sequence[bytes | memoryview], when: When = ANY) -> str:
        self.buffers.append(len(parts))
        return await super().put_parts(key, parts, when)


def _frames(sizes: Sequence[int]) -> list[AppendGroup]:
    """Groups of two partitions that came as ready frames, views of one larger buffer each."""
    groups = []
    for number, size in enumerate(sizes):
        frame = encode_batch(BytesBatch.of([bytes([number % 251]) * size, b"x"]))
        around = memoryview(b"before" + frame + b"after")[6 : 6 + len(frame)]
        groups.append(AppendGroup("t", number % 2, open_piece(around)))
    return groups


@pytest.mark.parametrize(
    ("sizes", "gathered"),
    [
        ([100_000] * 6, True),
        ([3_000_000] * 4, True),
        ([10] * 50, False),
        ([50_000] * (BUFFERS_MAX + 9), False),
    ],
    ids=["as requests are", "larger than what is viewed", "tiny", "too many"],
)
async def test_gathered_or_put_together_the_log_and_the_tail_give_the_same(
    tmp_path: Path, sizes: list[int], gathered: bool
) -> None:
    clock, coordinator, store = SystemClock(), MemoryCoordinator(), Watched(tmp_path)
    tail = MemoryTailCache(clock)
    writer = LogWriter(
        store, coordinator, clock=clock, ids=IdSource(clock), randomness=random.Random(1), tail_cache=tail
    )
    groups = _frames(sizes)
    results = await writer.append_shared(groups)
    assert all(result.ok for result in results)
    buffers, _ = store.buffers  # The second put is that of the log's name.
    assert (buffers > 1) == gathered
    log = LogReader(store, coordinator, clock=clock, randomness=random.Random(1))
    for partition in (0, 1):
        expected = []
        for group in groups[partition::2]:
            expected += decode(encode_of(group)).values.to_pylist()
        request = ReadRequest("t", partition, 1)
        cached = tail.read(request, 1 << 30)
        assert cached is not None
        for found in (cached, await log.read("t", partition, 1, max_bytes=1 << 30)):
            values = [value for batch in found.batches for value in batch.batch.values.to_pylist()]
            assert values == expected
    await store.close()


def encode_of(group: AppendGroup) -> bytes:
    frame = getattr(group.batch, "frame", None)
    assert frame is not None
    return bytes(frame)
