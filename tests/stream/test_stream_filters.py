"""Filters beside fragments: what cannot match is not downloaded; and ranges that grow with what is read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.stream.logs import STREAM, HandClock, read_all, reader_of, tier_of

from forebay.errors import FormatError
from forebay.formats import stream_filters
from forebay.formats.osiris_bloom import Matcher, build
from forebay.formats.osiris_entry import decode_records
from forebay.formats.stream_filters import Filters
from forebay.storage import MemoryStore
from forebay.stream import (
    BlockCache,
    RetentionPolicy,
    Spec,
    StreamWriter,
    WriterConfig,
    collect,
    verify_stream,
)
from forebay.stream._keys import StreamKeys

KEYS = StreamKeys(STREAM)
COLOURS = (b"red", b"green", b"blue", b"")


class RangeStore(MemoryStore):
    """Remembers which bytes were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.ranges += [(key, start, length) for start, length in ranges]
        return await super().get_ranges(key, ranges)


def write_colours(path: Path, colours: Sequence[bytes], *, size: int = 2000) -> None:
    """One chunk per colour; the records say their number and colour."""
    with StreamWriter(path, epoch=1, clock=HandClock(), config=WriterConfig(segment_chunks_max=50)) as writer:
        for number, colour in enumerate(colours):
            record = f"{number} {colour.decode()} ".encode().ljust(size, b".")
            writer.append([record], filters=[colour] if colour != b"none" else [])
            if number % 7 == 0:
                writer.store_offsets({b"c": number})
        writer.commit()


async def filtered(
    store: MemoryStore, matcher: Matcher, local: Path | None = None, **config: int
) -> list[str]:
    reader = reader_of(store, local, config={"ahead_bytes": 0, **config})
    found: list[str] = []
    async for chunk in reader.chunks(Spec("first"), matcher=matcher):
        header = chunk.header
        records = decode_records(chunk.data, entries=header.entries, records=header.records)
        found += [bytes(record).split(b".", maxsplit=1)[0].decode().strip() for record in records]
    return found


async def tiered(path: Path, colours: Sequence[bytes], **config: int) -> RangeStore:
    write_colours(path, colours)
    store = RangeStore()
    await tier_of(path, store, config={"fragment_bytes": 20_000, **config}).run_once()
    return store


async def drop_filters(store: MemoryStore) -> int:
    keys = [info.key async for info in store.list(KEYS.prefix) if info.key.endswith(".filters")]
    await store.delete(keys)
    return len(keys)


@pytest.mark.parametrize("unfiltered", [False, True])
async def test_filters_give_the_same_records_with_and_without_what_stands_beside(
    tmp_path: Path, unfiltered: bool
) -> None:
    draw = random.Random(3)
    colours = [draw.choice((*COLOURS, b"none")) for _ in range(120)]
    store = await tiered(tmp_path, colours)
    for wanted in ([b"red"], [b"green", b"blue"], [b"violet"]):
        matcher = Matcher(wanted, match_unfiltered=unfiltered)
        with_side = await filtered(store, matcher)
        assert with_side == await filtered(store, matcher, tmp_path)
        bare = RangeStore()
        await tier_of(tmp_path, bare, config={"fragment_bytes": 20_000}).run_once()
        assert await drop_filters(bare) > 5
        assert await filtered(bare, matcher) == with_side
        sure = [f"{number} {one.decode()}" for number, one in enumerate(colours) if one in wanted]
        assert set(sure) <= set(with_side)


async def test_what_cannot_match_is_not_downloaded(tmp_path: Path) -> None:
    colours = [b"red" if number % 40 == 3 else b"green" for number in range(160)]
    store = await tiered(tmp_path, colours)
    store.ranges.clear()
    found = await filtered(store, Matcher([b"red"]))
    assert [one.split()[1] for one in found] == ["red"] * 4
    asked = [length for key, _, length in store.ranges if key.endswith(".fragment")]
    assert sum(asked) < 5 * 2200
    assert len(asked) == 4
    store.ranges.clear()
    assert await filtered(store, Matcher([b"violet"])) == []
    assert store.ranges == []


async def test_neighbours_that_match_come_with_one_request(tmp_path: Path) -> None:
    store = await tiered(tmp_path, [b"red"] * 6 + [b"green"] * 30, fragment_bytes=1 << 20)
    store.ranges.clear()
    assert len(await filtered(store, Matcher([b"red"]), block_bytes=1 << 20)) == 6
    # The tracking chunk between the first and the second user chunk parts them.
    assert len(store.ranges) == 2


