"""Buffers and streams as sources, and tables in a bucket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.export.bed import Bed, order, read_table

import forebay
from forebay.buffer import BufferConfig, Producer, Reader
from forebay.errors import UsageError
from forebay.kit.clock import SystemClock
from forebay.log import LogWriter
from forebay.spark.export import (
    DeadLetterSpec,
    ExportConfig,
    RecordsTrimmed,
    SourceSpec,
    TargetSpec,
    _dead,
    close_clients,
    export,
)
from forebay.storage import open_store
from forebay.stream import StreamTier, StreamWriter, TierConfig

if TYPE_CHECKING:
    from forebay.testing.servers import SeaweedServer

pytestmark = pytest.mark.xdist_group("export")


@pytest.fixture(autouse=True)
def _closed() -> object:
    yield
    close_clients()


def produce(directory: Path, batches: int, start: int = 0) -> None:
    async def work() -> None:
        async with Producer(BufferConfig(url=str(directory), flush_interval_ms=0)) as producer:
            for number in range(start, start + batches):
                handle = await producer.produce([order(number * 10 + each) for each in range(10)])
                await handle.watcher.await_durable()

    asyncio.run(work())


class Crash(Exception):
    """In the middle of something."""


def produce_one(directory: Path, records: list[bytes]) -> None:
    """One batch with these records."""

    async def work() -> None:
        async with Producer(BufferConfig(url=str(directory), flush_interval_ms=0)) as producer:
            handle = await producer.produce(records)
            await handle.watcher.await_durable()

    asyncio.run(work())


def entries(directory: Path) -> int:
    async def work() -> int:
        async with Reader(BufferConfig(url=str(directory))) as reader:
            return len(await reader.entries())

    return asyncio.run(work())


def buffer_config(tmp_path: Path, *, acknowledge: bool = False) -> ExportConfig:
    source = SourceSpec.parse("buffer:ingest/manifest", str(tmp_path / "buffer"), None)
    target = TargetSpec.parse(f"delta:{tmp_path / 'table'}")
    return ExportConfig(source, target, format="json", acknowledge=acknowledge)


def test_a_buffer_is_exported_by_sequence_and_acknowledged_after_the_commit(tmp_path: Path) -> None:
    produce(tmp_path / "buffer", 4)
    config = buffer_config(tmp_path, acknowledge=True)

    def early(what: str, done: int, total: int) -> None:
        if what == "written":
            assert entries(tmp_path / "buffer") == 4

    report = export(config, step=early)
    assert (report.records, report.rows) == (4, 40)
    assert entries(tmp_path / "buffer") == 0
    produce(tmp_path / "buffer", 2, start=4)
    assert export(config).rows == 20
    table = read_table(config.target)
    assert sorted(table.column("id").to_pylist()) == list(range(60))
    assert sorted(set(table.column("_offset").to_pylist())) == list(range(6))
    assert set(table.column("_topic").to_pylist()) == {"ingest/manifest"}


def test_a_buffer_that_somebody_else_consumed_is_noticed(tmp_path: Path) -> None:
    produce(tmp_path / "buffer", 2)
    export(buffer_config(tmp_path))
    produce(tmp_path / "buffer", 2, start=2)
    other = TargetSpec.parse(f"delta:{tmp_path / 'other'}")
    export(dataclasses.replace(buffer_config(tmp_path, acknowledge=True), target=other))
    with pytest.raises(RecordsTrimmed):
        export(buffer_config(tmp_path))


@pytest.mark.parametrize("step", ["dead", "never"])
def test_bad_records_of_one_batch_are_all_kept_once(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a position, and go to the topic in several appends, of which a crash may leave some."""
    monkeypatch.setattr(_dead, "APPEND_RECORDS_MAX", 4)
    bad = [b"{broken %d" % number if number % 2 else b"%d" % number for number in range(11)]
    good = [order(number) for number in range(3)]
    produce_one(tmp_path / "buffer", [*good, *bad])
    produce_one(tmp_path / "buffer", [*bad[:6], *good])
    topic = DeadLetterSpec.parse("topic:dead")
    config = dataclasses.replace(buffer_config(tmp_path), dead_letter=topic)
    append, appends = LogWriter.append_shared, 0

    async def dying(self: LogWriter, groups: Any) -> Any:
        nonlocal appends
        appends += 1
        if appends == 3 and step == "dead":
            raise Crash
        return await append(self, groups)

    with monkeypatch.context() as patch, contextlib.suppress(Crash):
        patch.setattr(LogWriter, "append_shared", dying)
        export(config)
    assert appends == (3 if step == "dead" else 5)
    export(config)
    close_clients()
    with forebay.connect(tmp_path / "buffer") as bay:
        kept = [row["value"] for row in bay.read("dead").read_all().to_pylist()]
    assert kept == [*bad, *bad[:6]]
    assert read_table(config.target).num_rows == 6


def test_only_a_buffer_is_acknowledged(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        ExportConfig(
            SourceSpec.parse("orders", str(tmp_path), None), TargetSpec.parse("delta:t"), acknowledge=True
        )


def test_a_stream_is_exported_from_its_remote_tier(tmp_path: Path) -> None:
    clock, folder = SystemClock(), tmp_path / "streams" / "orders"

    def append(low: int, high: int) -> None:
        with StreamWriter(folder, epoch=1, clock=clock) as writer:
            for number in range(low, high):
                writer.append([order(number * 3 + each) for each in range(3)])
            writer.commit()

        async def tier() -> None:
            async with open_store(str(tmp_path / "bucket")) as store:
                await StreamTier(
                    folder,
                    store,
                    config=TierConfig(fragment_bytes=1_000),
                    clock=clock,
                    randomness=random.Random(1),
                ).run_once()

        asyncio.run(tier())

    append(0, 10)
    source = SourceSpec.parse("stream:orders", str(tmp_path / "bucket"), None)
    config = ExportConfig(source, TargetSpec.parse(f"delta:{tmp_path / 'table'}"), format="json")
    assert export(config).rows == 30
    append(10, 20)
    assert export(config).rows == 30
    table = read_table(config.target)
    assert sorted(table.column("id").to_pylist()) == list(range(60))
    assert sorted(table.column("_offset").to_pylist()) == list(range(60))


@pytest.mark.parametrize("text", ["", "what:x", "buffer:", "buffer:a,b", "stream:"])
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        SourceSpec.parse(text, "store", None)


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_tables_live_in_a_bucket(seaweed: SeaweedServer, bed: Bed, kind: str) -> None:
    url = seaweed.url(f"export-{kind}")
    bed.fill(20)
    config = ExportConfig(bed.config().source, TargetSpec.parse(f"{kind}:{url}"), format="json")
    assert export(config).rows == 40
    assert export(config).rows == 0
    bed.fill(10)
    assert export(config).rows == 20
    if kind == "delta":
        from deltalake import DeltaTable

        from forebay.spark.export._delta import storage_of

        uri, options = storage_of(url)
        assert DeltaTable(uri, storage_options=options).to_pyarrow_table().num_rows == 60


def test_an_export_of_a_directory_of_something_else_makes_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "photo").touch()
    source = SourceSpec.parse("orders", str(tmp_path), None)
    with pytest.raises(UsageError, match="holds no deployment"):
        export(ExportConfig(source, TargetSpec.parse(f"delta:{tmp_path}/table")))
    assert [each.name for each in tmp_path.iterdir()] == ["photo"]
