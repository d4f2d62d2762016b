"""The remote tier: its tree, its retention, its writers, and what is left when one of them dies."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stream.logs import STREAM, HandClock, expected, read_all, reader_of, tier_of, write_log

from forebay.coordination import open_coordinator
from forebay.errors import NotFound, PreconditionFailed, Unavailable
from forebay.formats import Corrupt
from forebay.formats import stream_manifest as fmt
from forebay.storage import MemoryStore
from forebay.stream import (
    Deposed,
    Diverged,
    Overtaken,
    RetentionPolicy,
    RootMissing,
    Spec,
    StreamDeleted,
    collect,
    restore_stream,
    verify_stream,
)
from forebay.stream._keys import StreamKeys, names_of, short_name
from forebay.stream._lookup import Lookup
from forebay.stream._manifest import EMPTY, FragmentInfo, find_timestamp, next_group

KEYS = StreamKeys(STREAM)


async def keys_of(store: MemoryStore, suffix: str = "") -> list[str]:
    return [info.key async for info in store.list(KEYS.prefix) if info.key.endswith(suffix)]


async def tiered(path: Path, chunks: int = 20, **named: Any) -> tuple[MemoryStore, Any]:
    write_log(path, chunks)
    store = MemoryStore()
    tier = tier_of(path, store, **named)
    await tier.run_once()
    return store, tier


def files_in(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def remove_segments(path: Path, stop: int) -> None:
    """What a broker's own retention does: the oldest segments go, whoever still wants them."""
    for segment in sorted(path.glob("*.segment"))[:stop]:
        segment.unlink()
        segment.with_suffix(".index").unlink()


def infos(count: int, first: int = 0) -> list[FragmentInfo]:
    return [FragmentInfo(first + n, first + n + 1, n, n, 10) for n in range(count)]


# The tree.


@pytest.mark.parametrize("branching", [2, 3, 4])
def test_grouping_keeps_order_kinds_and_one_fragment_in_the_root(branching: int) -> None:
    manifest = EMPTY
    groups: dict[int, Any] = {}
    for number in range(200):
        manifest = manifest.append(infos(1, number))
        while (found := next_group(manifest.entries, branching)) is not None:
            start, kind = found
            children = manifest.entries[start : start + branching]
            uid = len(groups)
            groups[uid] = children
            manifest = manifest.grouped(start, branching, fmt.group_entry(kind, children, uid))
        kinds = fmt.kinds_of(manifest.entries)
        assert (np.diff(kinds.astype(int)) <= 0).all()
        assert kinds[-1] == fmt.FRAGMENT
        assert (kinds == fmt.FRAGMENT).sum() <= branching

    def leaves(entries: Any) -> list[int]:
        found: list[int] = []
        for at in range(len(entries)):
            entry = entries[at : at + 1]
            if fmt.kinds_of(entry)[0] == fmt.FRAGMENT:
                found.append(int(entry["offset"][0]))
            else:
                found += leaves(groups[int(fmt.uids_of(entry)[0])])
        return found

    assert leaves(manifest.entries) == list(range(200))
    assert manifest.total_bytes == 2000


def test_a_manifest_takes_nothing_out_of_order_and_begins_anywhere() -> None:
    manifest = EMPTY.append(infos(2, 500))
    assert (manifest.first_offset, manifest.next_offset, manifest.first_last_timestamp) == (500, 502, 0)
    with pytest.raises(ValueError, match="does not follow"):
        manifest.append(infos(1, 501))
    with pytest.raises(ValueError, match="does not follow"):
        manifest.append([FragmentInfo(502, 502, 0, 0, 1)])


def test_a_timestamp_is_compared_with_the_last_of_each_entry() -> None:
    rows = [(0, 10, 20, True, 1), (5, 20, 30, True, 1), (9, 40, 50, True, 1)]
    entries = fmt.fragment_entries(rows)
    answers = {5: 0, 10: 0, 20: 0, 21: 1, 30: 1, 35: 2, 50: 2, 51: None}
    assert {at: find_timestamp(entries, at) for at in answers} == answers


