"""The stream engine: how fast chunks are found, checked, uploaded and read back.

Everything is compared with the floor it stands on in the same run: decoding with the checksum alone, a
remote read with a local one. The bucket is in memory, so that the figures are those of Forebay and not of a
server; a second bucket answers each range request after 25 ms, to show whether read-ahead hides it.

A petabyte is not written here. Its manifest is: 16 million entries in real nodes, and fragments that the
bucket makes up when somebody asks for one. What is counted there are requests and bytes, which no other load
disturbs.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_least, at_most
from benchmarks.harness.timing import async_variant, variant
from forebay.formats import osiris_chunk, osiris_entry, osiris_file, stream_fragment
from forebay.formats import stream_manifest as fmt
from forebay.kit.clock import SystemClock
from forebay.storage import ANY, MemoryStore
from forebay.storage._api import Buffer, ObjectInfo, Range, StoredObject, When
from forebay.stream import (
    FIRST,
    BlockCache,
    ReaderConfig,
    RemoteTier,
    StreamReader,
    StreamTier,
    StreamWriter,
    TierConfig,
    WriterConfig,
)
from forebay.stream._keys import StreamKeys
from forebay.stream._manifest import FragmentInfo, Manifest, next_group
from forebay.stream._pointer import Head, Held

__all__ = ["stream_chunks", "stream_manifest", "stream_readers", "stream_tiers"]

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
    """A log of 400 MB in fragments of 64 MiB, each time read by a new reader with an empty cache.

    So the remote read pays for the memory that its cache takes, as a new consumer does, and every byte is
    fetched; that is checked. What waits for a distant bucket reads a log of 100 MB.
    """
    path, short = Path(bench.directory) / "log", Path(bench.directory) / "short"
    _write(path, 4 * LOG_CHUNKS)
    _write(short, LOG_CHUNKS)
    store, distant = MemoryStore(), LateStore()
    asyncio.run(_tier(path, store))
    asyncio.run(_tier(short, distant))
    distant.late = True
    slow = ReaderConfig(block_bytes=BLOCK_BYTES, ahead_bytes=AHEAD_BYTES)

    async def local() -> float:
        return await _read(MemoryStore(), path, ReaderConfig()) / MB

    async def remote() -> float:
        cache = BlockCache()
        size = await _read(store, None, ReaderConfig(), cache)
        if cache.fetched_bytes < size:
            raise AssertionError("not every byte was fetched")
        return size / MB

    def late(_: float) -> Sample:
        begin = time.perf_counter()
        size = runner.run(_read(distant, None, slow))
        return Sample(size / (time.perf_counter() - begin) / (AHEAD_BYTES / LATENCY_S))

    def upload(_: float) -> Sample:
        begin = time.process_time()
        size = asyncio.run(_tier(path, MemoryStore()))
        return Sample((time.process_time() - begin) / (size / (200 * MB)))

    with asyncio.Runner() as runner:
        yield {
            "local": async_variant(runner, local, "MB/s"),
            "remote": async_variant(runner, remote, "MB/s"),
            "late": Variant(late, "of the bound"),
            "upload": Variant(upload, "cores"),
        }


def _write(path: Path, chunks: int) -> None:
    config = WriterConfig(segment_bytes_max=200_000_000)
    with StreamWriter(path, epoch=1, clock=SystemClock(), config=config) as writer:
        for _ in range(chunks):
            writer.append([os.urandom(RECORD_BYTES)] * RECORDS)
        writer.commit()


async def _tier(path: Path, store: MemoryStore) -> int:
    tier = StreamTier(
        path,
        store,
        stream=STREAM,
        clock=SystemClock(),
        randomness=random.Random(1),
    )
    await tier.run_once()
    return tier.progress.bytes


async def _read(
    store: MemoryStore, local: Path | None, config: ReaderConfig, cache: BlockCache | None = None
) -> int:
    reader = StreamReader(
        STREAM,
        store,
        local=local,
        cache=cache or BlockCache(),
        config=config,
        clock=SystemClock(),
        randomness=random.Random(2),
    )
    return sum([chunk.header.length async for chunk in reader.chunks(FIRST)])


READERS = 100
READERS_BUDGET_BYTES = 32 * 1024 * 1024


@suite.benchmark(
    "stream readers",
    "A hundred readers of one stream cost the memory of one cache and the requests of one reader.",
    Figure("peak of the cache against its budget", "peak", measure=Measure.PLAIN, target=at_most(1.0)),
    Figure("bytes fetched against bytes there are", "fetched", measure=Measure.PLAIN, target=at_most(1.01)),
)
def stream_readers(bench: Bench) -> Iterator[Variants]:
    """A log of 20 MB, read by all of them at once."""
    path = Path(bench.directory) / "readers"
    with StreamWriter(path, epoch=1, clock=SystemClock()) as writer:
        for _ in range(LOG_CHUNKS // 5):
            writer.append([os.urandom(RECORD_BYTES)] * RECORDS)
        writer.commit()
    store = MemoryStore()
    size = asyncio.run(_tier(path, store))
    caches: list[BlockCache] = []

    async def read_all() -> BlockCache:
        cache = BlockCache(READERS_BUDGET_BYTES)
        config = ReaderConfig(block_bytes=1 << 20)
        await asyncio.gather(*(_read(store, None, config, cache) for _ in range(READERS)))
        return cache

    def peak(_: float) -> Sample:
        caches[:] = [asyncio.run(read_all())]
        return Sample(caches[0].peak_bytes / READERS_BUDGET_BYTES)

    def fetched(_: float) -> Sample:
        cache = caches[0] if caches else asyncio.run(read_all())
        return Sample(cache.fetched_bytes / size)

    yield {"peak": Variant(peak, "of the budget"), "fetched": Variant(fetched, "of the data")}


BRANCHING = 1024
PER_FRAGMENT = 10
PETABYTE_FRAGMENTS = 16_000_000
SMALL_FRAGMENTS = 1_000_000
LOOKUPS = 20
APPENDS = 50


class MadeUpStore(MemoryStore):
    """A bucket with the nodes of a huge tree, which makes up groups and fragments when they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.put_bytes = 0
        self.root_bytes = 0
        self.data_bytes = len(self.fragment(0)) - stream_fragment.object_bytes(0, 1)

    def fragment(self, offset: int) -> bytes:
        """One chunk of ten records."""
        chunk = osiris_chunk.encode([b"x"] * PER_FRAGMENT, chunk_id=offset, timestamp=offset, epoch=1)
        index = np.array([(offset, offset, 1, 8, 0)], osiris_file.INDEX_DTYPE)
        return stream_fragment.encode(
            chunk, index, next_offset=offset + PER_FRAGMENT, sequence=0, chunks_before=0, segment_position=8
        )

    def leaves(self, first: int, count: int) -> fmt.Entries:
        """The entries of fragments, from the `first` one on."""
        entries = np.zeros(count, fmt.ENTRY_DTYPE)
        offsets = np.arange(first, first + count, dtype=np.uint64) * np.uint64(PER_FRAGMENT)
        entries["offset"] = entries["first_ts"] = entries["last_ts"] = offsets
        entries["low"] = self.data_bytes
        return entries

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        """Counted."""
        self.put_bytes += len(data)
        if key.endswith(".manifest"):
            self.root_bytes = max(self.root_bytes, len(data))
        return await super().put(key, data, when)

    async def get(self, key: str) -> StoredObject:
        """Counted; groups of fragments are made up."""
        self.requests += 1
        if key.endswith(".group"):
            number = int(key.rpartition("/")[2][:20]) // PER_FRAGMENT
            return StoredObject(key, fmt.encode_group(fmt.GROUP, self.leaves(number, BRANCHING)), "1")
        return await super().get(key)

    async def head(self, key: str) -> ObjectInfo:
        """Counted; every fragment is there."""
        self.requests += 1
        return ObjectInfo(key, len(self.fragment(int(key[-29:-9]))), "1", 0)

    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """Counted; of a fragment that is made up."""
        self.requests += 1
        data = self.fragment(int(key[-29:-9]))
        return [data[start : start + length] for start, length in ranges]


