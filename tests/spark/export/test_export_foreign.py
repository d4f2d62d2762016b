"""Tables that somebody else has changed, or made: what an export cannot keep to is refused in a sentence."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import IntegerType, TimestampType
from tests.spark.export.bed import KINDS, Bed, order

from forebay.errors import NotDone, Unsupported, UsageError
from forebay.spark.export import export, export_forever, orphans

pytestmark = pytest.mark.xdist_group("export")


def delta(bed: Bed) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(bed.target("delta").location)


def with_constraint(bed: Bed) -> None:
    delta(bed).alter.add_constraint({"positive": "id > 0"})


def with_column_not_null(bed: Bed) -> None:
    from deltalake import Field
    from deltalake.schema import PrimitiveType

    delta(bed).alter.add_columns([Field("extra", PrimitiveType("long"), nullable=False)])


@pytest.mark.parametrize(
    ("change", "rule"), [(with_constraint, "positive"), (with_column_not_null, "extra not null")]
)
def test_rules_of_a_delta_table_are_not_broken_without_a_word(
    bed: Bed, change: Callable[[Bed], None], rule: str
) -> None:
    bed.send([order(1)])
    export(bed.config())
    change(bed)
    bed.send([order(-2)])
    with pytest.raises(UsageError, match=f"rules that an export does not look at: {rule}"):
        export(bed.config())
    assert delta(bed).count() == 1


def test_a_delta_table_that_cannot_be_written_is_no_conflict(bed: Bed) -> None:
    """A continuous export tried it again for ever."""
    from deltalake import TableFeatures

    bed.send([order(1)])
    export(bed.config())
    delta(bed).alter.add_feature(TableFeatures.RowTracking, allow_protocol_versions_increase=True)
    bed.send([order(2)])
    with pytest.raises(Unsupported, match="Unsupported table features required"):
        export_forever(bed.config(), interval_s=0.1, stop=threading.Event())


def with_naive_time(table: Any) -> None:
    with table.update_schema() as change:
        change.add_column("extra", TimestampType())


def with_required(table: Any) -> None:
    with table.update_schema(allow_incompatible_changes=True) as change:
        change.add_column("extra", IntegerType(), required=True)


def with_buckets(table: Any) -> None:
    with table.update_spec() as change:
        change.add_field("who", BucketTransform(4), "buckets")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_naive_time, "extra is a timestamp without a zone"),
        (with_required, "extra is required"),
        (with_buckets, r"it is partitioned by bucket\[4\] of who"),
    ],
)
def test_an_iceberg_table_that_takes_no_files_is_refused_in_a_sentence(
    bed: Bed, change: Callable[[Any], None], why: str
) -> None:
    bed.send([order(1)])
    export(bed.config("iceberg"))
    folder = bed.directory / "iceberg"
    catalog = load_catalog(
        "forebay", type="sql", uri=f"sqlite:///{folder / 'catalog.db'}", warehouse=f"file://{folder}"
    )
    change(catalog.load_table("db.table"))
    bed.send([order(2)])
    with pytest.raises(UsageError, match=why):
        export(bed.config("iceberg"))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_iceberg_would_round_are_no_partitions_there(bed: Bed, kind: str) -> None:
    """Its readers looked for 0.1 among the partitions, and found none."""
    bed.send([order(1, share=0.1)])
    config = bed.config(kind, partition_by=("share",))
    if kind == "iceberg":
        with pytest.raises(UsageError, match="'share', a number that Iceberg keeps rounded"):
            export(config)
    else:
        assert export(config).rows == 1


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_somebody_else_added_are_filled_where_a_record_has_them(bed: Bed, kind: str) -> None:
    bed.send([order(1)])
    export(bed.config(kind))
    if kind == "delta":
        from deltalake import Field
        from deltalake.schema import PrimitiveType

        delta(bed).alter.add_columns([Field("extra", PrimitiveType("integer"))])
    elif kind == "iceberg":
        from forebay.spark.export._iceberg import IcebergTable

        loaded = IcebergTable(bed.target(kind).location, "forebay").load()
        assert loaded is not None
        with loaded._table.update_schema() as change:
            change.add_column("extra", IntegerType())
    bed.send([order(2, extra=7), order(3), order(4, extra="seven")])
    report = export(bed.config(kind, dead_letter="topic:dead"))
    assert (report.rows, report.dead_letters) == (2, 1)
    found = {row["id"]: row.get("extra") for row in bed.rows(kind).to_pylist()}
    assert found == {1: None, 2: 7, 3: None}


@pytest.mark.parametrize("kind", ["delta", "parquet"])
@pytest.mark.parametrize("when", ["planned", "written"])
def test_a_table_that_is_deleted_while_it_is_exported_to_is_made_anew(bed: Bed, kind: str, when: str) -> None:
    """What delta-rs says then was no error of ours, and ended a continuous export as a defect. Parquet got a
    commit without those before it, which ended every export from then on."""
    bed.fill(3)
    export(bed.config(kind))
    bed.fill(3)
    deleted: list[str] = []

    def step(what: str, *_: int) -> None:
        if what == when and not deleted:
            deleted.append(what)
            shutil.rmtree(bed.target(kind).location)

    assert export(bed.config(kind), step=step).rows == 12
    assert bed.rows(kind).num_rows == 12


def test_a_parquet_table_that_another_made_anew_meanwhile_is_that_one(bed: Bed) -> None:
    """Its last number was lower, so that the commit made a gap."""
    bed.fill(3)
    for _ in range(3):
        bed.fill(3)
        export(bed.config("parquet"))
    bed.fill(3)
    others: list[int] = []

    def step(what: str, *_: int) -> None:
        if what == "written" and not others:
            shutil.rmtree(bed.target("parquet").location)
            others.append(export(bed.config("parquet")).rows)

    report = export(bed.config("parquet"), step=step)
    assert (others, report.rows, report.conflicts) == ([30], 0, 1)
    assert bed.rows("parquet").num_rows == 30


def test_a_parquet_table_that_is_not_all_deleted_says_what_to_do(bed: Bed) -> None:
    bed.fill(3)
    for _ in range(2):
        bed.fill(3)
        export(bed.config("parquet"))
    commits = sorted(Path(bed.target("parquet").location, "_forebay", "commits").iterdir())
    for commit in commits[:-1]:
        commit.unlink()
    with pytest.raises(NotDone, match="number 2 is there: it was deleted while an export") as caught:
        export(bed.config("parquet"))
    assert "everything under _forebay/commits/" in caught.value.hint
    commits[-1].unlink()
    assert export(bed.config("parquet")).rows == 18


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_is_not_there_has_no_orphans(bed: Bed, kind: str) -> None:
    assert orphans(bed.target(kind)) == []


def test_a_delta_table_that_another_made_at_the_same_moment_stays(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to be none that can be read, with the advice to restore its log."""
    from deltalake import transaction
    from deltalake.exceptions import CommitFailedError

    make = transaction.create_table_with_add_actions

    def late(*words: Any, **options: Any) -> None:
        make(*words, **options)
        raise CommitFailedError("Protocol changed since last commit")

    monkeypatch.setattr(transaction, "create_table_with_add_actions", late)
    bed.send([order(1)])
    assert export(bed.config()).rows == 1


def test_an_iceberg_catalog_that_another_made_at_the_same_moment_is_opened(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg import catalog
    from sqlalchemy.exc import OperationalError

    load, calls = catalog.load_catalog, []

    def late(*words: Any, **options: Any) -> Any:
        calls.append(words)
        found = load(*words, **options)
        if len(calls) == 1:
            raise OperationalError("CREATE TABLE", None, Exception("table iceberg_tables already exists"))
        return found

    monkeypatch.setattr(catalog, "load_catalog", late)
    bed.send([order(1)])
    assert (export(bed.config("iceberg")).rows, len(calls)) == (1, 2)