@pytest.mark.parametrize("branching", [2, 4, 1024])
async def test_every_offset_leads_to_its_fragment_through_every_level(tmp_path: Path, branching: int) -> None:
    store, tier = await tiered(tmp_path, 40, config={"branching": branching, "fragment_bytes": 1})
    reader = reader_of(store)
    await reader.refresh()
    lookup = Lookup(reader.remote.nodes, reader.remote.fragments)
    manifest = reader.remote.manifest
    refs = [ref async for ref in lookup.from_offset(manifest, 0)]
    offsets = [ref.offset for ref in refs]
    assert offsets == sorted(set(offsets))
    assert len(offsets) == 40
    for offset in range(manifest.next_offset):
        found = await lookup.by_offset(manifest, offset)
        assert found is not None
        assert found.offset == max(at for at in offsets if at <= offset)
        following = [ref.offset async for ref in lookup.from_offset(manifest, offset)]
        assert following == [at for at in offsets if at >= found.offset]
    assert sum(ref.data_bytes for ref in refs) == manifest.total_bytes
    assert tier.log.next_offset == manifest.next_offset


# Persisting.


async def test_a_stream_that_does_not_begin_with_offset_0_is_tiered(tmp_path: Path) -> None:
    write_log(tmp_path, 20)
    remove_segments(tmp_path, 1)
    store = MemoryStore()
    tier = tier_of(tmp_path, store)
    await tier.run_once()
    first = tier.log.first_offset
    assert first > 0
    assert tier.remote.persisted.first_offset == first
    assert await read_all(reader_of(store)) == expected(first, tier.log.next_offset)


async def test_only_one_root_is_left_and_nothing_is_orphaned(tmp_path: Path) -> None:
    store, _ = await tiered(tmp_path, 40, config={"fragment_bytes": 1, "changes_max": 3})
    assert len(await keys_of(store, ".manifest")) == 1
    garbage = await collect(reader_of(store).remote, now_ms=1 << 50, grace_ms=0)
    assert garbage.orphans == []
    assert (await verify_stream(reader_of(store).remote)).problems == []


async def test_fragments_that_no_root_names_are_found_by_their_chain(tmp_path: Path) -> None:
    store, tier = await tiered(tmp_path, 10)
    write_log(tmp_path, 10)
    root_writes = tier.remote.root_writes

    async def fail() -> bool:
        raise Unavailable("power cut")

    tier.remote.persist = fail
    with pytest.raises(Unavailable):
        await tier.run_once()
    assert tier.remote.root_writes == root_writes
    puts = await keys_of(store, ".fragment")
    again = tier_of(tmp_path, store)
    await again.run_once()
    assert again.progress.fragments == 0
    assert again.progress.roots == 1
    assert await keys_of(store, ".fragment") == puts
    assert await read_all(reader_of(store)) == expected(0, again.log.next_offset)


async def test_another_cut_of_the_same_log_is_adopted_and_not_overwritten(tmp_path: Path) -> None:
    write_log(tmp_path, 20)
    store = MemoryStore()
    await tier_of(tmp_path, store, config={"fragment_bytes": 1}).run_once()
    # The record and the first fragment are lost, the others are not; the other writer cuts elsewhere.
    for key in [KEYS.current, KEYS.fragment(0), *await keys_of(store, ".manifest")]:
        await store.delete([key])
    before = {key: (await store.get(key)).version for key in await keys_of(store, ".fragment")}
    other = tier_of(tmp_path, store, config={"fragment_bytes": 300})
    await other.run_once()
    assert other.progress.adopted > 0
    for key, version in before.items():
        assert (await store.get(key)).version == version
    assert await read_all(reader_of(store)) == expected(0, other.log.next_offset)


async def test_a_different_log_at_the_same_offsets_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store, _ = await tiered(tmp_path / "one", 12)
    before = {key: (await store.get(key)).version for key in await keys_of(store)}
    write_log(tmp_path / "two", 20, epoch=2, tag="other")
    with pytest.raises(Diverged):
        await tier_of(tmp_path / "two", store).run_once()
    assert {key: (await store.get(key)).version for key in await keys_of(store)} == before
    # Also where the record is gone and only the fragments could tell.
    await store.delete([KEYS.current, *await keys_of(store, ".manifest")])
    with pytest.raises(Diverged):
        await tier_of(tmp_path / "two", store).run_once()