async def _made_up(fragments: int) -> tuple[MadeUpStore, Manifest, Held]:
    """A bucket whose root stands for so many fragments."""
    store, keys = MadeUpStore(), StreamKeys(STREAM)
    whole = fragments // BRANCHING - 1
    groups = []
    for number in range(whole):
        children = store.leaves(number * BRANCHING, BRANCHING)
        uid = fmt.make_uid(fmt.encode_group(fmt.GROUP, children), number % 7)
        groups.append(fmt.group_entry(fmt.GROUP, children, uid))
    entries = fmt.join_entries(*groups, store.leaves(whole * BRANCHING, fragments - whole * BRANCHING))
    manifest = Manifest(0, fragments * PER_FRAGMENT, 0, 0, fragments * store.data_bytes, entries)
    while (found := next_group(manifest.entries, BRANCHING)) is not None:
        start, kind = found
        children = manifest.entries[start : start + BRANCHING]
        data = fmt.encode_group(kind, children)
        uid = fmt.make_uid(data, 5)
        await store.put(keys.group(kind, int(children["offset"][0]), uid), data)
        manifest = manifest.grouped(start, BRANCHING, fmt.group_entry(kind, children, uid))
    root = manifest.encode()
    uid = fmt.make_uid(root, 1)
    await store.put(keys.root(uid), root)
    head = Head(uid=fmt.uid_text(uid), epoch=1, revision=1)
    return store, manifest, Held(head, await store.put(keys.current, msgspec.json.encode(head)))


