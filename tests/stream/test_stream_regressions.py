"""One test for every fault that other implementations of stream tiering have had, named after it.

Each says which guard it stands for: without that guard it fails. The numbers are those of the issues in which
the fault was found, in the plugin that this remote format comes from.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.stream.logs import STREAM, HandClock, expected, read_all, reader_of, tier_of, write_log

from forebay.errors import NotFound, Unavailable
from forebay.formats import stream_fragment
from forebay.storage import ANY, MemoryStore
from forebay.storage._api import Buffer, DeleteResult, StoredObject, When
from forebay.stream import (
    BlockCache,
    Deposed,
    FragmentMissing,
    Overtaken,
    RetentionPolicy,
    Sidecar,
    Spec,
    StreamWriter,
    TierConfig,
    WriterConfig,
    collect,
    list_streams,
    verify_stream,
)
from forebay.stream._cutter import cuts
from forebay.stream._keys import StreamKeys
from forebay.stream._lookup import Lookup

KEYS = StreamKeys(STREAM)
PATIENCE_S = 60.0
"""After so long a test that waits for something says that it hangs."""
Hook = Callable[[str], Awaitable[None]]


class HookedStore(MemoryStore):
    """Tells of every request before it is done, and may be made to fail or wait there."""

    def __init__(self) -> None:
        super().__init__()
        self.on_put: Hook | None = None
        self.on_read: Hook | None = None
        self.ranges: list[tuple[str, int, int]] = []
        self.done: list[str] = []
        """Puts and deletes in order."""

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        if self.on_put is not None:
            await self.on_put(key)
        version = await super().put(key, data, when)
        self.done.append(f"put {key}")
        return version

    async def get(self, key: str) -> StoredObject:
        if self.on_read is not None:
            await self.on_read(key)
        return await super().get(key)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if self.on_read is not None:
            await self.on_read(key)
        self.ranges += [(key, start, length) for start, length in ranges]
        return await super().get_ranges(key, ranges)

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        self.done += [f"delete {key}" for key in keys]
        return await super().delete(keys)


async def keys_of(store: MemoryStore, suffix: str = "") -> list[str]:
    return [info.key async for info in store.list(KEYS.prefix) if info.key.endswith(suffix)]


async def tiered(path: Path, chunks: int = 20, **config: Any) -> tuple[HookedStore, Any]:
    write_log(path, chunks)
    store = HookedStore()
    tier = tier_of(path, store, config={"fragment_bytes": 1} | config)
    await tier.run_once()
    return store, tier


def remove_segments(path: Path, stop: int) -> None:
    for segment in sorted(path.glob("*.segment"))[:stop]:
        segment.unlink()
        segment.with_suffix(".index").unlink()


def firsts_of(path: Path) -> list[int]:
    return sorted(int(segment.stem) for segment in path.glob("*.segment"))


# Uploading and persisting.


async def test_11_the_first_upload_to_finish_is_not_the_first_fragment(tmp_path: Path) -> None:
    """Guard: results are applied in the order of the cuts, whatever finishes first."""
    write_log(tmp_path, 8)
    store, others = HookedStore(), asyncio.Event()

    async def first_waits(key: str) -> None:
        if key == KEYS.fragment(0):
            await others.wait()
        elif key.endswith(".fragment"):
            others.set()

    store.on_put = first_waits
    tier = tier_of(tmp_path, store, config={"fragment_bytes": 1})
    async with asyncio.timeout(PATIENCE_S):
        await tier.run_once()
    assert tier.remote.persisted.first_offset == 0
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)


async def test_20_a_restart_does_not_forget_finished_uploads(tmp_path: Path) -> None:
    """Guard: resolving follows the chain of trailers beyond the root."""
    store, tier = await tiered(tmp_path, 5)
    write_log(tmp_path, 10)

    async def no_root(key: str) -> None:
        if key.endswith(".manifest"):
            raise Unavailable("power cut")

    store.on_put = no_root
    with pytest.raises(Unavailable):
        await tier.run_once()
    store.on_put = None
    store.done.clear()
    again = tier_of(tmp_path, store, config={"fragment_bytes": 1})
    await again.run_once()
    assert [line for line in store.done if line.endswith(".fragment")] == []
    assert (again.progress.fragments, again.progress.roots) == (0, 1)
    assert again.remote.persisted.next_offset == again.log.next_offset


async def test_136_a_stream_whose_uploads_hang_holds_up_no_other(tmp_path: Path) -> None:
    """Guard: every stream of a sidecar has turns of its own."""
    clock, store, never = HandClock(), HookedStore(), asyncio.Event()
    for name in ("__a_1700000000000000001", "__b_1700000000000000002"):
        write_log(tmp_path / name, 10, clock=clock)

    async def hangs(key: str) -> None:
        if "__a_" in key:
            await never.wait()

    store.on_put = hangs
    config = TierConfig(fragment_bytes=1, fragment_age_ms=0, root_interval_ms=0, poll_interval_ms=10)
    sidecar = Sidecar(tmp_path, store, config=config, clock=clock, randomness=random.Random(1))

    def report(each: Sidecar) -> None:
        hung, other = each.tiers
        if other.remote.persisted.next_offset == other.log.next_offset > 0:
            assert hung.remote.persisted.next_offset == 0
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(PATIENCE_S):
            await sidecar.follow(report)


async def test_206_an_upload_that_fails_for_good_leaves_no_hole(tmp_path: Path) -> None:
    """Guard: nothing behind a fragment that is missing is persisted, and so nothing of it is trimmed."""
    clock, store = HandClock(), HookedStore()
    write_log(tmp_path, 20, clock=clock)
    hole = firsts_of(tmp_path)[1]

    async def fails(key: str) -> None:
        if key == KEYS.fragment(hole):
            raise Unavailable("not today")

    store.on_put = fails
    tier = tier_of(tmp_path, store, config={"fragment_bytes": 1, "changes_max": 1})
    with pytest.raises(Unavailable):
        await tier.run_once()
    assert tier.remote.persisted.next_offset <= hole
    with StreamWriter(tmp_path, epoch=1, clock=clock, config=WriterConfig(segment_chunks_max=5)) as writer:
        writer.trim(tier.remote.persisted.next_offset, RetentionPolicy(max_bytes=1))
    store.on_put = None
    await tier.run_once()
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)


async def test_225_a_segment_trimmed_under_an_upload_does_not_stall_the_tier(tmp_path: Path) -> None:
    """Guard: a file that is gone makes the tier look again, and declare what it lost."""
    write_log(tmp_path, 20)
    second = firsts_of(tmp_path)[1]
    store = HookedStore()

    async def trimmed(key: str) -> None:
        if key == KEYS.fragment(0):
            remove_segments(tmp_path, 2)

    store.on_put = trimmed
    tier = tier_of(tmp_path, store, config={"fragment_bytes": 10_000, "uploads_max": 1})
    async with asyncio.timeout(PATIENCE_S):
        await tier.run_once()
    assert tier.remote.gaps == ((second, tier.log.first_offset),)
    assert tier.remote.persisted.next_offset == tier.log.next_offset


async def test_uploads_before_the_first_root_are_found_again_where_the_log_lost_them(tmp_path: Path) -> None:
    """Guard: without any root, resolving begins with the first fragment in the bucket."""
    write_log(tmp_path, 20)
    store = HookedStore()

    async def no_root(key: str) -> None:
        if key.endswith(".manifest"):
            raise Unavailable("power cut")

    store.on_put = no_root
    with pytest.raises(Unavailable):
        await tier_of(tmp_path, store).run_once()
    store.on_put = None
    remove_segments(tmp_path, 2)
    tier = tier_of(tmp_path, store)
    await tier.run_once()
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)


async def test_a_first_upload_that_is_missing_is_made_up_for_before_what_follows_it(tmp_path: Path) -> None:
    """Guard: a chain that begins behind the local log is not taken as the beginning of the stream."""
    write_log(tmp_path, 20)
    store = HookedStore()

    async def not_the_first(key: str) -> None:
        if key.endswith(".manifest") or key == KEYS.fragment(0):
            raise Unavailable("power cut")

    store.on_put = not_the_first
    with pytest.raises(Unavailable):
        await tier_of(tmp_path, store).run_once()
    store.on_put = None
    tier = tier_of(tmp_path, store)
    await tier.run_once()
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)


async def test_243_fragments_that_come_while_a_root_is_written_get_into_the_next(tmp_path: Path) -> None:
    """Guard: a root takes only the fragments it holds off the list, and the rest is due again."""
    clock, store = HandClock(), HookedStore()
    write_log(tmp_path, 3, clock=clock)
    config = {"fragment_bytes": 1, "fragment_age_ms": 0, "root_interval_ms": 1000, "changes_max": 50}
    tier = tier_of(tmp_path, store, clock=clock, config=config)
    await tier.catch_up()
    write_log(tmp_path, 1, clock=clock)
    await tier.catch_up()
    roots = tier.progress.roots

    async def more(key: str) -> None:
        if key.endswith(".manifest"):
            store.on_put = None
            write_log(tmp_path, 2, clock=clock)
            tier.log.refresh()
            start = tier.remote.next_offset
            await tier._upload_batch(list(cuts(tier.log, start, target_bytes=1, before_ms=None)))

    store.on_put = more
    clock.ms += 1000
    await tier.catch_up()
    assert tier.progress.roots == roots + 1
    assert tier.remote.persisted.next_offset < tier.log.next_offset
    clock.ms += 1000
    await tier.catch_up()
    assert tier.progress.roots == roots + 2
    assert tier.remote.persisted.next_offset == tier.log.next_offset


async def test_a_result_that_is_replayed_or_out_of_sequence_is_refused(tmp_path: Path) -> None:
    """Guard: the manifest takes a fragment only where the one before it ends."""
    store, tier = await tiered(tmp_path, 5)
    write_log(tmp_path, 5)
    tier.log.refresh()
    tier.remote.persist = None
    found = list(cuts(tier.log, tier.remote.next_offset, target_bytes=1, before_ms=None))
    await tier._upload_batch(found[:3])
    first, second, third = tier.remote.pending
    for wrong in ([third], [first], [second, second]):
        tier.remote.pending = [first]
        with pytest.raises(ValueError, match="does not follow"):
            tier.remote.append(wrong)
    tier.remote.pending = [first]
    tier.remote.append([second, third])
    assert await keys_of(store, ".manifest") != []


async def test_a_root_written_by_an_older_epoch_is_never_swapped_in(tmp_path: Path) -> None:
    """Guard: the swap compares the version, and whoever lost against a higher epoch stands down."""
    write_log(tmp_path / "old", 10)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    write_log(tmp_path / "new", 5, epoch=2)
    store = HookedStore()
    new = tier_of(tmp_path / "new", store, epoch=2, config={"fragment_bytes": 1})

    async def overtaken(key: str) -> None:
        if key.endswith(".manifest"):
            store.on_put = None
            await new.run_once()

    store.on_put = overtaken
    with pytest.raises(Deposed):
        await tier_of(tmp_path / "old", store, epoch=1, config={"fragment_bytes": 1}).run_once()
    reader = reader_of(store)
    assert await read_all(reader) == expected(0, new.log.next_offset)
    assert reader.remote.held is not None
    assert reader.remote.held.head.epoch == 2


# Retention and deletion.


async def test_96_139_retention_needs_neither_a_roll_nor_new_data(tmp_path: Path) -> None:
    """Guard: every look at a stream without anything pending ends with retention."""
    clock, store = HandClock(), MemoryStore()
    write_log(tmp_path, 10, clock=clock, per_segment=1000, step_ms=100)
    config = {
        "fragment_bytes": 1,
        "fragment_age_ms": 0,
        "root_interval_ms": 0,
        "retention": RetentionPolicy(max_age_ms=5000),
    }
    tier = tier_of(tmp_path, store, clock=clock, config=config)
    await tier.catch_up()
    assert (tier.progress.fragments, tier.progress.removed) == (10, 0)
    clock.ms += 5000
    await tier.catch_up()
    assert tier.progress.removed == 9
    assert len(await keys_of(store, ".fragment")) == 1


async def test_166_nothing_is_deleted_before_the_record_drops_it(tmp_path: Path) -> None:
    """Guard: objects go after the swap of the record, fragments and groups and the root before alike."""
    store, tier = await tiered(tmp_path, 20, branching=2)
    store.done.clear()
    assert await tier.remote.retain(RetentionPolicy(max_bytes=300)) > 0
    swapped = store.done.index(f"put {KEYS.current}")
    deletes = [at for at, line in enumerate(store.done) if line.startswith("delete")]
    assert len(deletes) > 3
    assert min(deletes) > swapped


async def test_196_a_put_that_lands_after_the_deletion_is_collected(tmp_path: Path) -> None:
    """Guard: the tombstone stays, and collection takes everything beside it."""
    store, tier = await tiered(tmp_path, 10)
    late = {key: (await store.get(key)).data for key in await keys_of(store, ".fragment")}
    await tier.remote.delete_stream()
    for key, data in late.items():
        await store.put(key, data)
    found = await collect(reader_of(store).remote, now_ms=1 << 50, dry_run=False)
    assert found.removed == len(late)
    assert await keys_of(store) == [KEYS.current]


async def test_211_sizes_are_subtracted_once_however_often_retention_runs(tmp_path: Path) -> None:
    """Guard: what retention takes off the total is what it removed in this run, inside of groups as well."""
    store, tier = await tiered(tmp_path, 40, branching=2)
    for keep in (2000, 2000, 1500, 1499, 700, 1, 1):
        await tier.remote.retain(RetentionPolicy(max_bytes=keep))
        sizes = [
            stream_fragment.decode((await store.get(key)).data).trailer.data_bytes
            for key in await keys_of(store, ".fragment")
        ]
        assert tier.remote.persisted.total_bytes == sum(sizes)
        assert tier.remote.persisted.total_bytes <= max(keep, *sizes)


async def test_227_230_a_trimmed_log_costs_the_remote_tier_nothing(tmp_path: Path) -> None:
    """Guard: what the local log no longer has becomes a declared gap; the remote tier is never reset."""
    store, _ = await tiered(tmp_path, 10)
    before = await keys_of(store, ".fragment")
    write_log(tmp_path, 20)
    remove_segments(tmp_path, -1)
    for roots in (1, 0, 0):
        tier = tier_of(tmp_path, store, config={"fragment_bytes": 1})
        await tier.run_once()
        assert tier.progress.roots == roots
        assert len(tier.remote.gaps) == 1
        assert set(before) <= set(await keys_of(store, ".fragment"))
    reader = reader_of(store)
    with pytest.raises(Overtaken) as told:
        await read_all(reader)
    assert await read_all(reader, told.value.resume_offset) != []


async def test_a_stream_whose_id_begins_with_that_of_another_is_left_alone(tmp_path: Path) -> None:
    """Guard: every prefix ends with a slash."""
    store = HookedStore()
    write_log(tmp_path, 6)
    longer = f"{STREAM}1"
    tiers = {name: tier_of(tmp_path, store, stream=name) for name in (STREAM, longer)}
    for tier in tiers.values():
        await tier.run_once()
    kept = [info.key async for info in store.list(StreamKeys(longer).prefix)]
    assert await list_streams(tiers[STREAM].remote.calls) == sorted([STREAM, longer])
    await collect(reader_of(store).remote, now_ms=1 << 50, grace_ms=0, dry_run=False)
    await tiers[STREAM].remote.delete_stream()
    assert [info.key async for info in store.list(StreamKeys(longer).prefix)] == kept


async def test_222_a_stream_that_was_made_anew_has_no_stale_member(tmp_path: Path) -> None:
    """Guard: a sidecar lets go of directories that are gone, turns under way included."""
    clock, store = HandClock(), MemoryStore()
    old, new = tmp_path / "__s_1700000000000000001", tmp_path / "__s_1700000000000000002"
    write_log(old, 5, clock=clock)
    sidecar = Sidecar(tmp_path, store, clock=clock, randomness=random.Random(1))
    await sidecar.run_once()
    shutil.rmtree(old)
    write_log(new, 5, clock=clock, tag="n")
    await sidecar.run_once()
    assert [tier.stream for tier in sidecar.tiers] == [new.name]
    assert sidecar.errors == {}
    assert await list_streams(reader_of(store).remote.calls) == [old.name, new.name]


# Reading.


async def test_77_213_timestamps_are_found_as_in_a_log_that_is_all_local(tmp_path: Path) -> None:
    """Guard: the first entry whose last timestamp is at or after the moment, at every level."""
    clock = HandClock()
    moments = [1000, 1000, 1005, 1005, 1005, 1005, 1005, 1040, 1040, 1041, 1090, 1090]
    with StreamWriter(tmp_path, epoch=1, clock=clock, config=WriterConfig(segment_chunks_max=3)) as writer:
        for clock.ms in moments:
            writer.append([b"x"])
        writer.commit()
    for branching in (2, 1024):
        for size in (1, 130):
            store = MemoryStore()
            config = {"fragment_bytes": size, "branching": branching}
            await tier_of(tmp_path, store, config=config).run_once()
            reader = reader_of(store)
            for at in range(990, 1100):
                wanted = next((n for n, moment in enumerate(moments) if moment >= at), len(moments))
                assert await reader.attach(Spec("timestamp", at)) == wanted, (at, branching, size)


async def test_105_106_a_reader_enters_the_next_fragment_at_its_first_chunk(tmp_path: Path) -> None:
    """Guard: only the fragment that a reader attaches in is entered in the middle."""
    store, tier = await tiered(tmp_path, 20, fragment_bytes=300)
    end = tier.log.next_offset
    for offset in range(end):
        reader = reader_of(store)
        first = await reader.attach(Spec("offset", offset))
        assert await read_all(reader, first) == expected(first, end)


async def test_114_a_local_segment_that_vanishes_is_read_on_from_the_bucket(tmp_path: Path) -> None:
    """Guard: a file that is gone makes the reader ask again which tier has the place."""
    store, tier = await tiered(tmp_path, 30)
    reader = reader_of(store, tmp_path)
    found = []
    async for chunk in reader.chunks(Spec("first")):
        found.append(chunk.header.chunk_id)
        if len(found) == 2:
            remove_segments(tmp_path, 4)
    assert found == [ref.offset async for ref in _refs(store)]
    assert tier.log.next_offset > found[-1]


async def _refs(store: MemoryStore) -> Any:
    reader = reader_of(store)
    await reader.refresh()
    async for ref in Lookup(reader.remote.nodes, reader.remote.fragments).from_offset(
        reader.remote.manifest, 0
    ):
        yield ref


async def test_173_a_fragment_that_is_not_found_is_never_skipped(tmp_path: Path) -> None:
    """Guard: an object that the newest root still names is waited for, and then an error."""
    store, tier = await tiered(tmp_path, 20)
    key = (await keys_of(store, ".fragment"))[7]
    misses = 5

    async def missing(asked: str) -> None:
        nonlocal misses
        if asked == key and misses:
            misses -= 1
            raise NotFound(asked)

    store.on_read = missing
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)
    assert misses == 0
    misses = 1 << 30
    reader = reader_of(store)
    delivered = 0
    with pytest.raises(FragmentMissing) as told:
        async for _ in reader.chunks(Spec("first")):
            delivered += 1
    assert told.value.offset == int(key[-29:-9])
    assert delivered == 7


async def test_203_requests_that_are_never_answered_do_not_stall_a_reader(tmp_path: Path) -> None:
    """Guard: every attempt has a deadline; a cache full of requests under way empties by itself."""
    store, tier = await tiered(tmp_path, 20)
    never, seen = asyncio.Event(), set[str]()

    async def first_hangs(key: str) -> None:
        if key not in seen:
            seen.add(key)
            await never.wait()

    store.on_read = first_hangs
    reader = reader_of(store, cache=BlockCache(500), config={"request_timeout_ms": 5, "ahead_bytes": 400})
    async with asyncio.timeout(PATIENCE_S):
        assert await read_all(reader) == expected(0, tier.log.next_offset)


async def test_209_every_seek_inside_of_groups_gives_each_fragment_once(tmp_path: Path) -> None:
    """Guard: each level is entered at the child that holds the place, and the next ones at their first."""
    store, tier = await tiered(tmp_path, 40, branching=2)
    await tier.remote.retain(RetentionPolicy(max_bytes=1700))
    left = [int(key[-29:-9]) for key in await keys_of(store, ".fragment")]
    reader = reader_of(store)
    await reader.refresh()
    lookup = Lookup(reader.remote.nodes, reader.remote.fragments)
    for offset in range(tier.log.next_offset):
        found = [ref.offset async for ref in lookup.from_offset(reader.remote.manifest, offset)]
        start = max([at for at in left if at <= offset], default=left[0])
        assert found == [at for at in left if at >= start]


async def test_224_a_group_that_cannot_be_read_is_an_error_and_not_the_local_tier(tmp_path: Path) -> None:
    """Guard: a failed request is repeated and then raised; it never decides which tier has the data."""
    store, tier = await tiered(tmp_path, 40, branching=2)
    remove_segments(tmp_path, -1)
    failures = 2

    async def fails(key: str) -> None:
        nonlocal failures
        if "group" in key and failures:
            failures -= 1
            raise Unavailable("slow down")

    store.on_read = fails
    assert await read_all(reader_of(store, tmp_path)) == expected(0, tier.log.next_offset)
    failures = 1 << 30
    with pytest.raises(Unavailable):
        await read_all(reader_of(store, tmp_path))
    with pytest.raises(Unavailable):
        await reader_of(store, tmp_path).attach(Spec("offset", 3))


async def test_262_a_bucket_ahead_of_the_local_log_ends_in_no_loop(tmp_path: Path) -> None:
    """Guard: behind the local end a reader goes on in the bucket, and a tier has nothing to do."""
    write_log(tmp_path / "log", 10)
    shutil.copytree(tmp_path / "log", tmp_path / "behind")
    write_log(tmp_path / "log", 10)
    store = MemoryStore()
    ahead = tier_of(tmp_path / "log", store)
    await ahead.run_once()
    async with asyncio.timeout(PATIENCE_S):
        found = await read_all(reader_of(store, tmp_path / "behind"))
        behind = tier_of(tmp_path / "behind", store)
        await behind.run_once()
    assert found == expected(0, ahead.log.next_offset)
    assert (behind.progress.fragments, behind.progress.roots) == (0, 0)


async def test_no_read_goes_past_the_chunks_of_a_fragment_into_its_index(tmp_path: Path) -> None:
    """Guard: the last block of a fragment ends with its last chunk."""
    store, tier = await tiered(tmp_path, 30, fragment_bytes=300)
    store.ranges.clear()
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)
    ends = {}
    for key in await keys_of(store, ".fragment"):
        ends[key] = 8 + stream_fragment.decode((await store.get(key)).data).trailer.data_bytes
    assert store.ranges
    assert all(start + length <= ends[key] for key, start, length in store.ranges)
    assert (await verify_stream(reader_of(store).remote)).ok