async def test_filters_go_with_their_fragments_and_are_no_orphans(tmp_path: Path) -> None:
    write_colours(tmp_path, [b"red"] * 60)
    store = RangeStore()
    tier = tier_of(tmp_path, store, config={"fragment_bytes": 20_000, "branching": 2})
    await tier.run_once()
    assert (await collect(reader_of(store).remote, now_ms=1 << 50, grace_ms=0)).orphans == []
    assert await tier.remote.retain(RetentionPolicy(max_bytes=30_000)) > 0
    left = [info.key async for info in store.list(KEYS.prefix)]
    fragments = [int(key[-29:-9]) for key in left if key.endswith(".fragment")]
    assert fragments == [int(key[-28:-8]) for key in left if key.endswith(".filters")]
    await store.put(KEYS.filters(1), b"x")
    assert (await collect(reader_of(store).remote, now_ms=1 << 50, grace_ms=0)).orphans == [KEYS.filters(1)]


async def test_filters_that_tell_of_another_fragment_or_are_damaged_are_not_used(tmp_path: Path) -> None:
    store = await tiered(tmp_path, [b"red"] * 30)
    keys = [info.key async for info in store.list(KEYS.prefix) if info.key.endswith(".filters")]
    data = [(await store.get(key)).data for key in keys]
    await store.put(keys[0], data[1])
    await store.put(keys[1], data[1][:-1] + bytes([data[1][-1] ^ 1]))
    assert len(await filtered(store, Matcher([b"red"]))) == 30
    report = await verify_stream(reader_of(store).remote)
    assert len(report.problems) == 2
    assert all("filters" in problem for problem in report.problems)


async def test_a_stream_without_filters_has_nothing_beside_it(tmp_path: Path) -> None:
    store = await tiered(tmp_path, [b"none"] * 20)
    assert await drop_filters(store) == 0


def test_filters_come_back_and_every_damage_is_found() -> None:
    records = np.array([(5, 8, 0, 16), (7, 100, 1, 0), (8, 160, 0, 20)], stream_filters.RECORD_DTYPE)
    blooms = (build([b"a"], 16), b"", build([b"b"], 20))
    data = stream_filters.encode(Filters(5, 9, 300, records, blooms))
    found = stream_filters.decode(data)
    assert (found.first_offset, found.next_offset, found.data_bytes) == (5, 9, 300)
    assert found.chunks.tobytes() == records.tobytes()
    assert found.blooms == blooms
    for length in range(len(data)):
        with pytest.raises(FormatError):
            stream_filters.decode(data[:length])
    for at in (*range(8), *range(28, len(data))):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(FormatError):
            stream_filters.decode(damaged)


# Ranges.


async def test_a_reader_begins_with_a_small_range_and_grows(tmp_path: Path) -> None:
    write_colours(tmp_path, [b"none"] * 45, size=200_000)
    store = RangeStore()
    await tier_of(tmp_path, store, config={"fragment_bytes": 64 << 20}).run_once()
    store.ranges.clear()
    reader = reader_of(store, cache=BlockCache(64 << 20), config={"block_bytes": 4 << 20, "ahead_bytes": 0})
    chunks = reader.chunks(Spec("first"))
    await anext(chunks)
    assert [length for _, _, length in store.ranges] == [256 * 1024]
    records = 1
    async for _ in chunks:
        records += 1
    assert records == 45
    entered = [asked for asked in store.ranges if asked[0] == KEYS.fragment(0)]
    lengths = [length for _, _, length in entered]
    assert lengths[:6] == [size << 10 for size in (256, 256, 512, 1024, 2048, 4096)]
    starts = [start for _, start, _ in entered]
    assert starts == [sum(lengths[:number]) for number in range(len(lengths))]


@pytest.mark.parametrize("ahead", [0, 1 << 20, 16 << 20])
@pytest.mark.parametrize("offset", [0, 3, 17, 44])
async def test_growing_ranges_give_the_same_records_wherever_a_reader_attaches(
    tmp_path: Path, ahead: int, offset: int
) -> None:
    write_colours(tmp_path, [b"none"] * 45, size=150_000)
    store = RangeStore()
    await tier_of(tmp_path, store, config={"fragment_bytes": 3_000_000}).run_once()
    reader = reader_of(
        store, cache=BlockCache(64 << 20), config={"block_bytes": 1 << 20, "ahead_bytes": ahead}
    )
    place = await reader.attach(Spec("offset", offset))
    store.ranges.clear()
    remote = await read_all(reader, place)
    assert remote == await read_all(reader_of(MemoryStore(), tmp_path), place)
    assert len(set(store.ranges)) == len(store.ranges)


async def test_resolving_a_place_fetches_headers_and_no_data(tmp_path: Path) -> None:
    write_colours(tmp_path, [b"none"] * 30, size=100_000)
    store = RangeStore()
    await tier_of(tmp_path, store, config={"fragment_bytes": 2_000_000}).run_once()
    local = reader_of(MemoryStore(), tmp_path)
    for spec in (Spec("first"), Spec("last"), Spec("next"), Spec("offset", 9), Spec("timestamp", 0)):
        store.ranges.clear()
        reader = reader_of(store)
        assert await reader.resolve(spec) == await local.resolve(spec)
        assert sum(length for _, _, length in store.ranges) < 5000
