"""Exactly once, for every table format, whatever breaks off and wherever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.spark.export.bed import KINDS, Bed, all_places, order, places, read_table

import forebay
from forebay.errors import LimitExceeded, UsageError
from forebay.log import LogWriter
from forebay.spark.export import (
    BadRecords,
    CommitConflict,
    CommitUnknown,
    Exporter,
    ExportReport,
    RecordsTrimmed,
    TargetSpec,
    export,
    export_forever,
    local_runner,
    orphans,
)
from forebay.spark.export._tables import Commit

pytestmark = pytest.mark.xdist_group("export")

STEPS = ("created", "planned", "task", "written", "dead", "committed")


class Crash(BaseException):
    """As if the process had died: nothing catches it."""


def dying_at(step: str) -> Callable[[str, int, int], None]:
    def hear(what: str, done: int, total: int) -> None:
        if what == step:
            raise Crash(step)

    return hear


@pytest.mark.parametrize("kind", KINDS)
def test_rows_arrive_once_with_their_columns(bed: Bed, kind: str) -> None:
    bed.fill(60)
    report = export(bed.config(kind))
    assert (report.records, report.rows, report.commits, report.dead_letters) == (120, 120, 1, 0)
    assert report.positions == {"orders:0": 61, "orders:1": 61}
    again = export(bed.config(kind))
    assert (again.records, again.commits) == (0, 0)
    table = bed.rows(kind)
    assert places(table) == all_places(bed, 60)
    row = next(row for row in table.to_pylist() if (row["_partition"], row["_offset"]) == (0, 5))
    assert (row["id"], row["who"], row["amount"], row["_topic"]) == (4, "user-4", 1.0, "orders")
    assert row["at"].isoformat() == "2026-11-16T09:30:00+00:00"
    assert orphans(bed.target(kind)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_loses_and_doubles_nothing(bed: Bed, kind: str, step: str) -> None:
    bed.fill(30)
    bed.send([b"{bad", b"worse"], partition=1)
    config = bed.config(kind, dead_letter="topic:dead")
    with pytest.raises(Crash):
        Exporter(config, local_runner(1), parallelism=2, step=dying_at(step)).run_once()
    bed.send([order(7), b"[late]"], partition=0)
    export(config)
    expected = sorted([*all_places(bed, 30), (0, 31)])
    assert places(bed.rows(kind)) == expected
    dead = [(row["value"]) for row in bed.read_topic("dead")]
    assert sorted(dead) == [b"[late]", b"worse", b"{bad"]
    live = len(expected)
    assert export(config).records == 0 and bed.rows(kind).num_rows == live


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_reply_is_settled_by_the_table_itself(
    bed: Bed, kind: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.fill(20)
    config = bed.config(kind)
    exporter = Exporter(config, local_runner(1), parallelism=1)
    lost: list[str] = []
    load = exporter._table.load

    def loaded() -> Any:
        handle = load()
        if handle is None or lost:
            return handle
        commit = handle.commit

        def unsure(what: Commit) -> str:
            lost.append(when)
            if when == "after":
                commit(what)
            raise CommitUnknown("commit", reason="on purpose")

        monkeypatch.setattr(handle, "commit", unsure)
        return handle

    monkeypatch.setattr(exporter._table, "load", loaded)
    report = exporter.run_once()
    assert lost == [when]
    assert (report.commits, report.conflicts) == ((1, 0) if when == "after" else (1, 1))
    assert places(bed.rows(kind)) == all_places(bed, 20)
    assert len(orphans(bed.target(kind))) == (0 if when == "after" else report.files)


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_exporters_at_once_each_record_has_one(bed: Bed, kind: str) -> None:
    bed.fill(20)
    bed.send([b"bad"])
    config = bed.config(kind, dead_letter="topic:dead")
    inner: list[ExportReport] = []

    def meanwhile(what: str, done: int, total: int) -> None:
        if what == "written" and not inner:
            inner.append(export(config))

    outer = Exporter(config, local_runner(1), parallelism=2, step=meanwhile).run_once()
    assert inner[0].records == 41
    assert (outer.records, outer.conflicts) == (0, 1)
    assert places(bed.rows(kind)) == all_places(bed, 20)
    assert [row["value"] for row in bed.read_topic("dead")] == [b"bad"]
    assert len(orphans(bed.target(kind))) >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_exporters_that_race_on_threads_share_the_records(bed: Bed, kind: str) -> None:
    config = bed.config(kind, attempts_max=100)
    export(config)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(4):
                export(config)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        bed.fill(6)
    for thread in threads:
        thread.join()
    export(config)
    assert not errors
    assert places(bed.rows(kind)) == all_places(bed, 24)


def test_giving_up_against_others_says_so(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.fill(3)
    exporter = Exporter(bed.config("parquet", attempts_max=2), local_runner(1), parallelism=1)

    def refused(*_: object) -> str:
        raise CommitConflict("table")

    monkeypatch.setattr("forebay.spark.export._parquet.ParquetHandle.commit", refused)
    with pytest.raises(CommitConflict):
        exporter.run_once()


@pytest.mark.parametrize("kind", KINDS)
def test_new_fields_become_columns(bed: Bed, kind: str) -> None:
    bed.fill(10)
    config = bed.config(kind)
    export(config)
    bed.send([order(1, extra={"a": 1}, ratio=2), order(2, ratio=2.5), order(3, extra={"a": 2})])
    report = export(config)
    assert report.added_columns == ["extra", "ratio"]
    table = bed.rows(kind)
    assert table.num_rows == 23
    found = {
        row["_offset"]: (row["extra"], row["ratio"]) for row in table.to_pylist() if row["_partition"] == 0
    }
    assert found[11] == ({"a": 1}, 2.0) and found[12] == (None, 2.5) and found[1] == (None, None)


def test_new_fields_may_be_passed_over(bed: Bed) -> None:
    bed.fill(3)
    config = bed.config(new_columns="ignore")
    export(config)
    bed.send([order(1, extra=1, ID=5)])
    assert export(config).rows == 1
    assert "extra" not in bed.rows().column_names


def test_a_field_that_differs_only_in_case_is_named_and_not_added(bed: Bed) -> None:
    bed.fill(3)
    export(bed.config())
    bed.send([order(1, ID=5)])
    report = export(bed.config())
    assert (report.rows, report.ignored_columns) == (1, ["ID"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_inside_of_a_column_that_has_no_place_for_it_is_named(bed: Bed, kind: str) -> None:
    bed.send([order(1, place={"city": "Graz"})])
    export(bed.config(kind))
    bed.send([order(2, place={"city": "Linz", "zip": 4020})])
    assert export(bed.config(kind, new_columns="ignore")).rows == 1
    bed.send([order(3, place={"CITY": "Wels"})])
    report = export(bed.config(kind))
    assert (report.rows, report.ignored_columns) == (1, ["place.CITY"])
    cities = [(row["id"], row["place"]["city"]) for row in bed.rows(kind).to_pylist()]
    assert sorted(cities) == [(1, "Graz"), (2, "Linz"), (3, None)]


@pytest.mark.parametrize("kind", KINDS)
def test_records_without_a_single_column_do_not_hold_up_the_others(bed: Bed, kind: str) -> None:
    bed.send([b"{broken", b"{}"])
    config = bed.config(kind, dead_letter="topic:dead")
    report = export(config)
    assert (report.records, report.rows, report.dead_letters) == (2, 1, 1)
    bed.send([order(1)])
    report = export(config)
    assert (report.records, report.rows, report.dead_letters) == (1, 1, 0)
    assert sorted(row["_offset"] for row in bed.rows(kind).to_pylist()) == [2, 3]
    assert [row["value"] for row in bed.read_topic("dead")] == [b"{broken"]


def test_without_a_column_to_begin_with_new_ones_cannot_be_passed_over(bed: Bed) -> None:
    bed.send([b"{}"])
    with pytest.raises(UsageError, match="no record has a column"):
        export(bed.config(new_columns="ignore"))


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_partitioned_by_date_and_columns(bed: Bed, kind: str) -> None:
    bed.fill(14)
    bed.send([order(1, who=None), order(2, who="a/b =c")])
    config = bed.config(kind, partition_by=("date(at)", "who"))
    export(config)
    table = bed.rows(kind)
    assert len(places(table)) == 30
    if kind != "parquet":
        assert set(table.column("who").to_pylist()) == {None, "a/b =c", *(f"user-{n}" for n in range(7))}
        assert {str(day) for day in table.column("at_date").to_pylist()} == {"2026-11-16"}
    with pytest.raises(UsageError, match="partitioned by at_date, who, the export by who"):
        export(bed.config(kind, partition_by=("who",)))
    with pytest.raises(UsageError, match="the export by nothing") as caught:
        export(bed.config(kind))
    assert "--partition-by" in caught.value.hint


def test_parquet_partitions_are_directories_that_others_understand(bed: Bed) -> None:
    import pyarrow.dataset as ds

    bed.fill(14)
    export(bed.config("parquet", partition_by=("who",)))
    dataset = ds.dataset(bed.target("parquet").location, partitioning="hive", format="parquet")
    assert dataset.count_rows(filter=ds.field("who") == "user-3") == 4


def test_partitioning_by_what_is_not_there_is_refused(bed: Bed) -> None:
    bed.fill(1)
    for wrong in (("nobody",), ("date(who)",), ("who", "who")):
        with pytest.raises(UsageError):
            export(bed.config(partition_by=wrong))


def test_a_column_with_too_many_values_is_refused_as_a_partition(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.spark.export._partitioning.FILES_PER_TASK_MAX", 5)
    bed.fill(20)
    with pytest.raises(LimitExceeded, match="partitions"):
        export(bed.config(partition_by=("id",)))


def test_without_a_place_for_them_bad_records_end_the_export(bed: Bed) -> None:
    bed.fill(5)
    bed.send([b"{nope"])
    with pytest.raises(BadRecords, match="orders:0 6"):
        export(bed.config())
    assert bed.rows().num_rows == 0


@pytest.mark.parametrize("kind", ["delta", "parquet"])
@pytest.mark.parametrize("step", ["dead", "committed"])
def test_a_dead_letter_table_holds_each_bad_record_once(bed: Bed, kind: str, step: str) -> None:
    bed.fill(5)
    bed.send([b"{one", order(1), b"two"])
    place = bed.target(kind, "dead")
    config = bed.config(kind, dead_letter=f"{kind}:{place.location}")
    with pytest.raises(Crash):
        Exporter(config, local_runner(1), parallelism=1, step=dying_at(step)).run_once()
    bed.send([b"three"])
    export(config)
    dead = bed.rows(kind, "dead").sort_by("offset").to_pylist()
    assert [(row["offset"], row["value"]) for row in dead] == [(6, b"{one"), (8, b"two"), (9, b"three")]
    assert all(row["reason"] for row in dead)


def test_dead_letters_in_a_topic_tell_where_they_came_from(bed: Bed) -> None:
    bed.send([order(1), b"{one", order(2), b"two"], partition=1)
    report = export(bed.config(dead_letter="topic:dead"))
    assert report.dead_letters == 2
    [one, two] = bed.read_topic("dead")
    headers = {entry["key"]: entry["value"] for entry in one["headers"]}
    assert headers["forebay-source"] == b"forebay/orders:1" and headers["forebay-offset"] == b"2"
    assert headers["forebay-reason"]
    assert (one["value"], two["value"]) == (b"{one", b"two")


def test_rounds_with_equally_many_bad_records_are_not_taken_for_repetitions(bed: Bed) -> None:
    config = bed.config(dead_letter="topic:dead")
    bed.fill(1)
    for number in range(4):
        bed.send([b"bad-%d" % number])
        export(config)
    assert [row["value"] for row in bed.read_topic("dead")] == [b"bad-%d" % number for number in range(4)]


def test_many_bad_records_are_appended_piece_by_piece_in_order(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.spark.export._dead.APPEND_RECORDS_MAX", 3)
    monkeypatch.setattr("forebay.spark.export._dead.ATTEMPTS_MAX", 2)
    bed.fill(1)
    bed.send([b"bad-%02d" % number for number in range(20)])
    export(bed.config(dead_letter="topic:dead"))
    assert [row["value"] for row in bed.read_topic("dead")] == [b"bad-%02d" % number for number in range(20)]


def test_large_bad_records_are_appended_by_their_bytes(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.spark.export._dead.APPEND_BYTES_MAX", 100)
    append, sizes = LogWriter.append_shared, []

    async def watched(self: LogWriter, groups: Any) -> Any:
        sizes.append([len(group.batch) for group in groups])
        return await append(self, groups)

    bed.fill(1)
    bad = [b"bad" + bytes(size) for size in (40, 40, 40, 500, 3, 90)]
    bed.send(bad)
    monkeypatch.setattr(LogWriter, "append_shared", watched)
    export(bed.config(dead_letter="topic:dead"))
    assert [row["value"] for row in bed.read_topic("dead")] == bad
    assert sizes[-4:] == [[2], [1], [1], [2]]


def test_too_many_bad_records_are_a_wrong_format(bed: Bed) -> None:
    bed.fill(1)
    bed.send([b"x" * 1000] * 100)
    with pytest.raises(LimitExceeded, match="bad records"):
        export(bed.config(dead_letter="topic:dead", dead_letter_bytes_max=10_000))


@pytest.mark.parametrize("place", ["topic", "delta"])
def test_the_driver_takes_only_so_many_bad_records_for_one_commit(
    bed: Bed, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all tasks were in its memory at once, each with as many as a task may have."""
    monkeypatch.setattr("forebay.spark.export._exporter.COMMIT_DEAD_BYTES_MAX", 5_000)
    keep, taken = Exporter._keep_dead, []

    def watched(self: Exporter, plan: Any, results: Any) -> None:
        taken.append(sum(result.dead_count for result in results))
        keep(self, plan, results)

    monkeypatch.setattr(Exporter, "_keep_dead", watched)
    bad = [b"bad-%02d" % number + bytes(1_000) for number in range(24)]
    for number, each in enumerate(bad):
        bed.send([order(number), each], partition=number % bed.partitions)
    dead = "topic:dead" if place == "topic" else f"delta:{bed.directory}/dead"
    report = export(bed.config(dead_letter=dead, dead_letter_bytes_max=2_500, task_bytes_max=1))
    assert (report.rows, report.dead_letters) == (24, 24)
    assert sorted(bed.rows().column("id").to_pylist()) == list(range(24))
    found = bed.read_topic("dead") if place == "topic" else read_table(TargetSpec.parse(dead)).to_pylist()
    assert sorted(row["value"] for row in found) == bad
    assert max(taken) <= 5 and sum(taken) == 24


