"""Jobs without Spark: the same functions on threads."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import forebay
from forebay.errors import UsageError
from forebay.formats.bytes_batch import HEADERS_TYPE
from forebay.log import CompactorConfig, LogWriter, TopicSettings
from forebay.spark.export._spread import spread
from forebay.spark.jobs import Place, ReplayTrimmed, compact, replay, vacuum, verify
from forebay.spark.jobs import _replay as replay_module

pytestmark = pytest.mark.xdist_group("export")

NOW = CompactorConfig(min_age_ms=0)
FAR = 10**15


def values(place: Place, topic: str) -> list[bytes]:
    with forebay.connect(place.store) as bay:
        found: list[bytes] = bay.read(topic).read_all().column("value").to_pylist()
        return found


def test_every_partition_is_compacted_and_says_the_same_as_before(place: Place) -> None:
    before = values(place, "orders"), values(place, "clicks")
    found = compact(place, config=NOW)
    assert [(each.topic, each.partition) for each in found] == [
        ("clicks", 0),
        ("orders", 0),
        ("orders", 1),
        ("orders", 2),
    ]
    assert all(each.records == 20 and each.runs and not each.error for each in found)
    assert (values(place, "orders"), values(place, "clicks")) == before
    assert verify(place).ok
    assert [each.topic for each in compact(place, topic="clicks", config=NOW)] == ["clicks"]


def test_topics_that_are_not_to_be_compacted_are_left_alone_unless_they_are_named(place: Place) -> None:
    with forebay.connect(place.store) as bay:
        bay.topics.alter("orders", settings=TopicSettings(compaction=False))
    assert [each.topic for each in compact(place, config=NOW)] == ["clicks"]
    assert [each.topic for each in compact(place, topic="orders", config=NOW)] == ["orders"] * 3


def test_a_job_over_a_directory_of_something_else_makes_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "photo").touch()
    with pytest.raises(UsageError, match="holds no deployment"):
        verify(Place(str(tmp_path)))
    assert [each.name for each in tmp_path.iterdir()] == ["photo"]


def test_vacuum_here_is_the_vacuum_of_the_command(place: Place) -> None:
    compact(place, config=NOW)
    report = vacuum(place, dry_run=True)
    assert report.objects > 0 and not report.deleted


# -- replay


@pytest.fixture
def target(place: Place) -> str:
    with forebay.connect(place.store) as bay:
        bay.topics.create("again", partitions=2)
    return "again"


def test_a_replay_keeps_records_keys_and_order(place: Place, target: str) -> None:
    found = replay(place, "orders", target, job="j1", from_ms=0, to_ms=FAR)
    assert [each.appended for each in found] == [20, 20, 20]
    with forebay.connect(place.store) as bay:
        table = bay.read(target).read_all()
        wanted = bay.read("orders").read_all()
    assert sorted(table.column("value").to_pylist()) == sorted(wanted.column("value").to_pylist())
    pairs = list(zip(table.column("value").to_pylist(), table.column("key").to_pylist(), strict=True))
    for partition in range(3):
        mine = [value for value, _ in pairs if value.startswith(b"%d-" % partition)]
        assert mine == sorted(mine)
    assert all(key == b"k" + value[-1:] for value, key in pairs)
    assert sorted(table.column("timestamp").to_pylist()) == sorted(wanted.column("timestamp").to_pylist())


def test_a_replay_that_is_run_again_appends_nothing(place: Place, target: str) -> None:
    replay(place, "orders", target, job="j1", from_ms=0, to_ms=FAR)
    with forebay.connect(place.store) as bay, bay.producer() as out:
        out.send("orders", [b"later"], partition=0).result(timeout=60)
    again = replay(place, "orders", target, job="j1", from_ms=0, to_ms=FAR)
    assert [(each.appended, each.found) for each in again] == [(0, 20)] * 3
    assert len(values(place, target)) == 60
    replay(place, "orders", target, job="j2", from_ms=0, to_ms=FAR)
    assert len(values(place, target)) == 121


@pytest.mark.parametrize("deaths", [1, 5, 9])
def test_a_replay_that_breaks_off_goes_on_where_it_was(
    place: Place, target: str, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "CHUNK_RECORDS", 3)
    calls = 0
    append = LogWriter.append_shared

    async def deadly(self: LogWriter, groups: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = calls  # Other partitions append at the same time.
        results = await append(self, groups)
        if mine == deaths:
            raise RuntimeError("died on purpose")
        return results

    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "append_shared", deadly)
        with pytest.raises(RuntimeError, match="on purpose"):
            replay(place, "orders", target, job="j1", from_ms=0, to_ms=FAR)
    found = replay(place, "orders", target, job="j1", from_ms=0, to_ms=FAR)
    assert sum(each.appended + each.found for each in found) == 60
    assert sorted(values(place, target)) == sorted(values(place, "orders"))


@pytest.mark.parametrize("records_max", [4, 1_000])
def test_chunks_of_a_replay_end_by_bytes_wherever_batches_do(records_max: int) -> None:
    """Five thousand records of a megabyte are more than one append can hold."""
    sizes = [3, 0, 50, 7, 7, 7, 7, 200, 1, 1, 1, 1, 1, 30, 0, 0]
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])
    table = pa.table([[b"k", None] * 8, [bytes(size) for size in sizes]], schema=schema)

    async def cut(rows: int) -> list[list[int]]:
        async def batches() -> AsyncIterator[pa.RecordBatch]:
            for batch in table.to_batches(max_chunksize=rows):
                yield batch

        chunks = [chunk async for chunk in replay_module._chunks(batches(), records_max, 20, False)]
        return [[len(value) for value in chunk.column("value").to_pylist()] for chunk in chunks]

    found = asyncio.run(cut(1))
    assert [size for chunk in found for size in chunk] == sizes
    assert all(sum(chunk[:-1]) < 20 and len(chunk) <= records_max for chunk in found)
    assert [200] in found or [7, 200] in found
    for rows in range(2, 17):
        assert asyncio.run(cut(rows)) == found


def test_a_plan_of_the_first_version_is_followed_as_it_was_made() -> None:
    fields = {"source": "a", "target": "b", "from_ms": 0, "to_ms": 1, "chunk_records": 5_000}
    old = json.dumps({**fields, "target_partitions": 1, "ranges": []}).encode()
    plan = replay_module._decode(old, "plan")
    assert (plan.chunk_bytes, plan.counts_headers) == (sys.maxsize, False)


@pytest.mark.parametrize("rows", range(1, 8))
def test_headers_count_among_the_bytes_of_a_chunk(rows: int) -> None:
    """Values of nothing with a megabyte of headers each made one append of five thousand."""
    headers = [None, [("h", bytes(11))], [], [("h", None)] * 2, [("name", bytes(1_000))], None, [("h", b"")]]
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("headers", HEADERS_TYPE)])
    table = pa.table([[None] * 7, [b""] * 7, headers], schema=schema)

    async def batches() -> AsyncIterator[pa.RecordBatch]:
        for batch in table.to_batches(max_chunksize=rows):
            yield batch

    async def cut() -> list[int]:
        return [chunk.num_rows async for chunk in replay_module._chunks(batches(), 1_000, 20, True)]

    # Their sizes are 0, 20, 0, 18, 1,012, 0 and 9.
    assert asyncio.run(cut()) == [2, 3, 2]


def test_a_replay_whose_source_was_trimmed_says_that_it_cannot_end(
    place: Place, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deadly(self: LogWriter, groups: Any) -> Any:
        raise RuntimeError("died on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "append_shared", deadly)
        with pytest.raises(RuntimeError, match="on purpose"):
            replay(place, "orders", target, job="j1", from_ms=0, to_ms=FAR)
    with forebay.connect(place.store) as bay:
        bay.trim("orders", partition=1, offset=10)
    for _ in range(2):
        wanted = r"orders:1: job 'j1' is to replay offsets 1 to 21, and the source now begins at 10"
        with pytest.raises(ReplayTrimmed, match=wanted) as caught:
            replay(place, "orders", target, job="j1", from_ms=0, to_ms=FAR)
        assert "another topic under a new job id" in caught.value.hint


def test_a_replay_of_a_time_range_takes_what_was_appended_then(place: Place, target: str) -> None:
    with forebay.connect(place.store) as bay:
        times = bay.read("orders", partition=0).read_all().column("timestamp").cast("int64").to_pylist()
    middle = times[10]
    first = replay(place, "orders", target, job="early", from_ms=0, to_ms=middle)
    rest = replay(place, "orders", target, job="late", from_ms=middle, to_ms=FAR)
    assert sum(each.appended for each in [*first, *rest]) == 60
    assert sorted(values(place, target)) == sorted(values(place, "orders"))


def test_a_job_id_belongs_to_one_replay(place: Place, target: str) -> None:
    replay(place, "orders", target, job="j1", from_ms=0, to_ms=FAR)
    with pytest.raises(UsageError, match="j1"):
        replay(place, "clicks", target, job="j1", from_ms=0, to_ms=FAR)
    with pytest.raises(UsageError, match="itself"):
        replay(place, "orders", "orders", job="j2", from_ms=0, to_ms=FAR)
    with pytest.raises(UsageError, match="job id"):
        replay(place, "orders", target, job="../x", from_ms=0, to_ms=FAR)
    with pytest.raises(UsageError, match="ends before it begins"):
        replay(place, "orders", target, job="j3", from_ms=FAR, to_ms=FAR)


def test_what_fails_on_a_thread_fails_the_whole() -> None:
    def work(number: int) -> int:
        if number == 2:
            raise UsageError("two")
        return number

    with pytest.raises(UsageError):
        spread(work, [1, 2, 3])
    assert spread(work, []) == []
