"""Reading: one cache for all, bounded and fetched once; specs of every kind; a store that fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stream.logs import STREAM, HandClock, expected, read_all, reader_of, tier_of, write_log

from forebay.errors import NotFound, Unavailable, UsageError
from forebay.formats import Corrupt, osiris_chunk, osiris_file, stream_fragment
from forebay.formats import stream_manifest as fmt
from forebay.formats.osiris_bloom import Matcher
from forebay.kit.clock import SystemClock
from forebay.storage import MemoryStore
from forebay.storage._api import ObjectInfo, Range, StoredObject
from forebay.stream import (
    FIRST,
    LAST,
    NEXT,
    BlockCache,
    ReaderConfig,
    Spec,
    StreamMissing,
    StreamReader,
    StreamWriter,
    WriterConfig,
)
from forebay.stream._keys import StreamKeys
from forebay.stream._manifest import Manifest, next_group
from forebay.stream._pointer import Head

KEYS = StreamKeys(STREAM)


class CountingStore(MemoryStore):
    """Counts range requests and their bytes, and may fail some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []
        self.requests = 0
        self.failures = 0

    async def get(self, key: str) -> StoredObject:
        self.requests += 1
        return await super().get(key)

    async def head(self, key: str) -> ObjectInfo:
        self.requests += 1
        return await super().head(key)

    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        self.requests += 1
        if self.failures:
            self.failures -= 1
            raise Unavailable("no answer")
        self.ranges += [(key, start, length) for start, length in ranges]
        await asyncio.sleep(0)
        return await super().get_ranges(key, ranges)


