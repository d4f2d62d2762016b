"""The same stream on real parts: SeaweedFS, local files, an embedded coordinator, Oxia."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.stream.logs import STREAM, expected, read_all, reader_of, tier_of, write_log

from forebay.coordination import open_coordinator
from forebay.kit.clock import SystemClock
from forebay.storage import ObjectStore, open_store
from forebay.stream import RetentionPolicy, collect, list_streams, restore_stream, verify_stream
from forebay.testing.servers import OxiaServer, SeaweedServer


async def whole_life(store: ObjectStore, path: Path, coordinator_url: str | None) -> None:
    """Tier with two writers, read, retain, collect, restore, delete."""
    write_log(path / "log", 40)
    coordinator = None if coordinator_url is None else open_coordinator(coordinator_url)
    try:
        tiers = [
            tier_of(path / "log", store, coordinator=coordinator, config={"branching": 3, "changes_max": 3})
            for _ in range(2)
        ]
        await asyncio.gather(*(tier.run_once() for tier in tiers))
        end = tiers[0].log.next_offset
        reader = reader_of(store, coordinator=coordinator)
        assert await read_all(reader) == expected(0, end)
        assert await list_streams(reader.remote.calls) == [STREAM]
        tier = tier_of(path / "log", store, coordinator=coordinator)
        await tier.run_once()
        assert await tier.remote.retain(RetentionPolicy(max_bytes=1500)) > 0
        first = tier.remote.persisted.first_offset
        assert await read_all(reader_of(store, coordinator=coordinator)) == expected(first, end)
        later_ms = SystemClock().now_ms() + 60_000
        await collect(reader.remote, now_ms=later_ms, grace_ms=0, dry_run=False)
        assert (await verify_stream(reader_of(store, coordinator=coordinator).remote)).problems == []
        done = await restore_stream(reader_of(store).remote, path / "again")
        assert (done.first_offset, done.next_offset) == (first, end)
        await tier.remote.delete_stream()
        assert [info.key async for info in store.list()] == [tier.remote.keys.current]
    finally:
        if coordinator is not None:
            await coordinator.close()


@pytest.mark.parametrize("embedded", [False, True])
async def test_a_whole_life_on_local_files(tmp_path: Path, embedded: bool) -> None:
    async with open_store(tmp_path / "bucket") as store:
        await whole_life(store, tmp_path, str(tmp_path / "bucket") if embedded else None)


@pytest.mark.integration
async def test_a_whole_life_in_a_bucket_alone(seaweed: SeaweedServer, tmp_path: Path) -> None:
    async with open_store(seaweed.url("stream-alone")) as store:
        await whole_life(store, tmp_path, None)


@pytest.mark.integration
async def test_a_whole_life_in_a_bucket_with_oxia(
    seaweed: SeaweedServer, oxia: OxiaServer, tmp_path: Path
) -> None:
    async with open_store(seaweed.url("stream-oxia")) as store:
        await whole_life(store, tmp_path, oxia.url())
