"""The proof: every acknowledged event is in its table, once, as it was sent, or among the dead letters.

What was sent is known from the seed, not from the log, so nothing that the log lost could hide.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.cli.demo.events import Event, Topic, expected_rows
from forebay.cli.demo.pipeline import dead_letters_of, table_of
from forebay.cli.demo.questions import QUESTIONS

__all__ = ["Proof", "ask_duckdb", "prove"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found for one topic. All but the first four numbers must be zero."""

    topic: str
    sent: int
    rows: int
    dead_letters: int
    late: int
    missing: int
    doubled: int
    changed: int
    dead_missing: int
    """Malformed records that are not among the dead letters, or that are there twice."""

    @property
    def ok(self) -> bool:
        """Whether every record is where it belongs, once."""
        return not (self.missing or self.doubled or self.changed or self.dead_missing)


def prove(directory: Path, topic: Topic, events: list[Event], dead: list[bytes]) -> Proof:
    """Compare a table and its dead letters with what was sent."""
    from deltalake import DeltaTable

    names = [part.split()[0] for part in topic.schema.split(", ")]
    table = DeltaTable(str(table_of(directory, topic.name))).to_pyarrow_table(columns=names)
    return compare(topic, events, table, dead)


def compare(topic: Topic, events: list[Event], table: pa.Table, dead: list[bytes]) -> Proof:
    """The comparison itself."""
    wanted = {row["id"]: row for row in expected_rows(events)}
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        found.setdefault(row["id"], []).append(row)
    malformed = Counter(event.value for event in events if event.row is None)
    kept = Counter(dead)
    differ = sum(abs(malformed[value] - kept[value]) for value in malformed.keys() | kept.keys())
    return Proof(
        topic.name,
        len(events),
        table.num_rows,
        len(dead),
        sum(event.late for event in events),
        missing=len(wanted.keys() - found.keys()),
        doubled=table.num_rows - len(found) + len(found.keys() - wanted.keys()),
        changed=sum(rows[0] != wanted[name] for name, rows in found.items() if name in wanted),
        dead_missing=differ,
    )


def ask_duckdb(directory: Path, topics: tuple[Topic, ...]) -> dict[str, list[list[Any]]] | None:
    """The questions, answered by DuckDB; None where it is not installed."""
    try:
        import duckdb
    except ImportError:
        return None
    from deltalake import DeltaTable

    connection = duckdb.connect()
    connection.execute("set timezone = 'UTC'")
    for topic in topics:
        table = DeltaTable(str(table_of(directory, topic.name))).to_pyarrow_table()
        connection.register(topic.name, table)
    try:
        return {
            name: [list(row) for row in connection.sql(sql).fetchall()] for name, sql in QUESTIONS.items()
        }
    finally:
        connection.close()


def same_answers(one: dict[str, list[list[Any]]], other: dict[str, list[list[Any]]]) -> bool:
    """Whether two engines agree, sums up to a cent."""
    for name in QUESTIONS:
        if len(one[name]) != len(other[name]):
            return False
        for left, right in zip(one[name], other[name], strict=True):
            for a, b in zip(left, right, strict=True):
                close = abs(a - b) < 0.02 if isinstance(a, float) or isinstance(b, float) else a == b
                if not close:
                    return False
    return True


def dead_letters(url: str, topic: Topic) -> list[bytes]:
    """The values of a topic's dead letters; none where there is no such topic."""
    from forebay.client import connect
    from forebay.errors import NotFound

    with connect(url) as bay:
        try:
            table = bay.read(dead_letters_of(topic.name)).read_all()
        except NotFound:
            return []
        values: list[bytes] = table.column("value").to_pylist()
        return values