@pytest.mark.parametrize("branching", [2, 3, 1024])
async def test_repair_cuts_back_to_the_common_point_and_goes_on_from_there(
    tmp_path: Path, branching: int
) -> None:
    config = {"branching": branching, "fragment_bytes": 1}
    write_log(tmp_path / "one", 20)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    write_log(tmp_path / "one", 20, tag="lost")
    write_log(tmp_path / "two", 30, epoch=2)
    store = MemoryStore()
    old = tier_of(tmp_path / "one", store, config=config)
    await old.run_once()
    tier = tier_of(tmp_path / "two", store, config=config)
    with pytest.raises(Diverged):
        await tier.run_once()
    common = await tier.repair()
    assert 0 < common < old.log.next_offset
    assert tier.remote.persisted.next_offset == common
    assert await read_all(reader_of(store)) == expected(0, common)
    await tier.run_once()
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)
    report = await verify_stream(reader_of(store).remote)
    assert (report.problems, report.bytes) == ([], tier.remote.persisted.total_bytes)
    await collect(reader_of(store).remote, now_ms=1 << 50, grace_ms=0, dry_run=False)
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)
    with pytest.raises(Deposed):
        await tier_of(tmp_path / "one", store, config=config).run_once()


async def test_a_cache_does_not_hold_on_to_what_a_repair_replaced(tmp_path: Path) -> None:
    write_log(tmp_path / "one", 10, per_segment=5)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    write_log(tmp_path / "one", 5, tag="x")
    write_log(tmp_path / "two", 5, epoch=2, tag="y")
    store = MemoryStore()
    await tier_of(tmp_path / "one", store).run_once()
    reader = reader_of(store)
    lost = [record for record in await read_all(reader) if record.startswith(b"x")]
    tier = tier_of(tmp_path / "two", store)
    await tier.repair()
    await tier.run_once()
    found = [record for record in await read_all(reader) if record.startswith(b"y")]
    assert [record[1:] for record in found] == [record[1:] for record in lost]


async def test_repair_refuses_a_log_that_has_nothing_in_common(tmp_path: Path) -> None:
    store, _ = await tiered(tmp_path / "one", 12)
    before = await keys_of(store)
    write_log(tmp_path / "two", 20, epoch=2, tag="other")
    with pytest.raises(Diverged):
        await tier_of(tmp_path / "two", store).repair()
    assert await keys_of(store) == before


async def test_a_bucket_ahead_of_a_lagging_log_is_left_as_it_is(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 10)
    shutil.copytree(tmp_path / "log", tmp_path / "behind")
    write_log(tmp_path / "log", 10)
    store = MemoryStore()
    await tier_of(tmp_path / "log", store).run_once()
    tier = tier_of(tmp_path / "behind", store)
    await tier.run_once()
    assert (tier.progress.fragments, tier.progress.roots) == (0, 0)


async def test_data_lost_before_it_was_tiered_becomes_a_declared_gap(tmp_path: Path) -> None:
    store, tier = await tiered(tmp_path, 10)
    end = tier.remote.persisted.next_offset
    write_log(tmp_path, 15)
    remove_segments(tmp_path, -2)
    again = tier_of(tmp_path, store)
    await again.run_once()
    first = again.log.first_offset
    assert again.remote.gaps == ((end, first),)
    reader = reader_of(store)
    with pytest.raises(Overtaken) as told:
        await read_all(reader)
    assert (told.value.offset, told.value.resume_offset) == (end, first)
    assert await read_all(reader, first) == expected(first, again.log.next_offset)
    assert await reader.attach(Spec("offset", end)) == first
    assert (await verify_stream(reader.remote)).problems == []
    # Retention takes what is before it, and then it is not worth telling any more.
    await again.remote.retain(RetentionPolicy(max_bytes=1))
    assert len(again.remote.gaps) == 0
    assert (await verify_stream(reader_of(store).remote)).problems == []


# Two writers.


async def test_a_lower_epoch_stands_down_and_never_overwrites(tmp_path: Path) -> None:
    write_log(tmp_path, 10)
    store = MemoryStore()
    old, new = tier_of(tmp_path, store, epoch=1), tier_of(tmp_path, store, epoch=2)
    await new.run_once()
    record = (await store.get(KEYS.current)).data
    with pytest.raises(Deposed):
        await old.run_once()
    assert (await store.get(KEYS.current)).data == record


async def test_a_writer_that_was_overtaken_between_read_and_swap_learns_it(tmp_path: Path) -> None:
    write_log(tmp_path, 5)
    store = MemoryStore()
    old = tier_of(tmp_path, store, epoch=1)
    await old.run_once()
    write_log(tmp_path, 5)
    await tier_of(tmp_path, store, epoch=2).run_once()
    write_log(tmp_path, 5)
    old.log.refresh()
    with pytest.raises((Deposed, PreconditionFailed)):
        await old._upload(None)
        await old.remote.persist()


