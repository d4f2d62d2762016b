"""Reading by time, repair, and segments in a bucket."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import NotFound, OutcomeUnknown, Unavailable, UsageError
from forebay.quiver import (
    DirectoryInUse,
    DirectoryView,
    Forwarder,
    LocalDisk,
    Quiver,
    QuiverConfig,
    QuiverCore,
    Selection,
    UnknownSubscriber,
    _inspect,
    read_forwarded,
    repair,
)
from forebay.quiver._recovery import Recovered, recover
from forebay.storage import LocalStore, MemoryStore
from forebay.testing.world import World

BIG = dataclasses.replace(
    SMALL,
    segment_bytes=1 << 20,
    segment_open_ms=86_400_000,
    wal_bytes_max=1 << 22,
    wal_file_bytes=1 << 20,
    size_cap_bytes=1 << 26,
)


async def fill(path: Path, count: int = 6, rows: int = 3_000) -> None:
    """One segment with `count` parts: batches of this size are left alone."""
    async with Quiver(path, BIG) as quiver:
        await quiver.register("a")
        for number in range(count):
            plain = batch(number, rows).drop_columns(["word"])
            await quiver.ingest(plain)
        await quiver.flush()


def flip(path: Path, offset: int) -> None:
    path.chmod(0o640)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# A look from outside.


async def test_store_in_use_is_looked_at_again_before_it_is_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Quiver(tmp_path / "q", BIG) as quiver:
        await quiver.register("a")
        for number in range(3):
            await quiver.ingest(batch(number))
            await quiver.flush()
        delivery = await quiver.next("a", 0)
        assert delivery is not None
        looks = 0

        def look(disk: LocalDisk, *, read_only: bool) -> Recovered:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise FileNotFoundError
            found = recover(disk, read_only=read_only)
            if looks == 2:
                found.report.segments_lost = [1]
            return found

        monkeypatch.setattr(_inspect, "recover", look)
        view = DirectoryView.read(tmp_path / "q")
        assert looks == 3
        assert view.verify() == []
        # Gone between the look and the reading of its data.
        await delivery.ack()
        await quiver.maintain()
        assert view.verify() == []
        assert [row["number"] for row in view.last_rows(25)] == [1] * 10 + [2] * 10


async def test_damage_is_told_although_every_look_finds_it(tmp_path: Path) -> None:
    await fill(tmp_path / "q")
    [name] = (tmp_path / "q" / "segments").iterdir()
    flip(name, name.stat().st_size - 20)
    assert DirectoryView.read(tmp_path / "q").verify()


async def test_root_of_several_cores_says_where_to_look(tmp_path: Path) -> None:
    async with QuiverCore(tmp_path / "q", 0, 2, QuiverConfig()):
        with pytest.raises(NotFound) as caught:
            DirectoryView.read(tmp_path / "q")
    assert "core_0" in caught.value.hint


# Reading by time.


def test_segments_that_cannot_match_are_not_read_and_rows_that_do_not_are_left_out() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        clock = world.clock()
        async with store(world, disk, dataclasses.replace(SMALL, segment_open_ms=86_400_000)) as quiver:
            times = []
            for number in range(6):
                times.append(clock.now_ms())
                await quiver.ingest(batch(number), signal="logs" if number % 2 else "traces")
                await clock.sleep(1)
                if number % 2:
                    await quiver.flush()
            reads = len([line for line in disk.history if line.startswith("read segments/")])
            wanted = Selection(event_ns=(3_002, 3_004))
            views = [view async for view in quiver.read(wanted)]
            assert [view.meta.signal for view in views] == ["logs"]
            assert wanted.rows(views[0])["timestamp"].to_pylist() == [3_002, 3_003, 3_004]
            assert len([line for line in disk.history if line.startswith("read segments/")]) == reads + 1
            wanted = Selection(ingested_ms=(times[2], times[3]))
            found = [wanted.rows(view)["number"].to_pylist() async for view in quiver.read(wanted)]
            assert sorted(each[0] for each in found) == [2, 3]
            assert [view async for view in quiver.read(Selection(event_ns=(None, -1)))] == []
            assert [view async for view in quiver.read(Selection(event_ns=(6_000, None)))] == []
            traces = [view.meta.signal async for view in quiver.read(Selection(signal="traces"))]
            assert traces == ["traces"] * 3
            assert len([view async for view in quiver.read()]) == 6

    simulate(scenario)


def test_rows_of_one_segment_are_chosen_by_the_time_of_their_batch() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        clock = world.clock()
        async with store(world, disk, BIG) as quiver:
            times = []
            for number in range(5):
                times.append(clock.now_ms())
                await quiver.ingest(batch(number, rows=number + 1))
                await clock.sleep(1)
            await quiver.flush()
            wanted = Selection(ingested_ms=(times[1], times[2]))
            [view] = [view async for view in quiver.read(wanted)]
            assert wanted.rows(view)["number"].to_pylist() == [1, 1, 2, 2, 2]

    simulate(scenario)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
async def test_event_times_of_every_unit_are_nanoseconds(tmp_path: Path, unit: str) -> None:
    times = pa.array([1, 2, 3], pa.timestamp(unit))
    scale = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[unit]
    async with Quiver(tmp_path / "q") as quiver:
        await quiver.ingest(pa.record_batch({"timestamp": times, "n": [1, 2, 3]}))
        await quiver.flush()
        wanted = Selection(event_ns=(2 * scale, 2 * scale))
        [view] = [view async for view in quiver.read(wanted)]
        assert wanted.rows(view)["n"].to_pylist() == [2]


def test_range_with_its_ends_the_wrong_way_round_is_refused() -> None:
    with pytest.raises(UsageError):
        Selection(event_ns=(2, 1))


# Repair.


async def test_repair_takes_bad_parts_out_and_keeps_the_rest(tmp_path: Path) -> None:
    await fill(tmp_path / "q")
    file = tmp_path / "q" / "segments" / "0000000000000001.arrow"
    parts = DirectoryView.read(tmp_path / "q").view(1).meta.parts
    assert len(parts) == 6
    flip(file, parts[2].offset + parts[2].length // 2)
    assert len(DirectoryView.read(tmp_path / "q").verify()) == 1
    done = await repair(tmp_path / "q")
    assert (done.rewritten, done.put_aside, done.rows_lost) == ([1], [], 3_000)
    assert DirectoryView.read(tmp_path / "q").verify() == []
    view = DirectoryView.read(tmp_path / "q").view(1)
    assert [each.rows for each in view.meta.sources] == [3_000, 3_000, 0, 3_000, 3_000, 3_000]
    assert len(list((tmp_path / "q" / "quarantine").iterdir())) == 1
    again = await repair(tmp_path / "q")
    assert (again.rewritten, again.rows_lost) == ([], 0)
    async with Quiver(tmp_path / "q", BIG) as quiver:
        assert quiver.report.is_clean
        assert await drain(quiver, "a", timeout_s=0.1) == [0, 1, 3, 4, 5]


async def test_repair_puts_a_segment_aside_of_which_nothing_is_left(tmp_path: Path) -> None:
    async with Quiver(tmp_path / "q", BIG) as quiver:
        await quiver.register("a")
        for number in range(2):
            await quiver.ingest(batch(number))
            await quiver.flush()
    flip(tmp_path / "q" / "segments" / "0000000000000001.arrow", 300)
    done = await repair(tmp_path / "q")
    assert (done.rewritten, done.put_aside) == ([], [1])
    async with Quiver(tmp_path / "q", BIG) as quiver:
        assert await drain(quiver, "a", timeout_s=0.1) == [1]
        assert quiver.stats().subscribers[0].dropped == {"lost": 1}


async def test_one_repair_is_enough_for_damaged_acknowledgements(tmp_path: Path) -> None:
    async with Quiver(tmp_path / "q", BIG) as quiver:
        await quiver.register("a")
        for number in range(3):
            await quiver.ingest(batch(number))
            await quiver.flush()
        await drain(quiver, "a", timeout_s=0.1)
        shutil.copytree(tmp_path / "q", tmp_path / "killed")
    log = max((tmp_path / "killed" / "ack").glob("*.log"))
    flip(log, 60)
    assert DirectoryView.read(tmp_path / "killed").verify() == ["1 damaged ranges in the logs"]
    assert (await repair(tmp_path / "killed")).report.damaged_ranges == 1
    assert DirectoryView.read(tmp_path / "killed").verify() == []


@pytest.mark.parametrize("place", [300, -3])
async def test_damaged_dead_letters_are_found_and_put_aside(tmp_path: Path, place: int) -> None:
    await fill(tmp_path / "q", 2, rows=100)
    async with Quiver(tmp_path / "q", BIG) as quiver:
        delivery = await quiver.next("a")
        assert delivery is not None
        await delivery.reject()
    [letter] = (tmp_path / "q" / "dead").iterdir()
    assert DirectoryView.read(tmp_path / "q").verify() == []
    flip(letter, place)
    [problem] = DirectoryView.read(tmp_path / "q").verify()
    assert problem.startswith(f"dead letter {letter.name}: ")
    await repair(tmp_path / "q")
    assert DirectoryView.read(tmp_path / "q").verify() == []
    assert (tmp_path / "q" / "quarantine" / f"dead-{letter.name}").is_file()


async def test_repair_removes_a_subscriber_that_nobody_serves(tmp_path: Path) -> None:
    await fill(tmp_path / "q", 1)
    with pytest.raises(UnknownSubscriber, match="subscriber nobody") as caught:
        await repair(tmp_path / "q", unregister=["nobody"])
    assert caught.value.hint == "there is a"
    assert (await repair(tmp_path / "q", unregister=["a"])).unregistered == ["a"]
    async with Quiver(tmp_path / "q", BIG) as quiver:
        assert quiver.stats().subscribers == []


async def test_repair_keeps_what_was_put_aside_whatever_the_default_bound_is(tmp_path: Path) -> None:
    await fill(tmp_path / "q")
    aside = tmp_path / "q" / "quarantine" / "wal-0000000000000001-40.bin"
    with aside.open("wb") as file:
        file.truncate(QuiverConfig().dead_letter_bytes_max + 1)
    await repair(tmp_path / "q")
    assert aside.exists()


async def test_repair_is_refused_while_the_store_is_open_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await repair(tmp_path)
    async with Quiver(tmp_path / "q", BIG):
        with pytest.raises(DirectoryInUse):
            await repair(tmp_path / "q")


# Forwarding.


async def test_forwarded_segments_are_read_by_arrow_and_duckdb(tmp_path: Path) -> None:
    bucket = LocalStore(tmp_path / "bucket")
    async with Quiver(tmp_path / "q", BIG) as quiver:
        sender = Forwarder(quiver, bucket, source="edge1")
        await sender.register()
        for number in range(4):
            await quiver.ingest(batch(number), signal="traces" if number % 2 else "logs")
            await quiver.flush()
        done = await sender.run(0)
        assert (done.segments, done.rows, done.failures) == (4, 40, 0)
        await quiver.maintain()
        assert quiver.stats().segments == 0
    where = str(tmp_path / "bucket" / "quiver")
    table = pyarrow.dataset.dataset(where, format="ipc", partitioning="hive").to_table()
    assert sorted(set(table["number"].to_pylist())) == [0, 1, 2, 3]
    assert set(table["signal"].to_pylist()) == {"logs", "traces"}
    with duckdb.connect() as database:
        database.register("forwarded", pyarrow.dataset.dataset(where, format="ipc", partitioning="hive"))
        found = database.execute("select signal, count(*) from forwarded group by 1 order by 1").fetchall()
    assert found == [("logs", 20), ("traces", 20)]
    wanted = Selection(event_ns=(1_000, 1_001))
    views = [view async for view in read_forwarded(bucket, selection=wanted)]
    assert [wanted.rows(view)["timestamp"].to_pylist() for view in views] == [[1_000, 1_001]]
    late = Selection(ingested_ms=(4_000_000_000_000, None))
    assert [view async for view in read_forwarded(bucket, selection=late)] == []


async def test_forwarded_parquet_is_read_by_duckdb_as_it_lies(tmp_path: Path) -> None:
    bucket = LocalStore(tmp_path / "bucket")
    async with Quiver(tmp_path / "q", BIG) as quiver:
        sender = Forwarder(quiver, bucket, source="edge1", file_format="parquet")
        await sender.register()
        for number in range(3):
            await quiver.ingest(batch(number), signal="logs")
        await quiver.flush()
        await sender.run(0)
    pattern = tmp_path / "bucket" / "quiver" / "*" / "*" / "*.parquet"
    with duckdb.connect() as database:
        found = database.execute(
            "select signal, count(*), count(distinct number) from read_parquet(?, hive_partitioning = true)"
            " group by signal",
            [str(pattern)],
        ).fetchall()
    assert found == [("logs", 30, 3)]


async def test_segment_that_parquet_cannot_hold_keeps_no_other_from_being_forwarded(tmp_path: Path) -> None:
    children = [pa.array([1]), pa.array(["x"])]
    union = pa.UnionArray.from_dense(pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), children)
    bucket = MemoryStore()
    async with Quiver(tmp_path / "q", BIG) as quiver:
        for each in (pa.record_batch({"u": union}), batch(1)):
            await quiver.ingest(each)
            await quiver.flush()
        sender = Forwarder(quiver, bucket, source="edge", file_format="parquet")
        await sender.register()
        done = await sender.run(timeout_s=0)
        assert (done.segments, done.failures) == (1, 1)
        assert done.problem.startswith("segment 1: ")
        assert "union" in done.problem
        assert quiver.stats().subscribers[0].lag_segments == 1, "it waits for whoever can take it"


async def test_segment_forwarded_twice_is_one_object(tmp_path: Path) -> None:
    bucket = MemoryStore()
    async with Quiver(tmp_path / "q", BIG) as quiver:
        await quiver.register("one")
        await quiver.register("two")
        await quiver.ingest(batch(1), signal="käse/1")
        await quiver.flush()
        for name in ("one", "two"):
            done = await Forwarder(quiver, bucket, source="edge1", subscriber=name).run(0)
            assert done.segments == 1
    assert len([info async for info in bucket.list()]) == 1
    assert [numbers_of(view.table()) async for view in read_forwarded(bucket)] == [[1]]


def numbers_of(table: pa.Table) -> list[int]:
    return sorted(set(table["number"].to_pylist()))


async def test_damaged_parts_are_not_forwarded_and_the_object_is_whole(tmp_path: Path) -> None:
    bucket = MemoryStore()
    await fill(tmp_path / "q")
    part = DirectoryView.read(tmp_path / "q").view(1).meta.parts[3]
    flip(tmp_path / "q" / "segments" / "0000000000000001.arrow", part.offset + 200)
    async with Quiver(tmp_path / "q", BIG) as quiver:
        await Forwarder(quiver, bucket, source="edge1", subscriber="a").run(0)
    [view] = [view async for view in read_forwarded(bucket)]
    assert view.bad_parts == []
    assert numbers_of(view.table()) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("wrong", [{"source": "a-b"}, {"source": ""}, {"source": "a", "file_format": "csv"}])
async def test_forwarder_refuses_what_would_make_bad_names(tmp_path: Path, wrong: dict[str, str]) -> None:
    async with Quiver(tmp_path / "q", BIG) as quiver:
        with pytest.raises(UsageError):
            Forwarder(quiver, MemoryStore(), **wrong)  # type: ignore[arg-type]


class Failing(MemoryStore):
    """Fails every other put, some of them after they were done."""

    def __init__(self) -> None:
        super().__init__()
        self.puts = 0

    async def put(self, key: str, data: object, when: object = None) -> str:
        self.puts += 1
        if self.puts % 4 == 1:
            raise Unavailable("no", hint="later")
        version = await super().put(key, data, when)  # type: ignore[arg-type]
        if self.puts % 4 == 2:
            raise OutcomeUnknown("a put", reason="the answer was lost")
        return version


def test_failed_uploads_are_tried_again_until_every_segment_is_there_once() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        bucket = Failing()
        async with store(world, disk) as quiver:
            sender = Forwarder(quiver, bucket, source="edge1")
            await sender.register()
            for number in range(12):
                await quiver.ingest(batch(number))
                await quiver.flush()
            done = await sender.run(5)
            assert done.segments == 12
            assert done.failures > 0
        found = [numbers_of(view.table())[0] async for view in read_forwarded(bucket)]
        assert sorted(found) == list(range(12))

    simulate(scenario)
