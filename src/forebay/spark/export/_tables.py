"""The seam to table formats: what an export asks of a table, and what it may rely on.

A table keeps, beside its rows, one number per lane: the position up to which its rows are complete. Rows and
numbers change in the same atomic commit. That is the whole of exactly-once:

    Invariant: for every lane the table holds every row below its number, once, and none at or above it.

    crash before the commit         files nobody names; the next round starts from the old numbers
    crash after the commit          the next round starts from the new numbers
    the reply is lost               the numbers are read again, and say which of the two it was
    two exporters at once           a commit names the state it was planned on; the later one is refused, and
                                    plans again
    a task dies, or runs twice      its files are described once; what is not described is an orphan

A handle is the table at one moment. Numbers are read and committed through the same handle, and a handle is
used for one commit.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from forebay.errors import Unavailable
from forebay.spark.export._clients import Clients
from forebay.spark.export._config import TargetSpec
from forebay.spark.export._errors import CommitConflict, CommitUnknown
from forebay.spark.export._facts import DataFile

__all__ = ["Commit", "Handle", "Table", "commit_once", "open_table"]


@dataclass(frozen=True, slots=True)
class Commit:
    """What one atomic step adds."""

    files: Sequence[DataFile]
    positions: Mapping[str, int]
    """The new number of every lane that moves."""
    expected: Mapping[str, int | None]
    """The number each of them has on the handle; None: none yet."""
    commit_id: str
    """Random, to tell one's own commit from another's."""


class Handle(abc.ABC):
    """A table at one moment."""

    schema: pa.Schema
    """All columns, those it is partitioned by included."""
    partition_by: tuple[str, ...]

    @abc.abstractmethod
    def position(self, lane: str) -> int | None:
        """The number of a lane, or None where the table does not know it."""

    @abc.abstractmethod
    def commit(self, commit: Commit) -> str:
        """Make it visible, all of it; the new version. Raises `CommitConflict` or `CommitUnknown`."""

    @abc.abstractmethod
    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add columns, null for the rows there are; one that is there gets the fields inside that it lacks.
        Raises `CommitConflict`."""

    @abc.abstractmethod
    def live_files(self) -> dict[str, int]:
        """Path, below the table's directory, and rows of every file that is part of the table."""


class Table(abc.ABC):
    """A table by its address."""

    @property
    @abc.abstractmethod
    def store(self) -> str:
        """Where its files go: what `open_store` takes."""

    @abc.abstractmethod
    def load(self) -> Handle | None:
        """The table as it is now; None where there is none."""

    @abc.abstractmethod
    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        """Create it, empty. Where another was faster, that one stays."""


def commit_once(table: Table, handle: Handle, commit: Commit, ends: Mapping[str, int]) -> str:
    """Commit; where the reply is lost, the table's numbers tell. The new version, empty where unknown.

    Raises `CommitConflict` where it is certainly not in, `CommitUnknown` where the table does not answer.
    """
    try:
        return handle.commit(commit)
    except CommitUnknown as unknown:
        try:
            now = table.load()
        except Unavailable:
            raise unknown from None
        if now is None or any((now.position(lane) or 0) < end for lane, end in ends.items()):
            raise CommitConflict(table.store, "its reply was lost, and it is not in") from None
        return ""


def open_table(spec: TargetSpec, name: str, clients: Clients) -> Table:
    """The table of an export called `name`."""
    if spec.kind == "delta":
        from forebay.spark.export._delta import DeltaLake

        return DeltaLake(spec.location, name)
    if spec.kind == "parquet":
        from forebay.spark.export._parquet import ParquetTable

        return ParquetTable(spec.location, name, clients)
    from forebay.spark.export._iceberg import IcebergTable

    return IcebergTable(spec.location, name)
