"""What a real broker wrote and delivered, through the bucket and back: equal in every record and answer."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.stream.shared import EMPTY, ONE, VARY, delivered, osiris_files, segments

from forebay.formats.osiris_chunk import Chunk
from forebay.formats.osiris_entry import decode_records
from forebay.kit.clock import SystemClock
from forebay.storage import MemoryStore
from forebay.stream import BlockCache, ReaderConfig, Spec, StreamReader, StreamTier, TierConfig

IDS = {"vary": VARY, "one": ONE, "empty": EMPTY}


async def tiered(path: Path, *, stream: str, target: int = 1, branching: int = 1024) -> MemoryStore:
    store = MemoryStore()
    await tier_into(store, path, stream=stream, target=target, branching=branching)
    return store


async def tier_into(
    store: MemoryStore, path: Path, *, stream: str, target: int, branching: int = 1024
) -> None:
    config = TierConfig(fragment_bytes=target, branching=branching)
    tier = StreamTier(
        path, store, stream=stream, config=config, clock=SystemClock(), randomness=random.Random(1)
    )
    await tier.run_once()


def reader_of(store: MemoryStore, stream: str, local: Path | None = None, **named: Any) -> StreamReader:
    config = ReaderConfig(**{"block_bytes": 65_536} | named)
    return StreamReader(
        stream,
        store,
        local=local,
        cache=BlockCache(8 << 20),
        config=config,
        clock=SystemClock(),
        randomness=random.Random(2),
    )


def digests(chunk: Chunk) -> list[tuple[int, int, str]]:
    header = chunk.header
    records = decode_records(chunk.data, entries=header.entries, records=header.records)
    return [
        (header.chunk_id + number, len(record), hashlib.sha256(record).hexdigest()[:16])
        for number, record in enumerate(records)
    ]


async def all_records(reader: StreamReader) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    async for chunk in reader.chunks(Spec("first")):
        found += digests(chunk)
    return found


async def check_probes(name: str, reader: StreamReader) -> int:
    probes = json.loads((osiris_files() / "offset_spec_probes.json").read_text())
    count = 0
    for probe in probes:
        if probe["stream"] == name:
            header = await reader.resolve(Spec(probe["spec"], probe.get("value") or 0))
            answer = None if header is None else [header.chunk_id, header.records, header.timestamp]
            assert answer == probe["result"], probe
            count += 1
    return count


def copy_of(stream: str, where: Path, kept: list[Path]) -> Path:
    where.mkdir()
    for path in kept:
        for suffix in (".segment", ".index"):
            shutil.copyfile(path.with_suffix(suffix), where / path.with_suffix(suffix).name)
    return where


@pytest.mark.parametrize("branching", [2, 4, 1024])
@pytest.mark.parametrize("target", [1, 500, 10_000, 64 << 20])
async def test_all_records_and_probes_from_the_bucket_alone(target: int, branching: int) -> None:
    store = await tiered(osiris_files() / VARY, stream=VARY, target=target, branching=branching)
    reader = reader_of(store, VARY)
    assert await all_records(reader) == delivered("vary")
    assert await check_probes("vary", reader) > 20


@pytest.mark.parametrize("name", ["one", "empty"])
async def test_streams_of_one_record_and_of_none(name: str) -> None:
    store = await tiered(osiris_files() / IDS[name], stream=IDS[name])
    for local in (None, osiris_files() / IDS[name]):
        reader = reader_of(store, IDS[name], local)
        assert await all_records(reader) == (delivered(name) if name == "one" else [])
        await check_probes(name, reader)


@pytest.mark.parametrize("tiered_segments", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("local_from", [0, 1, 2, 3])
@pytest.mark.parametrize(("target", "branching"), [(1, 2), (10_000, 4), (64 << 20, 1024)])
async def test_answers_do_not_depend_on_what_is_local(
    tiered_segments: int, local_from: int, target: int, branching: int, tmp_path: Path
) -> None:
    local_from = min(local_from, tiered_segments)
    files = segments(VARY)
    store = MemoryStore()
    if tiered_segments:
        source = copy_of(VARY, tmp_path / "source", files[:tiered_segments])
        await tier_into(store, source, stream=VARY, target=target, branching=branching)
    local = copy_of(VARY, tmp_path / "local", files[local_from:])
    reader = reader_of(store, VARY, local)
    assert await all_records(reader) == delivered("vary")
    await check_probes("vary", reader)


@pytest.mark.parametrize("block_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("ahead_bytes", [0, 100_000, 32 << 20])
async def test_records_do_not_depend_on_blocks_and_read_ahead(block_bytes: int, ahead_bytes: int) -> None:
    store = await tiered(osiris_files() / VARY, stream=VARY, target=100_000)
    reader = reader_of(store, VARY, block_bytes=block_bytes, ahead_bytes=ahead_bytes)
    assert await all_records(reader) == delivered("vary")


async def test_a_second_run_uploads_nothing_and_writes_no_root() -> None:
    store = await tiered(osiris_files() / VARY, stream=VARY, target=10_000)
    keys = [info.key async for info in store.list()]
    tier = StreamTier(osiris_files() / VARY, store, clock=SystemClock(), randomness=random.Random(3))
    await tier.run_once()
    assert (tier.progress.fragments, tier.progress.roots) == (0, 0)
    assert [info.key async for info in store.list()] == keys
