"""Records that go while they are exported, and acknowledgements that did not come."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Literal

import pytest
from tests.spark.export.bed import Bed, order, places, read_table
from tests.spark.export.test_export_sources import buffer_config, entries, produce

import forebay
from forebay.buffer import Consumer
from forebay.formats import buffer_batch
from forebay.kit.clock import SystemClock
from forebay.spark.export import (
    ExportConfig,
    RecordsTrimmed,
    SourceSpec,
    TargetSpec,
    close_clients,
    export,
)
from forebay.spark.export._clients import clients
from forebay.spark.export._sources import open_source
from forebay.storage import open_store
from forebay.stream import RetentionPolicy, StreamTier, StreamWriter, TierConfig, WriterConfig

pytestmark = pytest.mark.xdist_group("export")


def trimming(bed: Bed, offset: int) -> object:
    """Trims when the first plan is made."""
    done: list[str] = []

    def step(what: str, *_: int) -> None:
        if what == "planned" and not done:
            done.append(what)
            with forebay.connect(bed.bay_directory) as bay:
                bay.trim("orders", partition=0, offset=offset)

    return step


def test_records_that_go_after_the_plan_end_the_export_in_the_same_words(bed: Bed) -> None:
    bed.fill(9, appends=9)
    with pytest.raises(RecordsTrimmed, match="goes on at 5") as caught:
        export(bed.config(), step=trimming(bed, 5))  # type: ignore[arg-type]
    assert "--on-data-loss skip" in caught.value.hint
    assert bed.rows().num_rows == 0


def test_records_that_go_after_the_plan_are_stepped_over_and_told(bed: Bed) -> None:
    bed.fill(2)
    export(bed.config())
    bed.fill(7, appends=7)
    report = export(bed.config(on_data_loss="skip"), step=trimming(bed, 5))  # type: ignore[arg-type]
    assert report.skipped == {"orders:0": 2}
    assert [offset for partition, offset in places(bed.rows()) if partition == 0] == [1, 2, 5, 6, 7, 8, 9]


def test_a_gap_counts_once_however_often_it_is_planned(bed: Bed) -> None:
    bed.fill(4)
    export(bed.config())
    bed.fill(4)
    bed.send([order(1, note="a column more")])
    with forebay.connect(bed.bay_directory) as bay:
        bay.trim("orders", partition=0, offset=7)
    report = export(bed.config(on_data_loss="skip"))
    assert (report.added_columns, report.skipped) == (["note"], {"orders:0": 2})


def test_a_gap_up_to_the_end_is_stepped_over_for_good(bed: Bed) -> None:
    bed.fill(4)
    export(bed.config())
    bed.fill(4)
    with forebay.connect(bed.bay_directory) as bay:
        bay.trim("orders", partition=0, offset=9)
    assert export(bed.config(on_data_loss="skip")).skipped == {"orders:0": 4}
    assert export(bed.config()).skipped == {}


def test_a_buffer_is_acknowledged_by_the_next_export_where_the_last_was_killed(tmp_path: Path) -> None:
    produce(tmp_path / "buffer", 3)
    export(buffer_config(tmp_path))
    assert entries(tmp_path / "buffer") == 3
    report = export(buffer_config(tmp_path, acknowledge=True))
    close_clients()
    assert (report.records, entries(tmp_path / "buffer")) == (0, 0)


@pytest.mark.parametrize("loss", ["fail", "skip"])
def test_what_another_exporter_acknowledged_meanwhile_is_not_lost(
    tmp_path: Path, loss: Literal["fail", "skip"]
) -> None:
    """The table has it: it was said to be trimmed."""
    produce(tmp_path / "buffer", 3)
    config = dataclasses.replace(buffer_config(tmp_path, acknowledge=True), on_data_loss=loss)
    others: list[int] = []

    def step(what: str, *_: int) -> None:
        if what == "planned" and not others:
            others.append(export(config).records)

    report = export(config, step=step)
    assert (others, report.records, report.conflicts, report.skipped) == ([3], 0, 1, {})
    assert read_table(config.target).num_rows == 30
    close_clients()


def test_an_acknowledgement_that_another_exporter_overtakes_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(tmp_path / "buffer", 3)
    initialize, overtaken = Consumer.initialize, []

    async def late(self: Consumer, last: int | None = None) -> None:
        overtaken.append(last)
        await initialize(self, 2)
        await initialize(self, last)

    monkeypatch.setattr(Consumer, "initialize", late)
    source = open_source(buffer_config(tmp_path).source, clients())
    source.committed("buffer:ingest/manifest", 1)
    close_clients()
    assert (overtaken, entries(tmp_path / "buffer")) == ([0], 0)


@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1, 2)])
def test_a_batch_of_a_buffer_without_records_is_exported_like_any_other(
    tmp_path: Path, empty: tuple[int, ...]
) -> None:
    """Other producers may write one. It ended every export of the queue."""
    produce(tmp_path / "buffer", 3)
    batches = sorted(tmp_path.glob("buffer/ingest/*.batch"))
    for number in empty:
        batches[number].write_bytes(buffer_batch.encode([]))
    config = dataclasses.replace(buffer_config(tmp_path), format="raw")
    report = export(config)
    assert (report.records, report.rows) == (3, 30 - 10 * len(empty))
    close_clients()
    assert export(config).records == 0


def tiered(tmp_path: Path, config: TierConfig) -> None:
    async def tier() -> None:
        async with open_store(str(tmp_path / "bucket")) as store:
            clock, folder = SystemClock(), tmp_path / "streams" / "orders"
            await StreamTier(
                folder, store, config=config, clock=clock, randomness=random.Random(1)
            ).run_once()

    asyncio.run(tier())


@pytest.mark.parametrize("loss", ["fail", "skip"])
def test_what_a_stream_lets_go_while_it_is_exported_is_a_gap_and_no_silence(
    tmp_path: Path, loss: Literal["fail", "skip"]
) -> None:
    """A stream hands out what is left to whoever asks for what is gone: the rest was lost without a word."""
    with StreamWriter(tmp_path / "streams" / "orders", epoch=1, clock=SystemClock()) as writer:
        for number in range(20):
            writer.append([order(number * 3 + each) for each in range(3)])
            writer.commit()
    small = TierConfig(fragment_bytes=1_000)
    tiered(tmp_path, small)
    source = SourceSpec.parse("stream:orders", str(tmp_path / "bucket"), None)
    config = ExportConfig(
        source, TargetSpec.parse(f"delta:{tmp_path / 'table'}"), format="json", on_data_loss=loss
    )

    def step(what: str, *_: int) -> None:
        if what == "planned":
            tiered(tmp_path, dataclasses.replace(small, retention=RetentionPolicy(max_bytes=2_000)))

    if loss == "fail":
        with pytest.raises(RecordsTrimmed):
            export(config, step=step)
        return
    report = export(config, step=step)
    first = min(read_table(config.target).column("_offset").to_pylist())
    assert 0 < first < 60 and report.rows == 60 - first
    close_clients()


def stream_with_gap(
    tmp_path: Path, loss: Literal["fail", "skip"], *, exported_up_to_it: bool = False
) -> ExportConfig:
    """Records 0 to 29 and 60 to 89: what is between was gone before it was tiered. A commit for each side."""
    folder, small = tmp_path / "streams" / "orders", TierConfig(fragment_bytes=1_000)
    source = SourceSpec.parse("stream:orders", str(tmp_path / "bucket"), None)
    target = TargetSpec.parse(f"delta:{tmp_path / 'table'}")
    config = ExportConfig(source, target, format="json", on_data_loss=loss, commit_bytes_max=1)
    for until in (30, 90):
        segments = WriterConfig(segment_chunks_max=5)
        with StreamWriter(folder, epoch=1, clock=SystemClock(), config=segments) as writer:
            while writer.next_offset < until:
                writer.append([order(writer.next_offset + each) for each in range(3)])
            writer.commit()
        for segment in sorted(folder.glob("*.segment"))[:-2]:
            segment.unlink()
            segment.with_suffix(".index").unlink()
        tiered(tmp_path, small)
        if until == 30 and exported_up_to_it:
            assert export(config).rows == 30
    return config


AROUND_THE_GAP = [(0, offset) for offset in (*range(30), *range(60, 90))]


@pytest.mark.parametrize("commit_bytes_max", [1, 1 << 30])
def test_an_export_goes_on_behind_a_gap_inside_a_stream_and_tells_it(
    tmp_path: Path, commit_bytes_max: int
) -> None:
    config = stream_with_gap(tmp_path, "skip")
    config = dataclasses.replace(config, commit_bytes_max=commit_bytes_max)
    report = export(config)
    assert (report.rows, report.skipped) == (60, {"stream:orders": 30})
    assert places(read_table(config.target)) == AROUND_THE_GAP
    again = export(config)
    assert (again.records, again.skipped, again.positions) == (0, {}, {"stream:orders": 90})
    close_clients()


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_an_export_killed_around_a_gap_inside_a_stream_repeats_nothing(tmp_path: Path, commits: int) -> None:
    config = stream_with_gap(tmp_path, "skip")
    heard: list[str] = []

    def step(what: str, *_: int) -> None:
        heard.append(what)
        if heard.count("committed") == commits and what in ("written", "committed"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(config, step=step)
    report = export(config)
    # Told by the export that makes the commit behind it, or by none where that one was killed after it.
    assert report.skipped == ({"stream:orders": 30} if commits < 2 else {})
    assert places(read_table(config.target)) == AROUND_THE_GAP
    close_clients()


@pytest.mark.parametrize("exported_up_to_it", [False, True])
def test_a_gap_inside_a_stream_ends_an_export_that_may_not_lose_any(
    tmp_path: Path, exported_up_to_it: bool
) -> None:
    """What is before it is in the table. An export that began at the gap stepped over it without a word."""
    config = stream_with_gap(tmp_path, "fail", exported_up_to_it=exported_up_to_it)
    for _ in range(2):
        with pytest.raises(RecordsTrimmed, match="everything below 30, but the source goes on at 60"):
            export(config)
        assert places(read_table(config.target)) == AROUND_THE_GAP[:30]
    assert export(dataclasses.replace(config, on_data_loss="skip")).skipped == {"stream:orders": 30}
    assert places(read_table(config.target)) == AROUND_THE_GAP
    close_clients()
