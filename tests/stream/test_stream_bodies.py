"""Fragments on their way from the segment file into the bucket: never whole in memory, never wrong."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.stream.logs import HASTY, HandClock, expected, read_all, reader_of, tier_of, write_log

from forebay.formats import Corrupt, osiris_chunk, stream_fragment
from forebay.storage import ANY, MemoryStore, ObjectStore, Source, open_store
from forebay.storage._api import When
from forebay.stream import Diverged, Spec, StreamWriter, WriterConfig, restore_stream, verify_stream
from forebay.stream._cutter import Cut, cuts
from forebay.stream._errors import SegmentChanged
from forebay.stream._fragment_source import FragmentSource
from forebay.stream._local import LocalLog
from forebay.stream._runs import RUN_BYTES_MAX

MIB = 1024 * 1024


def write_sizes(
    path: Path, sizes: list[int], *, blooms: bool = False, seed: int = 3, per_segment: int = 10_000
) -> None:
    """One chunk of one record for each size."""
    draw = random.Random(seed)
    config = WriterConfig(segment_chunks_max=per_segment)
    with StreamWriter(path, epoch=1, clock=HandClock(), config=config) as writer:
        for number, size in enumerate(sizes):
            filters = [b"f%d" % (number % 7)] if blooms else []
            writer.append([draw.randbytes(size)], filters=filters)
        writer.commit()


def cut_of(path: Path, target_bytes: int = 1 << 40) -> Cut:
    log = LocalLog(path)
    log.refresh()
    return next(cuts(log, log.first_offset, target_bytes=target_bytes, before_ms=None))


def joined(source: Source) -> bytes:
    return b"".join(bytes(piece) for piece in source.pieces())


@pytest.mark.parametrize("seed", range(6))
def test_a_source_gives_the_bytes_of_the_fragment(tmp_path: Path, seed: int) -> None:
    """Chunks of a few bytes up to several pieces, at every boundary of a piece."""
    draw = random.Random(seed)
    piece = Source.piece_bytes
    near = [piece - osiris_chunk.HEADER_BYTES - 4 + step for step in (-1, 0, 1)]
    sizes = [draw.choice([1, 50, 5000, 300_000, *near, 2 * piece + 77, 3 * piece]) for _ in range(40)]
    write_sizes(tmp_path, sizes, blooms=seed % 2 == 1, seed=seed)
    cut = cut_of(tmp_path, target_bytes=draw.choice([1, 10_000, 5 * MIB, 1 << 40]))
    begin = int(cut.segment.records["position"][cut.start])
    whole = stream_fragment.encode(
        cut.segment.path.read_bytes()[begin : cut.end],
        cut.segment.records[cut.start : cut.stop],
        next_offset=cut.next_offset,
        sequence=cut.sequence,
        chunks_before=cut.start,
        segment_position=begin,
    )
    source = FragmentSource(cut)
    assert joined(source) == whole == joined(source)
    assert source.size == len(whole)
    assert source.trailer == stream_fragment.decode(whole).trailer
    assert all(len(part) <= max(piece, len(whole) - cut.data_bytes) for part in source.pieces())


async def test_tiering_restoring_and_verifying_hold_a_small_part_of_a_fragment(tmp_path: Path) -> None:
    """Bytes that Python holds at most, with four fragments of 16 MiB on their way at once."""
    write_sizes(tmp_path / "log", [100_000] * 1000)
    store = open_store(tmp_path / "bucket")
    tier = tier_of(tmp_path / "log", store, config={"fragment_bytes": 16 * MIB, "uploads_max": 4})
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        await tier.run_once()
        tiering = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.reset_peak()
        await restore_stream(reader_of(store).remote, tmp_path / "back")
        restoring = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.reset_peak()
        assert (await verify_stream(reader_of(store).remote)).ok
        verifying = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        await store.close()
    assert tier.progress.fragments == 6
    assert tiering < 4 * Source.piece_bytes + 2 * MIB
    assert max(restoring, verifying) < 2 * RUN_BYTES_MAX + 4 * MIB
    for path in (tmp_path / "log").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("where", ["chunk data", "header", "long chunk", "last chunk"])
@pytest.mark.parametrize("kind", ["memory", "local"])
async def test_damage_stays_on_this_side_of_the_bucket(tmp_path: Path, where: str, kind: str) -> None:
    write_sizes(tmp_path / "log", [10_000] * 20 + [3 * MIB] + [10_000] * 20)
    records = cut_of(tmp_path / "log").segment.records
    number, inside = {
        "chunk data": (5, 100),
        "header": (7, 16),
        "long chunk": (20, 2 * MIB),
        "last chunk": (40, 9000),
    }[where]
    at = int(records["position"][number]) + inside
    with next((tmp_path / "log").glob("*.segment")).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
    store: ObjectStore = MemoryStore() if kind == "memory" else open_store(tmp_path / "bucket")
    with pytest.raises(Corrupt, match="segment"):
        await tier_of(tmp_path / "log", store, config={"fragment_bytes": 64 * MIB}).run_once()
    assert [info.key async for info in store.list() if "fragment" in info.key] == []
    await store.close()


class Meddling(MemoryStore):
    """A store in whose puts of fragments something happens to the segment file, half-way through."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        super().__init__()
        self._meddle: Callable[[], None] | None = meddle

    async def put_source(self, key: str, source: Source, when: When = ANY) -> str:
        meddle, self._meddle = self._meddle, None
        return await super().put_source(key, source if meddle is None else _Meddled(source, meddle), when)