async def _most_requests(store: MadeUpStore) -> int:
    """Of one lookup from a root that is known to a chunk in the middle of nowhere."""
    draw, most = random.Random(3), 0
    for _ in range(LOOKUPS):
        reader = StreamReader(
            STREAM, store, cache=BlockCache(), clock=SystemClock(), randomness=random.Random(1)
        )
        await reader.refresh()
        store.requests = 0
        await reader.remote.chunk_at_offset(draw.randrange(PETABYTE_FRAGMENTS * PER_FRAGMENT))
        most = max(most, store.requests)
    return most


async def _append_s(store: MadeUpStore, manifest: Manifest, held: Held) -> float:
    """Seconds of processor time that one more fragment in the root takes."""
    tier = RemoteTier(
        STREAM, store, epoch=1, config=TierConfig(), clock=SystemClock(), randomness=random.Random(1)
    )
    tier.held, tier.persisted = held, manifest
    begin = time.process_time()
    for _ in range(APPENDS):
        at = tier.next_offset
        tier.append([FragmentInfo(at, at + PER_FRAGMENT, at, at, store.data_bytes)])
        await tier.persist()
    return (time.process_time() - begin) / APPENDS


@suite.benchmark(
    "stream manifest",
    "Any of 16 million fragments, a petabyte, is four requests away, and one more costs no more than before.",
    Figure("most requests of a lookup", "lookup", measure=Measure.PLAIN, target=at_most(4)),
    Figure("largest root, in KiB", "root", measure=Measure.PLAIN, target=at_most(64)),
    Figure("append at 16 million against 1 million", "append", measure=Measure.PLAIN, target=at_most(1.5)),
)
def stream_manifest(bench: Bench) -> Iterator[Variants]:
    """Trees as they are after so many appends; the fragments themselves are made up."""
    huge = asyncio.run(_made_up(PETABYTE_FRAGMENTS))
    small = asyncio.run(_made_up(SMALL_FRAGMENTS))

    def append(_: float) -> Sample:
        # Each on a fresh copy of the record: what one measurement appended is not there for the next.
        costs = [asyncio.run(_append_s(*asyncio.run(_copy(each)))) for each in (huge, small)]
        return Sample(costs[0] / costs[1])

    yield {
        "lookup": Variant(lambda _: Sample(asyncio.run(_most_requests(huge[0]))), "requests"),
        "root": Variant(lambda _: Sample(huge[0].root_bytes / 1024), "KiB"),
        "append": Variant(append, "of the time"),
    }


async def _copy(made: tuple[MadeUpStore, Manifest, Held]) -> tuple[MadeUpStore, Manifest, Held]:
    _, manifest, held = made
    store = MadeUpStore()
    version = await store.put(StreamKeys(STREAM).current, msgspec.json.encode(held.head))
    return store, manifest, Held(held.head, version)