async def stored(path: Path, chunks: int, **config: Any) -> CountingStore:
    write_log(path, chunks, per_segment=1000)
    store = CountingStore()
    await tier_of(path, store, config=config).run_once()
    store.ranges.clear()
    store.requests = 0
    return store


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("first", FIRST),
        ("last", LAST),
        ("next", NEXT),
        ("offset:7", Spec("offset", 7)),
        ("timestamp:-5", Spec("timestamp", -5)),
    ],
)
def test_specs_are_written_as_they_are_read(text: str, spec: Spec) -> None:
    assert Spec.parse(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize("text", ["", "offset", "offset:", "offset:x", "offset:-1", "timestamp:1e3", "a:1"])
def test_other_specs_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Spec.parse(text)


async def test_many_readers_share_every_byte_within_one_budget(tmp_path: Path) -> None:
    store = await stored(tmp_path, 300, fragment_bytes=4000)
    cache = BlockCache(1 << 20)
    readers = [reader_of(store, cache=cache) for _ in range(100)]
    found = await asyncio.gather(*(read_all(reader) for reader in readers))
    assert all(records == found[0] for records in found)
    assert found[0] == expected(0, len(found[0]))
    assert len(set(store.ranges)) == len(store.ranges)
    heads = store.requests - len(store.ranges)
    assert heads <= 2 * len(readers) * 3  # Record and root, when it attaches and at the end.
    assert cache.peak_bytes <= cache.bytes_max


async def test_a_budget_smaller_than_what_is_wanted_slows_down_and_stays_bounded(tmp_path: Path) -> None:
    store = await stored(tmp_path, 300, fragment_bytes=4000)
    cache = BlockCache(9000)
    readers = [reader_of(store, cache=cache, config={"ahead_bytes": 50_000}) for _ in range(20)]
    found = await asyncio.gather(*(read_all(reader) for reader in readers))
    assert all(records == found[0] for records in found)
    assert found[0] == expected(0, len(found[0]))
    assert cache.peak_bytes <= cache.bytes_max


async def test_a_sequential_read_asks_for_the_chunks_alone_and_once(tmp_path: Path) -> None:
    store = await stored(tmp_path, 50, fragment_bytes=1000)
    await read_all(reader_of(store))
    asked = sorted(store.ranges)
    assert len({key for key, _, _ in asked}) == len(asked)
    for key, start, length in asked:
        fragment = stream_fragment.decode((await store.get(key)).data)
        assert (start, length) == (0, 8 + fragment.trailer.data_bytes)


async def test_a_store_that_fails_is_asked_again_and_never_taken_for_the_end(tmp_path: Path) -> None:
    store = await stored(tmp_path, 50, fragment_bytes=500)
    reader = reader_of(store, config={"ahead_bytes": 0})
    store.failures = 2
    assert len(await read_all(reader)) > 0
    store.failures = 1000
    with pytest.raises(Unavailable):
        await read_all(reader_of(store))


async def test_a_stream_that_nobody_tiered_is_missing_and_not_empty() -> None:
    with pytest.raises(StreamMissing):
        await read_all(reader_of(MemoryStore()))


async def test_a_follower_gets_what_is_tiered_later(tmp_path: Path) -> None:
    write_log(tmp_path, 5)
    store = MemoryStore()
    await tier_of(tmp_path, store).run_once()
    reader = reader_of(store, clock=SystemClock(), config={"poll_interval_ms": 1})
    chunks = reader.chunks(FIRST, follow=True)
    ids = [(await anext(chunks)).header.chunk_id for _ in range(5)]
    waiting = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    assert not waiting.done()
    write_log(tmp_path, 1)
    await tier_of(tmp_path, store).run_once()
    assert (await waiting).header.chunk_id > ids[-1]
    await chunks.aclose()  # type: ignore[attr-defined]


async def test_a_local_segment_that_vanishes_is_read_from_the_bucket(tmp_path: Path) -> None:
    write_log(tmp_path, 20)
    store = MemoryStore()
    await tier_of(tmp_path, store).run_once()
    reader = reader_of(store, tmp_path)
    chunks = reader.chunks(FIRST)
    first = await anext(chunks)
    _remove(tmp_path, -1)
    found = [first, *[chunk async for chunk in chunks]]
    ids = [chunk.header.chunk_id for chunk in found]
    assert ids == sorted(set(ids))
    assert found[-1].header.next_id == reader.next_offset


def _remove(path: Path, stop: int) -> None:
    for segment in sorted(path.glob("*.segment"))[:stop]:
        segment.unlink()
        segment.with_suffix(".index").unlink()


async def test_filters_skip_chunks_in_both_tiers(tmp_path: Path) -> None:
    with StreamWriter(tmp_path, epoch=1, clock=HandClock(), config=WriterConfig()) as writer:
        for number in range(30):
            value = b"red" if number % 3 == 0 else b"blue" if number % 3 == 1 else b""
            writer.append([b"%d" % number], filters=[value])
        writer.commit()
    store = MemoryStore()
    await tier_of(tmp_path, store).run_once()
    for local in (None, tmp_path):
        reader = reader_of(store, local)
        red = [chunk.header.chunk_id async for chunk in reader.chunks(FIRST, matcher=Matcher([b"red"]))]
        assert red == list(range(0, 30, 3))
        matcher = Matcher([b"red"], match_unfiltered=True)
        both = [chunk.header.chunk_id async for chunk in reader.chunks(FIRST, matcher=matcher)]
        assert both == [number for number in range(30) if number % 3 != 1]


async def test_last_skips_tracking_at_the_end_of_either_tier(tmp_path: Path) -> None:
    with StreamWriter(tmp_path / "log", epoch=1, clock=HandClock()) as writer:
        writer.append([b"a", b"b"])
        for number in range(5):
            writer.store_offsets({b"me": number})
        writer.commit()
    store = MemoryStore()
    await tier_of(tmp_path / "log", store, config={"fragment_bytes": 1}).run_once()
    for local in (None, tmp_path / "log"):
        header = await reader_of(store, local).resolve(LAST)
        assert header is not None
        assert header.chunk_id == 0
        assert await reader_of(store, local).attach(NEXT) == 7


async def test_equal_timestamps_across_fragments_attach_at_the_first_of_them(tmp_path: Path) -> None:
    clock = HandClock(1000)
    with StreamWriter(tmp_path, epoch=1, clock=clock, config=WriterConfig(segment_chunks_max=2)) as writer:
        for at in (1000, 1000, 1000, 2000, 2000, 5000):
            clock.ms = at
            writer.append([b"x"])
        writer.commit()
    store = MemoryStore()
    await tier_of(tmp_path, store, config={"fragment_bytes": 1}).run_once()
    answers = {0: 0, 1000: 0, 1001: 3, 2000: 3, 2001: 5, 5000: 5, 5001: 6}
    for local in (None, tmp_path):
        reader = reader_of(store, local)
        assert {at: await reader.attach(Spec("timestamp", at)) for at in answers} == answers


@pytest.mark.parametrize("change", [1, -1, 1000])
@pytest.mark.parametrize("local", [False, True])
async def test_a_chunk_that_names_another_offset_is_damage_and_not_a_gap(
    tmp_path: Path, change: int, local: bool
) -> None:
    """The checksum of a chunk covers its data alone, so its id is held against its place."""
    write_log(tmp_path / "log", 6, per_segment=100)
    store = CountingStore()
    tier = tier_of(tmp_path / "log", store, config={"fragment_bytes": 10_000})
    await tier.run_once()
    records = tier.log.segments[0].records
    at, chunk_id = int(records["position"][3]) + 24, int(records["chunk_id"][3])
    wrong = (chunk_id + change).to_bytes(8, "big")
    if local:
        segment = tmp_path / "log" / osiris_file.file_name(0, "segment")
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(wrong)
    else:
        data = bytearray((await store.get(KEYS.fragment(0))).data)
        data[at : at + 8] = wrong
        await store.put(KEYS.fragment(0), data)
    chunks = reader_of(store, tmp_path / "log" if local else None).chunks(FIRST)
    found = [(await anext(chunks)).header.chunk_id for _ in range(3)]
    with pytest.raises(Corrupt):
        await anext(chunks)
    assert found == records["chunk_id"][:3].tolist()


# Sixteen million fragments.

PER_FRAGMENT = 10
BRANCHING = 1024
FRAGMENTS = 16_000_000


class HugeStore(CountingStore):
    """The remote tier of 16 million fragments, each made when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.size = len(self.fragment(0)) - stream_fragment.object_bytes(0, 1)

    def fragment(self, offset: int) -> bytes:
        records = [b"x"] * PER_FRAGMENT
        chunk = osiris_chunk.encode(records, chunk_id=offset, timestamp=offset, epoch=1)
        index = np.array([(offset, offset, 1, 8, 0)], osiris_file.INDEX_DTYPE)
        return stream_fragment.encode(
            chunk, index, next_offset=offset + PER_FRAGMENT, sequence=0, chunks_before=0, segment_position=8
        )

    def leaves(self, first: int, count: int) -> Any:
        entries = np.zeros(count, fmt.ENTRY_DTYPE)
        offsets = np.arange(first, first + count, dtype=np.uint64) * PER_FRAGMENT
        entries["offset"] = entries["first_ts"] = entries["last_ts"] = offsets
        entries["low"] = self.size
        return entries

    def group(self, number: int) -> bytes:
        return fmt.encode_group(fmt.GROUP, self.leaves(number * BRANCHING, BRANCHING))

    async def get(self, key: str) -> StoredObject:
        if key.endswith(".group"):
            self.requests += 1
            number = (
                int(key.rsplit("/", maxsplit=1)[-1].split(".", maxsplit=1)[0]) // PER_FRAGMENT // BRANCHING
            )
            return StoredObject(key, self.group(number), "1")
        return await super().get(key)

    async def head(self, key: str) -> ObjectInfo:
        if key.endswith(".fragment"):
            self.requests += 1
            return ObjectInfo(key, len(self.fragment(int(key[-29:-9]))), "1", 0)
        return await super().head(key)

    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        self.requests += 1
        data = self.fragment(int(key[-29:-9]))
        return [data[start : start + length] for start, length in ranges]


async def test_sixteen_million_fragments_take_four_round_trips_and_a_small_root() -> None:
    store = HugeStore()
    groups = []
    whole = FRAGMENTS // BRANCHING - 1
    for number in range(whole):
        data = store.group(number)
        groups.append(
            fmt.group_entry(
                fmt.GROUP, store.leaves(number * BRANCHING, BRANCHING), fmt.make_uid(data, number % 7)
            )
        )
    entries = fmt.join_entries(*groups, store.leaves(whole * BRANCHING, FRAGMENTS - whole * BRANCHING))
    total = FRAGMENTS * store.size
    manifest = Manifest(0, FRAGMENTS * PER_FRAGMENT, 0, 0, total, entries)
    while (found := next_group(manifest.entries, BRANCHING)) is not None:
        start, kind = found
        children = manifest.entries[start : start + BRANCHING]
        data = fmt.encode_group(kind, children)
        uid = fmt.make_uid(data, 5)
        await store.put(KEYS.group(kind, int(children["offset"][0]), uid), data)
        manifest = manifest.grouped(start, BRANCHING, fmt.group_entry(kind, children, uid))
    root = manifest.encode()
    assert len(root) < 64 * 1024
    uid = fmt.make_uid(root, 1)
    await store.put(KEYS.root(uid), root)
    await store.put(KEYS.current, _record(uid))
    draw = random.Random(5)
    for _ in range(30):
        offset = draw.randrange(FRAGMENTS * PER_FRAGMENT)
        reader = reader_of(store)
        await reader.refresh()
        store.requests = 0
        assert await reader.remote.chunk_at_offset(offset) == offset // PER_FRAGMENT * PER_FRAGMENT
        assert store.requests <= 4
        reader = reader_of(store)
        await reader.refresh()
        store.requests = 0
        assert await reader.remote.chunk_at_timestamp(offset) == -(-offset // PER_FRAGMENT) * PER_FRAGMENT
        assert store.requests <= 4


def _record(uid: int) -> bytes:
    import msgspec

    return msgspec.json.encode(Head(uid=fmt.uid_text(uid), epoch=1, revision=1))


async def test_a_reader_without_room_for_a_cache_is_refused() -> None:
    with pytest.raises(UsageError):
        BlockCache(0)
    with pytest.raises(UsageError):
        ReaderConfig(block_bytes=100)
    with pytest.raises(NotFound):
        reader = StreamReader(STREAM, MemoryStore(), clock=HandClock(), randomness=random.Random(1))
        await reader.attach(FIRST)