class _Meddled(Source):
    def __init__(self, source: Source, meddle: Callable[[], None]) -> None:
        self._source, self._meddle = source, meddle
        self.size = source.size

    def pieces(self):  # type: ignore[no-untyped-def]
        for number, piece in enumerate(self._source.pieces()):
            if number == 1:
                self._meddle()
            yield piece


async def test_a_segment_that_vanishes_while_it_is_read_costs_nothing_of_it(tmp_path: Path) -> None:
    """The open file is read to its end: what was cut is stored, whole."""
    write_sizes(tmp_path / "log", [300_000] * 20)
    whole = joined(FragmentSource(cut_of(tmp_path / "log")))

    def remove() -> None:
        for path in (tmp_path / "log").iterdir():
            path.unlink()

    store = Meddling(remove)
    await tier_of(tmp_path / "log", store, config={"fragment_bytes": 64 * MIB}).run_once()
    [key] = [info.key async for info in store.list() if info.key.endswith(".fragment")]
    assert (await store.get(key)).data == whole


@pytest.mark.parametrize("kept", [0, 3, 19])
async def test_an_end_that_is_cut_off_and_written_anew_meanwhile_is_cut_anew(
    tmp_path: Path, kept: int
) -> None:
    """A new epoch replaces the end of the log while its old end is on its way: no mixture is stored."""
    write_sizes(tmp_path / "log", [300_000] * 20, seed=1)
    segment = next((tmp_path / "log").glob("*.segment"))
    position = int(cut_of(tmp_path / "log").segment.records["position"][kept])
    bodies = [random.Random(9).randbytes(300_000) for _ in range(20 - kept)]

    def rewrite() -> None:
        with segment.open("r+b") as file:
            file.truncate(position)
        with segment.with_suffix(".index").open("r+b") as file:
            file.truncate(8 + 29 * kept)
        with StreamWriter(tmp_path / "log", epoch=2, clock=HandClock()) as writer:
            for body in bodies:
                writer.append([body])
            writer.commit()

    store = Meddling(rewrite)
    tier = tier_of(tmp_path / "log", store, config={"fragment_bytes": 64 * MIB})
    await tier.run_once()
    assert tier.lag().bytes == 0
    [key] = [info.key async for info in store.list() if info.key.endswith(".fragment")]
    data = (await store.get(key)).data
    assert data == joined(FragmentSource(cut_of(tmp_path / "log")))
    assert stream_fragment.decode(data).data == segment.read_bytes()[8:]


async def test_a_segment_that_is_truncated_for_good_is_told_and_stores_nothing_wrong(tmp_path: Path) -> None:
    """Between two segments nothing may be missing: that is for people, after what is whole was stored."""
    write_sizes(tmp_path / "log", [600_000] * 10, per_segment=5)
    first = min((tmp_path / "log").glob("*.segment"))

    def shorten() -> None:
        with first.open("r+b") as file:
            file.truncate(3 * 600_052 + 100)

    store = Meddling(shorten)
    tier = tier_of(tmp_path / "log", store, config={"fragment_bytes": 64 * MIB})
    with pytest.raises(Diverged, match="no chunk of the local log begins there"):
        await tier.run_once()
    await tier.settle()
    assert tier.remote.persisted.next_offset == 3
    assert len(await read_all(reader_of(store))) == 3
    with pytest.raises(Diverged):
        await tier.run_once()


def test_a_source_tells_a_changed_file_from_a_damaged_one(tmp_path: Path) -> None:
    write_sizes(tmp_path, [1000] * 10)
    source = FragmentSource(cut_of(tmp_path))
    segment = next(tmp_path.glob("*.segment"))
    good = segment.read_bytes()
    segment.write_bytes(good[:-1] + b"x")
    with pytest.raises(Corrupt):
        joined(source)
    segment.write_bytes(good[:-1])
    with pytest.raises(SegmentChanged):
        joined(source)
    with pytest.raises(SegmentChanged):
        segment.unlink()
        source.last()
    segment.write_bytes(good)
    assert source.last().chunk_id == 9


async def test_two_tiers_of_one_log_upload_it_once(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 60, per_segment=20)
    store = MemoryStore()
    tiers = [
        tier_of(tmp_path / "log", store, config={"retry": HASTY}, randomness=random.Random(seed))
        for seed in range(3)
    ]
    await asyncio.gather(*[tier.run_once() for tier in tiers])
    assert await read_all(reader_of(store)) == expected(0, tiers[0].log.next_offset)


@pytest.mark.parametrize("tier", ["local", "remote"])
async def test_damage_keeps_nobody_from_the_chunks_before_it(tmp_path: Path, tier: str) -> None:
    write_sizes(tmp_path / "log", [1000] * 10)
    store = MemoryStore()
    await tier_of(tmp_path / "log", store, config={"fragment_bytes": 64 * MIB}).run_once()
    at = int(cut_of(tmp_path / "log").segment.records["position"][6]) + 500
    if tier == "local":
        segment = next((tmp_path / "log").glob("*.segment"))
        segment.write_bytes(_flipped(segment.read_bytes(), at))
    else:
        [key] = [info.key async for info in store.list() if info.key.endswith(".fragment")]
        await store.put(key, _flipped((await store.get(key)).data, at))
    reader = reader_of(store, tmp_path / "log" if tier == "local" else None, config={"block_bytes": MIB})
    found: list[int] = []
    with pytest.raises(Corrupt, match="checksum"):
        async for chunk in reader.chunks(Spec("first")):
            found.append(chunk.header.chunk_id)  # noqa: PERF401 - what came before the error counts
    assert found == list(range(6))


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