def test_bad_records_without_a_place_are_counted_and_not_collected(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Exporter._keep_dead
    taken: list[int] = []

    def watched(self: Exporter, plan: Any, results: Any) -> None:
        taken.extend(len(result.dead) for result in results)
        keep(self, plan, results)

    monkeypatch.setattr(Exporter, "_keep_dead", watched)
    bed.fill(1)
    bed.send([b"x" * 1_000] * 100)
    with pytest.raises(BadRecords, match="100 records cannot be decoded: orders:0") as caught:
        export(bed.config())
    assert len(caught.value.examples) == 3
    assert max(taken) < 10_000


def test_a_dead_letter_topic_that_is_the_source_is_refused(bed: Bed) -> None:
    with pytest.raises(UsageError, match="itself"):
        export(bed.config(dead_letter="topic:orders"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_letter_table_that_is_the_target_is_refused(bed: Bed, kind: str) -> None:
    # Keeping the bad records would move the positions of the rows, which then never came.
    bed.fill(3)
    bed.send([b"{bad"])
    target = bed.target(kind)
    with pytest.raises(UsageError, match="itself"):
        export(bed.config(kind, dead_letter=f"{kind}:{target.location}"))


def test_trimmed_records_end_the_export_or_are_stepped_over_and_told(bed: Bed) -> None:
    bed.fill(10)
    export(bed.config())
    bed.fill(10)
    with forebay.connect(bed.bay_directory) as bay:
        bay.trim("orders", partition=0, offset=15)
    with pytest.raises(RecordsTrimmed) as caught:
        export(bed.config())
    assert (caught.value.position, caught.value.earliest) == (11, 15)
    report = export(bed.config(on_data_loss="skip"))
    assert report.skipped == {"orders:0": 4}
    assert [offset for partition, offset in places(bed.rows()) if partition == 0] == [
        *range(1, 11),
        *range(15, 21),
    ]


def test_a_topic_that_was_made_anew_is_not_appended_to_the_old_ones_rows(bed: Bed, tmp_path: Path) -> None:
    bed.fill(10)
    export(bed.config())
    other = Bed(tmp_path / "other")
    other.fill(2)
    config = other.config()
    import dataclasses

    with pytest.raises(UsageError, match="ends at"):
        export(dataclasses.replace(config, target=bed.target("delta")))


def test_two_exports_with_names_share_a_table(bed: Bed) -> None:
    bed.fill(5)
    export(bed.config())
    export(bed.config(name="second"))
    assert len(places(bed.rows())) == 20


def test_new_partitions_are_picked_up(bed: Bed) -> None:
    bed.fill(4)
    export(bed.config())
    with forebay.connect(bed.bay_directory) as bay:
        bay.topics.alter("orders", partitions=3)
    bed.send([order(1)], partition=2)
    assert export(bed.config()).positions["orders:2"] == 2


def test_an_export_may_begin_at_the_end(bed: Bed) -> None:
    bed.fill(4)
    config = bed.config(start="latest", schema=pa.schema([("id", pa.int64())]), new_columns="ignore")
    assert export(config).rows == 0
    bed.fill(2)
    assert export(config).rows == 4


def test_large_backlogs_are_committed_piece_by_piece(bed: Bed) -> None:
    bed.fill(60, appends=6)
    report = export(bed.config(commit_bytes_max=2_000))
    assert report.commits > 2
    assert places(bed.rows()) == all_places(bed, 60)


def test_a_topic_without_records_makes_no_table(bed: Bed) -> None:
    assert export(bed.config()).commits == 0
    assert not Path(bed.target("delta").location).exists()


def test_values_with_a_column_of_ours_are_refused(bed: Bed) -> None:
    bed.send([b'{"_offset": 1}'])
    with pytest.raises(UsageError, match="_offset"):
        export(bed.config(schema=pa.schema([("_offset", pa.int64())])))


def test_raw_values_come_as_they_are(bed: Bed) -> None:
    with forebay.connect(bed.bay_directory) as bay, bay.producer() as out:
        out.send("orders", [b"\x00\xff", b""], keys=[b"k", None], partition=0).result(timeout=60)
    export(bed.config(format="raw"))
    found = bed.rows().sort_by("_offset").to_pylist()
    assert [(row["key"], row["value"]) for row in found] == [(b"k", b"\x00\xff"), (None, b"")]


def test_forever_goes_on_until_it_is_told_to_stop(bed: Bed) -> None:
    bed.fill(3)
    stop, reports = threading.Event(), []

    def each(report: ExportReport) -> None:
        reports.append(report.records)
        if len(reports) == 1:
            bed.fill(2)
        else:
            stop.set()

    export_forever(bed.config(), interval_s=0.1, stop=stop, each=each)
    assert reports == [6, 4]


def test_delta_statistics_hold_what_readers_skip_by(bed: Bed) -> None:
    from deltalake import DeltaTable

    bed.fill(30, appends=1)
    export(bed.config(task_bytes_max=10**9, task_bytes_min=10**9))
    actions = pa.table(DeltaTable(bed.target("delta").location).get_add_actions(flatten=True)).to_pylist()
    [action] = actions
    assert (action["num_records"], action["min._offset"], action["max._offset"]) == (60, 1, 30)
    assert action["min._timestamp"] <= action["max._timestamp"]


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from forebay.kit.retry import RetryPolicy
    from forebay.spark.export import _exporter

    monkeypatch.setattr(_exporter, "CONFLICT_POLICY", RetryPolicy(attempts_max=100, base_ms=5, cap_ms=50))
    yield