async def test_two_writers_of_one_epoch_both_get_through(tmp_path: Path) -> None:
    write_log(tmp_path, 30)
    store = MemoryStore()
    first, second = (tier_of(tmp_path, store, config={"changes_max": 2}) for _ in range(2))
    await asyncio.gather(first.run_once(), second.run_once())
    assert await read_all(reader_of(store)) == expected(0, first.log.next_offset)
    assert (await verify_stream(reader_of(store).remote)).problems == []


async def test_the_coordinator_keeps_the_record_and_the_bucket_a_copy(tmp_path: Path) -> None:
    async with open_coordinator("memory://") as coordinator:
        write_log(tmp_path, 20)
        store = MemoryStore()
        await tier_of(tmp_path, store, coordinator=coordinator).run_once()
        end = await reader_of(store).attach(Spec("next"))
        assert await read_all(reader_of(store, coordinator=coordinator)) == expected(0, end)
        with pytest.raises(Diverged, match="coordinator"):
            await tier_of(tmp_path, store).run_once()
        # A record that is lost is taken from the copy; nothing is uploaded again.
        await coordinator.delete(f"rabbitmq_stream_s3/{STREAM}")
        again = tier_of(tmp_path, store, coordinator=coordinator)
        await again.run_once()
        assert again.progress.fragments == 0
        assert await read_all(reader_of(store, coordinator=coordinator)) == expected(0, end)


# What must never be taken for empty.


async def test_a_missing_or_damaged_root_is_an_error_and_never_an_empty_stream(tmp_path: Path) -> None:
    store, _ = await tiered(tmp_path, 20)
    [root] = await keys_of(store, ".manifest")
    data = (await store.get(root)).data
    await store.put(root, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Corrupt):
        await tier_of(tmp_path, store).run_once()
    with pytest.raises(Corrupt):
        await read_all(reader_of(store))
    await store.delete([root])
    with pytest.raises(RootMissing):
        await tier_of(tmp_path, store).run_once()
    with pytest.raises(RootMissing):
        await read_all(reader_of(store))
    assert await keys_of(store, ".manifest") == []


async def test_a_damaged_group_is_found_out_by_its_uid(tmp_path: Path) -> None:
    store, _ = await tiered(tmp_path, 20, config={"fragment_bytes": 1})
    key = (await keys_of(store, "group"))[0]
    data = bytearray((await store.get(key)).data)
    data[40] ^= 1
    await store.put(key, data)
    with pytest.raises(Corrupt):
        await read_all(reader_of(store))


async def test_a_damaged_chunk_is_never_delivered(tmp_path: Path) -> None:
    store, _ = await tiered(tmp_path, 5, config={"fragment_bytes": 1})
    key = (await keys_of(store, ".fragment"))[2]
    data = bytearray((await store.get(key)).data)
    data[8 + 48 + 5] ^= 1
    await store.put(key, data)
    with pytest.raises(Corrupt, match="checksum"):
        await read_all(reader_of(store))
    assert not (await verify_stream(reader_of(store).remote)).ok


# Retention.


@pytest.mark.parametrize("branching", [2, 3, 1024])
@pytest.mark.parametrize("keep", [1, 500, 1200, 2000])
async def test_retention_by_size_removes_a_prefix_and_a_second_run_nothing(
    tmp_path: Path, branching: int, keep: int
) -> None:
    store, tier = await tiered(tmp_path, 40, config={"branching": branching, "fragment_bytes": 1})
    sizes = {int(key[-29:-9]): (await store.head(key)).size for key in await keys_of(store, ".fragment")}
    removed = await tier.remote.retain(RetentionPolicy(max_bytes=keep))
    manifest = tier.remote.persisted
    assert removed > 0
    assert manifest.total_bytes <= keep or len(sizes) - removed == 1
    left = [int(key[-29:-9]) for key in await keys_of(store, ".fragment")]
    assert left == sorted(sizes)[removed:]
    assert manifest.first_offset == left[0]
    report = await verify_stream(reader_of(store).remote)
    assert report.problems == []
    assert report.bytes == manifest.total_bytes
    garbage = await collect(reader_of(store).remote, now_ms=1 << 50, grace_ms=0)
    assert garbage.orphans == []
    roots = await keys_of(store, ".manifest")
    assert await tier.remote.retain(RetentionPolicy(max_bytes=keep)) == 0
    assert await keys_of(store, ".manifest") == roots
    assert await read_all(reader_of(store)) == expected(left[0], manifest.next_offset)
    # The tree goes on growing and a new writer resolves it.
    write_log(tmp_path, 10)
    again = tier_of(tmp_path, store, config={"branching": branching, "fragment_bytes": 1})
    await again.run_once()
    assert await read_all(reader_of(store)) == expected(left[0], again.log.next_offset)


