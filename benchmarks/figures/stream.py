"""The stream engine: how fast chunks are found, checked, uploaded and read back.

Everything is compared with the floor it stands on in the same run: decoding with the checksum alone, a
remote read with a local one. The bucket is in memory, so that the figures are those of Forebay and not of a
server; a second bucket answers each range request after 25 ms, to show whether read-ahead hides it.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_least, at_most
from benchmarks.harness.timing import variant
from forebay.formats import osiris_chunk, osiris_entry
from forebay.kit.clock import SystemClock
from forebay.storage import MemoryStore
from forebay.storage._api import Range
from forebay.stream import (
    FIRST,
    BlockCache,
    ReaderConfig,
    StreamReader,
    StreamTier,
    StreamWriter,
    TierConfig,
    WriterConfig,
)

__all__ = ["stream_chunks", "stream_tiers"]

MB = 1e6
LATENCY_S = 0.025
AHEAD_BYTES = 2 * 1024 * 1024
BLOCK_BYTES = 256 * 1024
LOG_CHUNKS = 1000
RECORDS, RECORD_BYTES = 100, 1000
STREAM = "bench"


class LateStore(MemoryStore):
    """A bucket whose range requests take as long as those of a distant one, once `late` is set."""

    late = False

    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """The ranges, later."""
        if self.late:
            await asyncio.sleep(LATENCY_S)
        return await super().get_ranges(key, ranges)


@suite.benchmark(
    "stream chunks",
    "Chunks are found and checked about as fast as their checksums are computed.",
    Figure("headers walked per second, uneven chunks", "uneven", measure=Measure.PLAIN, target=at_least(1e6)),
    Figure("headers gathered by index per second", "by index", measure=Measure.PLAIN, target=at_least(1e6)),
    Figure("decode and check against zlib.crc32 alone", "decode", "crc32", target=at_least(0.5)),
)
def stream_chunks(bench: Bench) -> Iterator[Variants]:
    """Small chunks of many lengths for the walk, chunks of 100 kB for the decoding."""
    draw = random.Random(1)
    small = b"".join(
        osiris_chunk.encode([b"x" * draw.randrange(40)], chunk_id=number, timestamp=number, epoch=1)
        for number in range(50_000)
    )
    positions = osiris_chunk.walk(small).positions
    large = b"".join(
        osiris_chunk.encode(
            [os.urandom(RECORD_BYTES)] * RECORDS, chunk_id=number * RECORDS, timestamp=number, epoch=1
        )
        for number in range(200)
    )

    def decode() -> float:
        for position in osiris_chunk.walk(large).positions.tolist():
            chunk = osiris_chunk.decode(large, position)
            osiris_entry.decode_records(chunk.data, entries=RECORDS, records=RECORDS)
        return len(large) / MB

    def check() -> float:
        zlib.crc32(large)
        return len(large) / MB

    yield {
        "uneven": variant(lambda: len(osiris_chunk.walk(small).positions), "chunks/s"),
        "by index": variant(lambda: len(osiris_chunk.gather_headers(small, positions)), "chunks/s"),
        "decode": variant(decode, "MB/s"),
        "crc32": variant(check, "MB/s"),
    }


@suite.benchmark(
    "stream tiers",
    "The bucket is read about as fast as the disk, and an upload takes a fraction of a core.",
    Figure("remote read against local read", "remote", "local", target=at_least(0.7)),
    Figure("read at 25 ms against bytes ahead / 25 ms", "late", measure=Measure.PLAIN, target=at_least(0.9)),
    Figure("cores that an upload of 200 MB/s takes", "upload", measure=Measure.PLAIN, target=at_most(1.0)),
)
def stream_tiers(bench: Bench) -> Iterator[Variants]:
    """A log of 100 MB in fragments of 16 MiB."""
    path = Path(bench.directory) / "log"
    config = WriterConfig(segment_bytes_max=50_000_000)
    with StreamWriter(path, epoch=1, clock=SystemClock(), config=config) as writer:
        for _ in range(LOG_CHUNKS):
            writer.append([os.urandom(RECORD_BYTES)] * RECORDS)
        writer.commit()
    store = LateStore()
    asyncio.run(_tier(path, store))

    def late(_: float) -> Sample:
        store.late = True
        begin = time.perf_counter()
        size = asyncio.run(_read(store, None, ReaderConfig(block_bytes=BLOCK_BYTES, ahead_bytes=AHEAD_BYTES)))
        rate = size / (time.perf_counter() - begin)
        store.late = False
        return Sample(rate / (AHEAD_BYTES / LATENCY_S))

    def upload(_: float) -> Sample:
        begin = time.process_time()
        size = asyncio.run(_tier(path, MemoryStore()))
        return Sample((time.process_time() - begin) / (size / (200 * MB)))

    yield {
        "local": variant(lambda: asyncio.run(_read(MemoryStore(), path, ReaderConfig())) / MB, "MB/s"),
        "remote": variant(lambda: asyncio.run(_read(store, None, ReaderConfig())) / MB, "MB/s"),
        "late": Variant(late, "of the bound"),
        "upload": Variant(upload, "cores"),
    }


async def _tier(path: Path, store: MemoryStore) -> int:
    tier = StreamTier(
        path,
        store,
        stream=STREAM,
        config=TierConfig(fragment_bytes=16 * 1024 * 1024),
        clock=SystemClock(),
        randomness=random.Random(1),
    )
    await tier.run_once()
    return tier.progress.bytes


async def _read(store: MemoryStore, local: Path | None, config: ReaderConfig) -> int:
    reader = StreamReader(
        STREAM,
        store,
        local=local,
        cache=BlockCache(),
        config=config,
        clock=SystemClock(),
        randomness=random.Random(2),
    )
    return sum([chunk.header.length async for chunk in reader.chunks(FIRST)])
