"""Catalogs and stores that do not answer while an export commits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import requests
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ServiceUnavailableError
from sqlalchemy.exc import OperationalError
from tests.spark.export.bed import KINDS, Bed, all_places, order, places

from forebay.errors import FormatError, OutcomeUnknown, Unavailable, UsageError
from forebay.spark.export import ExportReport, export, export_forever
from forebay.spark.export._iceberg import IcebergHandle, IcebergTable

pytestmark = pytest.mark.xdist_group("export")

OUTAGES = [
    requests.ConnectionError("refused"),
    ServiceUnavailableError("503"),
    OperationalError("UPDATE", {}, Exception("database is locked")),
]


def exported(bed: Bed, kind: str, rows: int) -> None:
    """A continuous export, until it has added so many rows."""
    stop, seen = threading.Event(), 0

    def heard(report: ExportReport) -> None:
        nonlocal seen
        seen += report.rows
        if seen >= rows:
            stop.set()

    export_forever(bed.config(kind), interval_s=0.1, stop=stop, each=heard)


@pytest.mark.parametrize("error", OUTAGES, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_outage_while_committing_to_iceberg_is_waited_for(
    bed: Bed, when: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.fill(10)
    export(bed.config("iceberg"))
    bed.fill(10)
    commit, load = SqlCatalog.commit_table, SqlCatalog.load_table
    down = threading.Event()
    refused = 0

    def failing(self: SqlCatalog, *given: Any) -> Any:
        if refused:
            return commit(self, *given)
        if when == "after":
            commit(self, *given)
        down.set()
        raise error

    def loading(self: SqlCatalog, identifier: Any) -> Any:
        nonlocal refused
        if down.is_set():
            refused += 1
            if refused == 2:
                down.clear()
            raise error
        return load(self, identifier)

    monkeypatch.setattr(SqlCatalog, "commit_table", failing)
    monkeypatch.setattr(SqlCatalog, "load_table", loading)
    # Of a commit whose reply was lost nobody hears how many rows it had: the next look finds none.
    exported(bed, "iceberg", 20 if when == "before" else 0)
    assert refused == 2
    assert places(bed.rows("iceberg")) == all_places(bed, 20)


@pytest.mark.parametrize("when", ["before", "after"])
def test_new_columns_of_iceberg_wait_for_the_catalog(
    bed: Bed, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.send([order(1)])
    export(bed.config("iceberg"))
    bed.send([order(2, note="x")])
    commit, left = SqlCatalog.commit_table, [1]

    def failing(self: SqlCatalog, *given: Any) -> Any:
        if not left:
            return commit(self, *given)
        left.clear()
        if when == "after":
            commit(self, *given)
        raise requests.Timeout("no answer")

    monkeypatch.setattr(SqlCatalog, "commit_table", failing)
    exported(bed, "iceberg", 1)
    assert sorted(row["note"] or "" for row in bed.rows("iceberg").to_pylist()) == ["", "x"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_that_nobody_can_tell_of_is_never_said_to_have_failed(
    bed: Bed, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.spark.export import _exporter, _tables
    from forebay.spark.export._errors import CommitUnknown

    bed.fill(10)
    export(bed.config(kind))
    bed.fill(10)
    opened = _tables.open_table

    def unsure(*given: Any) -> Any:
        table = opened(*given)
        load, committed = table.load, threading.Event()

        def loaded() -> Any:
            if committed.is_set():
                raise Unavailable("down", hint="")
            handle = load()
            assert handle is not None
            commit = handle.commit

            def lost(what: Any) -> str:
                commit(what)
                committed.set()
                raise CommitUnknown("commit", reason="no answer")

            monkeypatch.setattr(handle, "commit", lost)
            return handle

        monkeypatch.setattr(table, "load", loaded)
        return table

    with monkeypatch.context() as patch:
        patch.setattr(_exporter, "open_table", unsure)
        with pytest.raises(OutcomeUnknown, match="commit"):
            export(bed.config(kind))
    assert export(bed.config(kind)).rows == 0
    assert places(bed.rows(kind)) == all_places(bed, 20)


def test_an_iceberg_table_without_its_metadata_is_not_waited_for(bed: Bed) -> None:
    bed.send([order(1)])
    export(bed.config("iceberg"))
    for file in (bed.directory / "iceberg").rglob("*.metadata.json"):
        file.unlink()
    with pytest.raises(FormatError, match="has lost metadata"):
        export(bed.config("iceberg"))


def test_numbers_of_dotted_names_are_their_own(bed: Bed) -> None:
    handles = [IcebergHandle.__new__(IcebergHandle) for _ in range(3)]
    for handle, name in zip(handles, ("a", "a.b", "a%2Eb"), strict=True):
        handle._name = name
    found = [handle._property(lane) for handle in handles for lane in ("c:0", "b.c:0")]
    assert len(set(found)) == len(found)
    assert found[1] == "forebay.a.b.c:0"
    bed.send([order(1)])
    for name in ("a", "a.b"):
        assert export(bed.config("iceberg", name=name)).rows == 1
        assert export(bed.config("iceberg", name=name)).rows == 0


def test_columns_that_iceberg_cannot_have_are_no_conflict(bed: Bed) -> None:
    bed.send([order(1, a={"b": 1})])
    export(bed.config("iceberg"))
    bed.send([order(2, **{"a.b": 2})])
    with pytest.raises(UsageError, match="cannot have these columns"):
        export(bed.config("iceberg"))
    assert export(bed.config("iceberg", new_columns="ignore")).rows == 1
    assert IcebergTable(bed.target("iceberg").location, "forebay").load() is not None