async def test_retention_by_age_compares_the_last_timestamp_of_a_fragment(tmp_path: Path) -> None:
    clock = HandClock(1_000_000)
    write_log(tmp_path, 20, clock=clock, step_ms=1000)
    store = MemoryStore()
    tier = tier_of(tmp_path, store, clock=clock, config={"fragment_bytes": 1})
    await tier.run_once()
    clock.ms = 1_010_500
    assert await tier.remote.retain(RetentionPolicy(max_age_ms=5000)) == 6
    assert tier.remote.persisted.first_timestamp == 1_006_000
    assert await tier.remote.retain(RetentionPolicy(max_age_ms=5000)) == 0
    clock.ms += 10_000_000
    assert await tier.remote.retain(RetentionPolicy(max_age_ms=5000)) == 13
    assert await tier.remote.retain(RetentionPolicy(max_age_ms=5000)) == 0
    assert len(await keys_of(store, ".fragment")) == 1


async def test_objects_are_deleted_only_after_the_root_that_drops_them_is_current(tmp_path: Path) -> None:
    store, tier = await tiered(tmp_path, 20, config={"fragment_bytes": 1})
    before = await keys_of(store)

    async def fail(*_: object) -> Any:
        raise PreconditionFailed("record", expected=1)

    tier.remote.pointer.swap = fail
    with pytest.raises(PreconditionFailed):
        await tier.remote.retain(RetentionPolicy(max_bytes=1))
    assert set(before) <= set(await keys_of(store))


async def test_a_reader_overtaken_by_retention_is_told_where_it_stands(tmp_path: Path) -> None:
    store, tier = await tiered(tmp_path, 20, config={"fragment_bytes": 1})
    reader = reader_of(store, config={"ahead_bytes": 0})
    chunks = reader.chunks(Spec("first"))
    first = await anext(chunks)
    await tier.remote.retain(RetentionPolicy(max_bytes=500))
    with pytest.raises(Overtaken) as told:
        async for _ in chunks:
            pass
    assert told.value.offset == first.header.next_id
    assert told.value.resume_offset == tier.remote.persisted.first_offset
    end = tier.log.next_offset
    assert await read_all(reader, told.value.resume_offset) == expected(told.value.resume_offset, end)


# Deletion and orphans.


async def test_a_deleted_stream_stays_deleted_and_late_writes_are_collected(tmp_path: Path) -> None:
    store, tier = await tiered(tmp_path, 10)
    other = f"{KEYS.prefix[:-1]}x/data/{0:020d}.fragment"  # Its id begins with the id of the deleted one.
    await store.put(other, b"not mine")
    await tier.remote.delete_stream()
    assert await keys_of(store) == [KEYS.current]
    with pytest.raises(StreamDeleted):
        await tier_of(tmp_path, store).run_once()
    with pytest.raises(StreamDeleted):
        await read_all(reader_of(store))
    await store.put(KEYS.fragment(7), b"landed late")
    view = reader_of(store).remote
    assert (await collect(view, now_ms=1 << 50)).orphans == [KEYS.fragment(7)]
    assert (await collect(view, now_ms=1 << 50, dry_run=False)).removed == 1
    assert await keys_of(store) == [KEYS.current]
    assert (await store.get(other)).data == b"not mine"


async def test_deletion_with_a_coordinator_removes_the_record_and_leaves_a_tombstone(tmp_path: Path) -> None:
    async with open_coordinator("memory://") as coordinator:
        write_log(tmp_path, 10)
        store = MemoryStore()
        tier = tier_of(tmp_path, store, coordinator=coordinator)
        await tier.run_once()
        await tier.remote.delete_stream()
        assert await coordinator.get(f"rabbitmq_stream_s3/{STREAM}") is None
        write_log(tmp_path, 10)
        with pytest.raises(StreamDeleted):
            await tier.run_once()
        with pytest.raises(StreamDeleted):
            await tier_of(tmp_path, store, coordinator=coordinator).run_once()


