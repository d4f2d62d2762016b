from __future__ import annotations

import contextlib
import dataclasses
import errno
from typing import Any

import pyarrow as pa
import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import ForebayError, LimitExceeded, UsageError
from forebay.formats.quiver_wal import SCHEMA_BYTES_MAX
from forebay.quiver import QuiverFull, _newcomers, _segment_file
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000)


@pytest.mark.parametrize(
    "named",
    [
        {"context": {"tenant": 1}},
        {"context": {"tenant": None}},
        {"context": {1: "tenant"}},
        {"context": {"tenant": "\ud800"}},
        {"context": ["tenant"]},
        {"signal": None},
        {"signal": "\ud800"},
    ],
)
def test_what_a_replay_could_not_read_is_refused(named: dict[str, Any]) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            with pytest.raises(UsageError):
                await quiver.ingest(batch(0), **named)
            await quiver.ingest(batch(1), context={"tenant": "x"})
            crashed = disk.after_crash(power_loss=True)
        async with store(world, crashed, SLOW) as quiver:
            assert quiver.report.is_clean
            await quiver.flush()
            assert await drain(quiver, "a") == [1]

    simulate(scenario)


@pytest.mark.parametrize("wrong", [pa.table({"a": [1]}), {"a": [1]}, None])
def test_what_is_no_record_batch_is_refused(wrong: Any) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            with pytest.raises(UsageError, match="no record batch"):
                await quiver.ingest(wrong)

    simulate(scenario)


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("value", [2**62, -(2**62)])
def test_event_time_beyond_nanoseconds_has_no_range_and_stops_nothing(unit: str, value: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            far = pa.record_batch({"timestamp": pa.array([value], pa.timestamp(unit))})
            await quiver.ingest(far)
            await quiver.flush()
            delivery = await quiver.next("a", 1)
            assert delivery is not None
            assert delivery.view.meta.event_ns is None
            assert delivery.view.table()["timestamp"].cast(pa.int64()).to_pylist() == [value]

    simulate(scenario)


def test_error_of_any_kind_in_the_writing_of_a_segment_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described, failures = _segment_file._described, [OverflowError("too large")]

    def flaky(*given: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return described(*given, **named)

    monkeypatch.setattr(_segment_file, "_described", flaky)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(1))
            assert await drain(quiver, "a", timeout_s=5) == [1]
            assert failures == []

    simulate(scenario)


def test_batch_that_cannot_be_written_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    described = _segment_file._described
    poison = {13, 14, 40}

    def picky(batches: list[_segment_file.Batch], *given: Any) -> Any:
        if poison & {number for each in batches for number in each.batch["number"].to_pylist()}:
            raise IndexError("a bug")
        return described(batches, *given)

    monkeypatch.setattr(_segment_file, "_described", picky)

    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SLOW, segment_bytes=1 << 20, size_cap_bytes=1 << 23)
        quiver = await store(world, disk, config).open()
        await quiver.register("a")
        for number in range(50):
            await quiver.ingest(batch(number))
        with pytest.raises(ForebayError, match="a bug"):
            await quiver.flush()
        wanted = [each for each in range(50) if each not in poison]
        assert sorted(await drain(quiver, "a", timeout_s=2)) == wanted
        await quiver.ingest(batch(50))
        poison.clear()
        await world.clock().sleep(1)
        await quiver.flush()
        assert sorted(await drain(quiver, "a", timeout_s=2)) == [13, 14, 40, 50]
        await quiver.close()
        assert disk.files("segments/") == {}

    simulate(scenario)


def test_subscribers_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_newcomers, "SUBSCRIBERS_MAX", 2)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            for name in ("a", "b", "a"):
                await quiver.register(name)
            with pytest.raises(LimitExceeded):
                await quiver.register("c")
            await quiver.unregister("a")
            await quiver.register("c")

    simulate(scenario)


def test_schemas_that_differ_in_the_metadata_of_a_column_are_kept_apart() -> None:
    def tagged(tag: str) -> pa.RecordBatch:
        field = pa.field("a", pa.int64(), metadata={"tag": tag})
        return pa.record_batch([pa.array([1])], schema=pa.schema([field]))

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            for tag in ("x", "y", "x"):
                await quiver.ingest(tagged(tag))
            crashed = disk.after_crash(power_loss=True)
        async with store(world, crashed, SLOW) as quiver:
            await quiver.flush()
            found = {}
            while (delivery := await quiver.next("a", 1)) is not None:
                found[delivery.view.schema.field("a").metadata[b"tag"]] = delivery.view.meta.rows
                await delivery.ack()
            assert found == {b"x": 2, b"y": 1}

    simulate(scenario)


def dictionary(values: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), values)


