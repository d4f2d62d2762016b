"""The event stream of the demo: a shop's orders and clicks, and telemetry of its cold rooms.

Everything is made from a seed, so that whoever holds the seed knows what must come out at the other end, row
by row. As in life some events are late (their own time lies hours before that of their append) and some are
no events at all: broken JSON, empty values, a price in words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

__all__ = ["TOPICS", "Event", "Topic", "expected_rows", "make_events"]

LATE_SHARE: Final = 0.02
MALFORMED_SHARE: Final = 0.004
LATE_HOURS_MAX: Final = 72
"""Hours by which an event is late at most."""
COUNTRIES: Final = ("AT", "CH", "DE", "FR", "IT", "JP", "US")
PAGES: Final = ("/", "/search", "/basket", "/checkout", "/help")
START: Final = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of the demo, and the table it becomes."""

    name: str
    schema: str
    share: float
    """Part of all events."""
    partitions: int = 2
    partition_by: tuple[str, ...] = ()
    key: str = "id"


TOPICS: Final = (
    Topic("orders", "id string, customer long, country string, amount double, event_time timestamp", 0.25),
    Topic("clicks", "id string, customer long, page string, ms long, event_time timestamp", 0.5),
    Topic(
        "telemetry",
        "id string, sensor long, celsius double, event_time timestamp",
        0.25,
        partition_by=("date(event_time)",),
    ),
)


@dataclass(frozen=True, slots=True)
class Event:
    """One record: its bytes, and the row that must come of it."""

    value: bytes
    row: dict[str, Any] | None
    """None: it is malformed."""
    late: bool = False
    partition: int = field(default=0)


def make_events(topic: Topic, count: int, seed: int) -> Iterator[Event]:
    """The events of one topic."""
    chance = random.Random(f"{seed}/{topic.name}")
    for number in range(count):
        partition = number % topic.partitions
        if chance.random() < MALFORMED_SHARE:
            yield Event(_malformed(chance, number), None, partition=partition)
            continue
        late = chance.random() < LATE_SHARE
        at = START + timedelta(milliseconds=number * 7)
        if late:
            at -= timedelta(minutes=chance.randrange(60, LATE_HOURS_MAX * 60))
        row = _row(topic.name, chance, number) | {"event_time": at}
        value = json.dumps(row | {"event_time": at.isoformat().replace("+00:00", "Z")}, separators=(",", ":"))
        yield Event(value.encode(), row, late, partition)


def _row(topic: str, chance: random.Random, number: int) -> dict[str, Any]:
    name = f"{topic}-{number:07d}"
    if topic == "orders":
        return {
            "id": name,
            "customer": chance.randrange(1000),
            "country": chance.choice(COUNTRIES),
            "amount": round(chance.lognormvariate(3, 1), 2),
        }
    if topic == "clicks":
        return {
            "id": name,
            "customer": chance.randrange(1000),
            "page": chance.choice(PAGES),
            "ms": chance.randrange(5, 900),
        }
    return {"id": name, "sensor": chance.randrange(40), "celsius": round(chance.gauss(4, 1.5), 2)}


def _malformed(chance: random.Random, number: int) -> bytes:
    kinds = (
        b'{"id":"cut-%d","customer":7,"am' % number,
        b"",
        b'{"id":"words-%d","event_time":"yesterday"}' % number,
        b"\x00\x01 not json %d" % number,
        b'[{"id":"list-%d"}]' % number,
    )
    return chance.choice(kinds)


def expected_rows(events: list[Event]) -> list[dict[str, Any]]:
    """The rows of the good ones."""
    return [event.row for event in events if event.row is not None]
