"""Tail caches: hits without a request, and nothing that the log would not say."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.log.hand_log import HandLog, numbered
from tests.log.writing import writer_of

from forebay.coordination import MemoryCoordinator
from forebay.errors import StorageDamaged, UsageError
from forebay.formats import bytes_batch, tail_file
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.encoded_batch import EncodedBatch
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import (
    AppendGroup,
    FetchedBatch,
    LogReader,
    LogWriter,
    MemoryTailCache,
    OffsetOutOfRange,
    ReadRequest,
    TailCache,
    UnknownTopic,
    log_identity,
)
from forebay.log._keys import CATALOG_PARTITION_KEY, IDENTITY_KEY
from forebay.log._tail_cache import TailCacheConfig
from forebay.log._tail_cache_files import FileTailCache
from forebay.log._trim import Trimmer
from forebay.storage import MemoryStore
from forebay.testing import Actor, Faults, World, run_seeds, seeds

LOG = "0123456789abcdef" * 2


class Clock(SystemClock):
    """A clock that can be set ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_ms(self) -> int:
        return super().now_ms() + int(self.ahead_s * 1000)

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


Make = Callable[..., TailCache]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "files"])
def make(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Make:
    def memory(**config: int) -> TailCache:
        return MemoryTailCache(clock, TailCacheConfig(**config))

    def files(**config: int) -> TailCache:
        return FileTailCache(tmp_path / "tail", clock, IdSource(), TailCacheConfig(**config), log=LOG)

    return memory if request.param == "memory" else files


def test_memory_is_counted_as_records_occupy_it_and_batches_become_columns_when_they_are_read() -> None:
    cache = MemoryTailCache(SystemClock(), TailCacheConfig(bytes_max=250_000))
    batches = [EncodedBatch(bytes_batch.encode([bytes(100_000)], codec="zstd"), 1) for _ in range(3)]
    for number, batch in enumerate(batches, 1):
        cache.committed("orders", 0, number, batch, 1_000)
    assert 200_000 <= cache.bytes <= 250_000
    assert read(cache, 1) is None
    assert [batch._columns is None for batch in batches] == [True, True, True]
    assert read(cache, 3) == [bytes(100_000)]
    assert [batch._columns is None for batch in batches] == [True, True, False]


def put(cache: TailCache, start: int, count: int, partition: int = 0) -> None:
    cache.committed("orders", partition, start, BytesBatch.of(numbered(start, count)), 1_000)


def read(cache: TailCache, offset: int, **bounds: int) -> list[bytes] | None:
    found = cache.read(ReadRequest("orders", 0, offset, **bounds), bounds.get("bytes_max", 1 << 20))
    return None if found is None else found.records()


def test_what_was_committed_is_found_by_offset(make: Make) -> None:
    cache = make()
    put(cache, 5, 3)
    put(cache, 8, 2)
    assert read(cache, 5) == numbered(5, 5)
    assert read(cache, 7) == numbered(7, 3)
    assert read(cache, 9, records_max=1) == numbered(9, 1)
    assert read(cache, 4) is None
    assert cache.known_next("orders", 0) == 10
    assert cache.known_next("orders", 1) is None


def test_a_hit_says_where_to_go_on(make: Make) -> None:
    cache = make()
    put(cache, 5, 3)
    cache.saw_control("orders", 0, 2, 8, asked_at=0.0)
    found = cache.read(ReadRequest("orders", 0, 6), 1 << 20)
    assert found is not None
    assert found.from_cache
    assert (found.next_offset, found.earliest, found.high_watermark) == (8, 2, 8)
    assert found.batches[0].time_ms == 1_000


def test_a_gap_is_a_miss_and_ends_a_hit(make: Make) -> None:
    cache = make()
    put(cache, 1, 3)
    put(cache, 6, 2)
    assert read(cache, 2) == numbered(2, 2)
    assert read(cache, 4) is None
    assert read(cache, 6) == numbered(6, 2)


def test_appends_may_arrive_in_any_order_and_twice(make: Make) -> None:
    cache = make()
    for start in (4, 1, 7, 4):
        put(cache, start, 3)
    assert read(cache, 1) == numbered(1, 9)


def test_the_oldest_are_evicted_within_the_bound(make: Make) -> None:
    cache = make(bytes_max=20_000)
    for start in range(1, 401, 2):
        put(cache, start, 2)
    assert read(cache, 1) is None
    assert read(cache, 399) == numbered(399, 2)
    put(cache, 1_000, 5_000)  # larger than everything: not kept
    assert read(cache, 1_000) is None


def test_batches_that_are_too_old_are_not_served(make: Make, clock: Clock) -> None:
    cache = make(age_max_ms=10_000)
    put(cache, 1, 2)
    clock.ahead_s = 11
    assert read(cache, 1) is None


def test_nothing_below_the_start_of_the_log_is_served(make: Make) -> None:
    cache = make()
    put(cache, 1, 3)
    put(cache, 4, 3)
    cache.saw_control("orders", 0, 5, 7, asked_at=0.0)
    assert read(cache, 4) is None
    assert read(cache, 5) == numbered(5, 2)
    cache.saw_control("orders", 0, 2, 7, asked_at=0.0)  # an older answer, arriving late
    assert read(cache, 4) is None


def test_a_shorter_log_than_what_was_committed_before_is_another_log(make: Make, clock: Clock) -> None:
    cache = make()
    put(cache, 1, 3)
    cache.saw_control("orders", 0, 1, 3, asked_at=clock.monotonic() - 5)  # asked before the append
    assert read(cache, 1) == numbered(1, 3)
    clock.ahead_s = 5
    cache.saw_control("orders", 0, 1, 2, asked_at=clock.monotonic())
    assert read(cache, 1) is None


def test_a_topic_that_is_forgotten_is_gone(make: Make) -> None:
    cache = make()
    put(cache, 1, 3)
    put(cache, 1, 3, partition=1)
    cache.forget("orders", 0)
    assert read(cache, 1) is None
    assert cache.read(ReadRequest("orders", 1, 1), 100) is not None
    cache.forget("orders")
    assert cache.read(ReadRequest("orders", 1, 1), 100) is None


def test_the_end_is_known_to_be_empty_only_while_that_is_trusted(make: Make, clock: Clock) -> None:
    strict = make()
    put(strict, 1, 3)
    assert read(strict, 4) is None
    trusting = make(empty_trust_ms=1_000)
    put(trusting, 1, 3)
    assert read(trusting, 4) == []
    assert read(trusting, 5) is None
    clock.ahead_s = 2
    assert read(trusting, 4) is None
    trusting.saw_control("orders", 0, 1, 4, asked_at=clock.monotonic())
    assert read(trusting, 4) == []


async def test_waiting_ends_with_the_next_append(make: Make) -> None:
    cache = make()
    put(cache, 1, 3)
    waiting = asyncio.create_task(cache.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    put(cache, 4, 3)
    await asyncio.wait_for(waiting, 30)


def test_configuration_outside_its_ranges_is_refused() -> None:
    for wrong in ({"bytes_max": 0}, {"age_max_ms": 0}, {"empty_trust_ms": -1}):
        with pytest.raises(UsageError):
            TailCacheConfig(**wrong)


# -- Files


def files_of(directory: Path) -> list[Path]:
    return sorted((directory / "tail" / LOG / "orders" / "0").glob("*.tail"))


def test_two_processes_share_what_one_of_them_wrote(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from forebay.formats.bytes_batch import BytesBatch\n"
        "from forebay.kit.clock import SystemClock\n"
        "from forebay.kit.ids import IdSource\n"
        "from forebay.log._tail_cache_files import FileTailCache\n"
        f"cache = FileTailCache(sys.argv[1], SystemClock(), IdSource(), log={LOG!r})\n"
        "cache.committed('orders', 0, 1, BytesBatch.of([b'1', b'2']), 1000)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "tail")], check=True, timeout=60)
    assert read(FileTailCache(tmp_path / "tail", SystemClock(), IdSource(), log=LOG), 1) == numbered(1, 2)


def test_a_trim_seen_by_one_process_is_respected_by_the_others(tmp_path: Path) -> None:
    writer, reader = (FileTailCache(tmp_path / "tail", SystemClock(), IdSource(), log=LOG) for _ in range(2))
    put(writer, 1, 4)
    writer.saw_control("orders", 0, 3, 5, asked_at=0.0)
    assert read(reader, 2) is None
    assert read(reader, 3) == numbered(3, 2)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign", "renamed"])
def test_a_torn_or_foreign_file_is_a_miss(tmp_path: Path, damage: str) -> None:
    cache = FileTailCache(tmp_path / "tail", SystemClock(), IdSource(), log=LOG)
    put(cache, 1, 3)
    [path] = files_of(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-5])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "foreign":
        header = tail_file.TailHeader(topic="other", partition=0, start_offset=1, msg_count=3, time_ms=1)
        path.write_bytes(tail_file.encode(header, BytesBatch.of([b"x", b"y", b"z"])))
    else:
        path.rename(path.with_name(f"{2:020d}-3.tail"))
    assert read(cache, 1) is None
    assert read(cache, 2) is None


def test_names_that_are_no_batches_are_ignored_and_drafts_are_swept(tmp_path: Path) -> None:
    clock = Clock()
    cache = FileTailCache(tmp_path / "tail", clock, IdSource(), log=LOG)
    put(cache, 1, 3)
    folder = tmp_path / "tail" / LOG / "orders" / "0"
    for name in ("x", "1-2", "1-x.tail", "00000000000000000001-0.tail", ".draft"):
        (folder / name).write_bytes(b"left behind")
    assert read(cache, 1) == numbered(1, 3)
    clock.ahead_s = 3_600
    assert cache.sweep() == 0
    assert list(folder.iterdir()) == []


def test_what_is_not_ours_in_the_directory_neither_stops_a_sweep_nor_a_forgetting(tmp_path: Path) -> None:
    cache = FileTailCache(tmp_path, SystemClock(), IdSource(), TailCacheConfig(bytes_max=1 << 20), log=LOG)
    put(cache, 1, 2)
    topic = tmp_path / LOG / "orders"
    foreign = [tmp_path / "README", topic / "notes", topic / "0" / "folder"]
    foreign[0].write_text("?")
    foreign[1].write_text("?")
    foreign[2].mkdir()
    (topic / "lost+found").mkdir()
    (tmp_path / "lost+found").mkdir()
    assert cache.sweep() > 0
    cache.forget("orders")
    assert read(cache, 1) is None and all(path.exists() for path in foreign)


def test_the_directory_stays_within_its_bound_also_with_files_smaller_than_a_block(tmp_path: Path) -> None:
    config = TailCacheConfig(bytes_max=64 * 4096)
    cache = FileTailCache(tmp_path / "tail", SystemClock(), IdSource(), config, log=LOG)
    for start in range(1, 1_001, 2):
        put(cache, start, 2)
    assert 60 <= len(files_of(tmp_path)) <= 64 * 17 // 16


def test_a_directory_shared_with_another_log_serves_nothing_of_it_and_stays_bounded(tmp_path: Path) -> None:
    config = TailCacheConfig(bytes_max=64 * 4096)
    names = "a" * 32, "b" * 32
    ours, theirs = (
        FileTailCache(tmp_path / "tail", SystemClock(), IdSource(), config, log=name) for name in names
    )
    for start in range(1, 201, 2):
        put(theirs, start, 2)
    assert read(ours, 199) is None and ours.known_next("orders", 0) is None
    for start in range(1, 201, 2):
        put(ours, start, 2)
    assert read(ours, 199) == numbered(199, 2)
    assert len(list((tmp_path / "tail").rglob("*.tail"))) <= 64 * 17 // 16


def test_files_from_before_the_clock_was_set_back_are_neither_served_nor_kept(tmp_path: Path) -> None:
    clock = Clock()
    cache = FileTailCache(tmp_path / "tail", clock, IdSource(), log=LOG)
    put(cache, 1, 3)
    assert read(cache, 1) == numbered(1, 3)
    clock.ahead_s = -3_600
    assert read(cache, 1) is None
    assert cache.sweep() == 0


async def test_a_log_has_one_name_and_a_log_made_anew_another() -> None:
    async def named(coordinator: MemoryCoordinator) -> str:
        parts = {"clock": SystemClock(), "ids": IdSource(), "randomness": random.Random(1)}
        return await log_identity(coordinator, **parts)  # type: ignore[arg-type]

    one, other = MemoryCoordinator(), MemoryCoordinator()
    assert len(set(await asyncio.gather(*(named(one) for _ in range(5))))) == 1
    assert await named(one) != await named(other)
    await other.put(IDENTITY_KEY, b"../../etc", partition_key=CATALOG_PARTITION_KEY)
    with pytest.raises(StorageDamaged):
        await named(other)


def test_the_name_of_a_log_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    for name in ("", "..", "a/b", "/etc"):
        with pytest.raises(UsageError):
            FileTailCache(tmp_path / "tail", SystemClock(), IdSource(), log=name)


def test_a_directory_that_cannot_be_written_does_not_fail_an_append(tmp_path: Path) -> None:
    cache = FileTailCache(tmp_path / "tail", SystemClock(), IdSource(), log=LOG)
    (tmp_path / "tail" / LOG / "orders").write_bytes(b"a file where a directory should be")
    put(cache, 1, 3)
    assert read(cache, 1) is None


def test_a_topic_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    cache = FileTailCache(tmp_path / "tail", SystemClock(), IdSource(), log=LOG)
    with pytest.raises(UsageError):
        cache.read(ReadRequest("../escape", 0, 1), 100)


# -- With a writer and a reader


def test_a_tail_read_that_hits_costs_no_request() -> None:
    async def main(world: World) -> None:
        async def work(me: Actor) -> None:
            cache = MemoryTailCache(me.clock)
            writer, reader = parts(me, cache)
            for number in range(5):
                await writer.append_shared([AppendGroup.of("orders", 0, [b"%d" % number, b"x"])])
            before = me.world.requests.count(me.name)
            fetched = await reader.read("orders", 0, 3)
            assert fetched.from_cache
            assert len(fetched) == 8
            ready = await reader.wait_for_data([("orders", 0, 3)], timeout_s=1)
            assert ready == [("orders", 0)]
            assert me.world.requests.count(me.name) == before
            assert not (await reader.read("orders", 0, 11)).from_cache  # the end is asked for

        await world.spawn("ann", work).join()

    World(seed=1).run(main)


def parts(me: Actor, cache: TailCache | None) -> tuple[LogWriter, LogReader]:
    writer = LogWriter(
        me.store, me.coordinator, clock=me.clock, ids=me.ids, randomness=me.random, tail_cache=cache
    )
    reader = LogReader(me.store, me.coordinator, clock=me.clock, randomness=me.random, tail_cache=cache)
    return writer, reader


async def test_cached_records_are_exactly_what_the_log_returns(make: Make) -> None:
    log = HandLog()
    cache = make()
    writer = LogWriter(
        log.store,
        log.coordinator,
        clock=SystemClock(),
        ids=IdSource(),
        randomness=random.Random(1),
        tail_cache=cache,
    )
    plain = AppendGroup.of("orders", 0, [b"a", b"b"], keys=[b"k", None], headers=[{"h": b"1"}, None])
    timed = AppendGroup.of("orders", 0, [b"c"], timestamps_ms=[5])
    await writer.append_shared([plain, plain])
    await writer.append_shared([timed])
    await writer.append_shared([plain, timed])  # Times are filled in where they are joined.
    await writer.append_shared([plain])
    found = await log.reader(cache=cache).read("orders", 0, 1)
    assert found.from_cache
    assert found.next_offset == 11
    direct = await log.reader().read("orders", 0, 1)
    assert not direct.from_cache
    assert _table(found.batches) == _table(direct.batches)


def _table(batches: list[FetchedBatch]) -> list[dict[str, object]]:
    return [row for batch in batches for row in batch.to_arrow().to_pylist()]


async def test_a_deleted_topic_is_not_served_once_the_deletion_was_seen(make: Make, clock: Clock) -> None:
    cache, store, coordinator = make(), MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    reader = LogReader(store, coordinator, clock=clock, randomness=random.Random(1), tail_cache=cache)
    await writer.append_shared([AppendGroup.of("orders", 0, numbered(1, 2))])
    put(cache, 1, 2)
    assert (await reader.read("orders", 0, 1)).from_cache
    await writer.catalog.delete("orders")
    for ask in (reader.offsets("orders", 0), reader.read("orders", 0, 3), reader.read("orders", 0, 1)):
        with pytest.raises(UnknownTopic):
            await ask


async def test_a_trimmed_record_is_not_served_once_the_trim_was_seen() -> None:
    log = HandLog()
    cache = MemoryTailCache(SystemClock())
    await log.append(numbered(1, 4))
    put(cache, 1, 4)
    reader = log.reader(cache=cache)
    assert (await reader.read("orders", 0, 2)).from_cache
    await log.trim(4)
    await reader.offsets("orders", 0)
    with pytest.raises(OffsetOutOfRange):
        await reader.read("orders", 0, 2)


async def test_a_long_poll_ends_with_an_append_of_the_same_process() -> None:
    log = HandLog()
    await log.append(numbered(1, 2))
    cache = MemoryTailCache(SystemClock())
    reader = log.reader(cache=cache)
    waiting = asyncio.create_task(reader.wait_for_data([("orders", 0, 3)], timeout_s=60))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    put(cache, 3, 1)  # told by the writer; the log itself has not moved in this test
    assert await waiting == [("orders", 0)]


async def write_and_read(me: Actor, seen: dict[int, set[bytes]], hits: list[str]) -> None:
    """Append, read a little through a cache of its own, and so on."""
    writer, reader = parts(me, MemoryTailCache(me.clock, TailCacheConfig(bytes_max=6_000)))
    offset = 1
    for number in range(12):
        group = AppendGroup.of("orders", 0, [b"%s/%d" % (me.name.encode(), number)] * 2)
        await writer.append_shared([group])
        try:
            fetched = await reader.read("orders", 0, offset, max_records=5)
        except OffsetOutOfRange as error:
            assert error.earliest > offset
            offset = error.earliest
            continue
        hits += [me.name] * fetched.from_cache
        for batch in fetched.batches:
            for place, value in enumerate(batch.batch.records(), batch.start_offset):
                seen.setdefault(place, set()).add(value)
        offset = fetched.next_offset


async def trim_now_and_then(me: Actor) -> None:
    trimmer = Trimmer(me.coordinator, clock=me.clock, randomness=me.random)
    for offset in (3, 7, 12):
        await me.clock.sleep(1.0)
        with contextlib.suppress(OffsetOutOfRange, UnknownTopic):
            await trimmer.trim("orders", 0, offset)


def test_readers_with_caches_agree_with_the_log_under_faults() -> None:
    """Two machines write one partition, each reads through its own cache; trims and lost replies between."""

    def scenario(seed: int) -> int:
        seen: dict[int, set[bytes]] = {}
        hits: list[str] = []

        async def main(world: World) -> None:
            world.inject(Faults.all(0.03), rotate_s=1.0)
            for name in ("ann", "bob"):
                world.spawn(name, write_and_read, seen, hits)
            world.spawn("eve", trim_now_and_then)
            await world.join()
            world.heal()
            await world.clock().sleep(120)
            log = HandLog(store=world.bucket, coordinator=world.keys)
            truth: dict[int, bytes] = {}
            async for batch in log.reader().scan_batches("orders", 0):
                truth |= dict(enumerate(batch.batch.records(), batch.start_offset))
            for offset, values in seen.items():
                assert len(values) == 1
                assert offset not in truth or values == {truth[offset]}, offset

        World(seed).run(main)
        return len(hits)

    assert sum(run_seeds(scenario, seeds(20))) > 0


def test_files_leave_no_descriptor_open(tmp_path: Path) -> None:
    cache = FileTailCache(tmp_path / "tail", SystemClock(), IdSource(), log=LOG)
    put(cache, 1, 3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        assert read(cache, 1)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