WORDS = pa.array(["a", "b", "a"]).dictionary_encode()
COLUMNS = {
    "nulls": pa.nulls(3),
    "dictionary without values": pa.DictionaryArray.from_arrays(pa.array([None] * 3, pa.int8()), pa.nulls(0)),
    "dictionary with a null value": dictionary(pa.array(["a", None])),
    "dictionary with a value twice": dictionary(pa.array(["a", "a"])),
    "dictionary of lists": dictionary(pa.array([["a"], ["b"]])),
    "dictionary of structs": dictionary(pa.array([{"a": 1}, {"a": 2}])),
    "list of dictionary": pa.ListArray.from_arrays([0, 1, 2, 3], WORDS),
    "struct of dictionary": pa.StructArray.from_arrays([WORDS], ["word"]),
    "map": pa.array([[("a", 1)], [], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
    "sparse union": pa.UnionArray.from_sparse(
        pa.array([0, 1, 0], pa.int8()), [pa.array([1, 2, 3]), pa.array(["x", "y", "z"])]
    ),
    "run ends": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["x", "y"])),
    "views": pa.array(["a", "b" * 40, "c"], pa.string_view()),
    "slice": pa.array([str(each) for each in range(100)]).dictionary_encode()[50:53],
}


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("name", COLUMNS)
def test_batches_of_every_type_become_segments_also_empty_ones(name: str, codec: str) -> None:
    whole = pa.record_batch({"column": COLUMNS[name]})
    config = dataclasses.replace(SLOW, segment_codec=codec, wal_codec=codec)

    async def scenario(world: World, disk: SimDisk) -> None:
        for batches in ([whole.slice(0, 0)], [whole.slice(0, 0)] * 3, [whole, whole.slice(0, 0), whole]):
            async with store(world, disk, config) as quiver:
                await quiver.register("a")
                for each in batches:
                    await quiver.ingest(each)
                await quiver.flush()
                found: list[Any] = []
                while (delivery := await quiver.next("a", 0)) is not None:
                    assert delivery.view.schema == whole.schema
                    found += delivery.view.table()["column"].to_pylist()
                    await delivery.ack()
                assert found == [row for each in batches for row in each["column"].to_pylist()]

    simulate(scenario)


def test_batches_that_share_a_dictionary_which_cannot_be_unified_share_a_segment() -> None:
    one = pa.record_batch({"column": COLUMNS["dictionary with a null value"]})

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            for _ in range(10):
                await quiver.ingest(one)
            await quiver.flush()
            assert quiver.stats().segments == 1

    simulate(scenario)


def test_schema_that_could_be_written_and_not_read_is_refused() -> None:
    wrong = [
        pa.record_batch({"column": dictionary(WORDS.slice(0, 2))}),
        pa.record_batch({"column": [1]}).replace_schema_metadata({"x": "y" * SCHEMA_BYTES_MAX}),
    ]

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            for each in wrong:
                with pytest.raises(UsageError):
                    await quiver.ingest(each)
            await quiver.ingest(batch(1))
            await quiver.flush()
            assert quiver.stats().segments == 1

    simulate(scenario)


@pytest.mark.parametrize("start", [0, -1, 1.5, float("nan"), None, True, b"earliest", "newest"])
def test_start_that_is_no_segment_is_refused_and_nothing_is_registered(start: Any) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            with pytest.raises(UsageError):
                await quiver.register("a", start)
            assert not quiver.has_subscriber("a")

    simulate(scenario)


@pytest.mark.parametrize("name", [None, 5, b"a", "", "a b"])
def test_name_that_is_none_is_refused(name: Any) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            with pytest.raises(UsageError):
                await quiver.register(name)

    simulate(scenario)


def test_batch_that_can_never_fit_drops_nothing() -> None:
    config = dataclasses.replace(SLOW, size_cap_policy="drop_oldest", size_cap_bytes=1 << 19)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            for number in range(20):
                await quiver.ingest(batch(number, 60))
            await quiver.flush()
            with pytest.raises(QuiverFull):
                await quiver.ingest(batch(99, 60_000))
            assert quiver.stats().losses == {}
            assert await drain(quiver, "a") == list(range(20))

    simulate(scenario)


@pytest.mark.parametrize("operation", ["rename", "remove", "sync_directory"])
def test_wal_files_that_cannot_be_given_back_fail_in_our_words(operation: str) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, dataclasses.replace(SMALL, wal_spare_files=0)) as quiver:
            await quiver.register("a")
            for number in range(60):
                await quiver.ingest(batch(number, 60))
            disk.faults.append((operation, "wal", errno.EIO))
            await quiver.flush()
            with contextlib.suppress(ForebayError):
                await quiver.maintain()
            assert await drain(quiver, "a") == list(range(60))

    simulate(scenario)


def test_more_rows_than_arrow_writes_are_refused() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            with pytest.raises(LimitExceeded, match="ROWS_MAX"):
                await quiver.ingest(pa.record_batch({"nothing": pa.nulls(1 << 31)}))

    simulate(scenario)