async def test_collection_takes_old_orphans_and_nothing_else(tmp_path: Path) -> None:
    store, tier = await tiered(tmp_path, 30, config={"fragment_bytes": 1})
    end = tier.remote.persisted.next_offset
    named = set(await keys_of(store))
    orphans = [KEYS.root(7), KEYS.group(1, 3, 9), KEYS.fragment(2)]
    kept = [KEYS.fragment(end), KEYS.fragment(end + 50), f"{KEYS.prefix}metadata/notes.txt"]
    assert KEYS.fragment(2) not in named
    for key in orphans + kept:
        await store.put(key, b"x")
    view = reader_of(store).remote
    young = await collect(view, now_ms=(await store.head(KEYS.current)).last_modified_ms, dry_run=False)
    assert (young.orphans, young.removed) == ([], 0)
    dry = await collect(view, now_ms=1 << 50)
    assert sorted(dry.orphans) == sorted(orphans)
    assert dry.unknown == kept[2:]
    assert set(await keys_of(store)) == named | set(orphans + kept)
    assert (await collect(view, now_ms=1 << 50, dry_run=False)).removed == 3
    assert set(await keys_of(store)) == named | set(kept)


async def test_a_stream_without_record_loses_nothing(tmp_path: Path) -> None:
    store, _ = await tiered(tmp_path, 10)
    await store.delete([KEYS.current])
    before = await keys_of(store)
    found = await collect(reader_of(store).remote, now_ms=1 << 50, grace_ms=0, dry_run=False)
    assert found.removed == 0
    assert await keys_of(store) == before


# Restore.


@pytest.mark.parametrize("lost", ["nothing", "record", "record and roots", "groups too"])
async def test_restore_rebuilds_the_files_from_what_the_bucket_has(tmp_path: Path, lost: str) -> None:
    store, tier = await tiered(tmp_path / "log", 25, config={"fragment_bytes": 1})
    gone = [KEYS.current] if lost != "nothing" else []
    if lost in ("record and roots", "groups too"):
        gone += await keys_of(store, ".manifest")
    if lost == "groups too":
        gone += await keys_of(store, "group")
    await store.delete(gone)
    done = await restore_stream(reader_of(store).remote, tmp_path / "again")
    assert done.next_offset == tier.log.next_offset
    names = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "log" / name).read_bytes()


async def test_restore_to_a_moment_leaves_out_what_is_later(tmp_path: Path) -> None:
    store, tier = await tiered(tmp_path / "log", 25)
    moment = int(tier.log.segments[2].records["timestamp"][2])
    done = await restore_stream(reader_of(store).remote, tmp_path / "again", until_ms=moment)
    assert done.next_offset == int(tier.log.segments[2].records["chunk_id"][3])
    found = await read_all(reader_of(MemoryStore(), tmp_path / "again"))
    assert found == expected(0, done.next_offset)


async def test_restore_of_a_stream_that_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await restore_stream(reader_of(MemoryStore()).remote, tmp_path / "again")
    assert files_in(tmp_path) == []


def test_names_inside_of_ids() -> None:
    assert short_name("__vary_1794776874866716458") == "vary"
    assert short_name("my-vhost_foo_1745253455243785338") == "foo"
    assert short_name("bloom16") == "bloom16"
    assert short_name("___late_1745253455243785338") == "_late"
    assert short_name("_prod_orders_eu_1745253455243785338") == "orders_eu"
    assert short_name("orders_1745253455243785338") == "orders"
    assert names_of("my_vhost_foo_1745253455243785338") >= {"my_vhost_foo"}
    assert KEYS.parse(KEYS.fragment(12)).offset == 12  # type: ignore[union-attr]
    assert KEYS.parse(f"{KEYS.prefix}data/12.fragment") is None
    assert KEYS.parse("rabbitmq/stream/other/data/x") is None


def test_uids_are_drawn_from_the_randomness_that_is_handed_in() -> None:
    data = b"group"
    assert fmt.make_uid(data, random.Random(1).getrandbits(14)) == fmt.make_uid(
        data, random.Random(1).getrandbits(14)
    )
