"""Values of the wrong kind: refused on their way in, and never written into a record that nobody can read."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import forebay.aio
from forebay.aio import Bay
from forebay.errors import NotFound, UsageError
from forebay.log import AppendGroup, Fencing, TopicPartition, TopicSettings

Call = Callable[[Bay, Any], Awaitable[object]]
NO_INTEGERS = [1.5, 2.0, True, "2", None, 1 << 70, -1, float("nan")]


def fencing(bay: Bay) -> Fencing:
    parts = bay.parts
    return Fencing(parts.coordinator, bay.writer.catalog, clock=parts.clock, randomness=random.Random(1))


async def append(bay: Bay, **changes: Any) -> None:
    [result] = await bay.writer.append_shared([replace(AppendGroup.of("t", 0, [b"x"]), **changes)])
    result.unwrap()


async def scan(bay: Bay, start: Any) -> None:
    async for _ in bay.reader.scan("t", 0, start, None):
        pass


CALLS: dict[str, Call] = {
    "trim": lambda bay, value: bay.trim("t", partition=0, offset=value),
    "fence": lambda bay, value: fencing(bay).fence("t", 0, epoch=value),
    "epoch": lambda bay, value: append(bay, epoch=value),
    "sequence": lambda bay, value: append(bay, producer_id="p", sequence=value),
    "create": lambda bay, value: bay.topics.create("new", partitions=value),
    "alter": lambda bay, value: bay.topics.alter("t", partitions=value),
    "commit": lambda bay, value: bay.groups.commit("g", {TopicPartition("t", 0): value}),
    "reset": lambda bay, value: bay.groups.reset("g", [TopicPartition("t", 0)], to=value),
    "read": lambda bay, value: bay.reader.read("t", 0, value),
    "scan": scan,
}
ALLOWED = {
    ("fence", None),
    ("epoch", None),
    ("alter", None),
    ("scan", None),
    # Offsets outside of the log are not of the wrong kind.
    ("trim", 1 << 70),
    ("read", 1 << 70),
    ("read", -1),
    ("scan", 1 << 70),
    ("scan", -1),
    ("reset", 1 << 70),
    ("reset", -1),
}


@pytest.mark.parametrize("name", CALLS)
async def test_what_is_no_integer_is_refused_and_the_log_stays_readable(name: str) -> None:
    async with forebay.aio.connect("memory://") as bay:
        await append(bay)
        for value in NO_INTEGERS:
            if not any(name == call and value is given for call, given in ALLOWED):
                with pytest.raises(UsageError):
                    await CALLS[name](bay, value)
        assert [topic.topic for topic in await bay.topics.list()] == ["t"]
        await append(bay)
        assert len(await bay.reader.read("t", 0, 1)) == 2


async def test_integers_of_numpy_are_integers() -> None:
    async with forebay.aio.connect("memory://") as bay:
        await bay.topics.create("t", partitions=np.int64(2))  # type: ignore[arg-type]
        for _ in range(3):
            await append(bay)
        assert len(await bay.reader.read("t", 0, np.int32(2))) == 2  # type: ignore[arg-type]
        assert len(await bay.reader.read("t", np.int64(0), 2)) == 2  # type: ignore[arg-type]
        start, end = np.int64(2), np.uint8(3)
        rows = await (await bay.read("t", partition=np.int16(0), start=start, end=end)).read_all()  # type: ignore[arg-type]
        assert rows.column("offset").to_pylist() == [2]
        with pytest.raises(UsageError, match="belongs to one partition"):
            await bay.read("t", start=start)  # type: ignore[arg-type]
        assert await bay.reader.time_of("t", 0, start) is not None  # type: ignore[arg-type]
        assert (await bay.trim("t", partition=0, offset=np.uint8(2))).earliest == 2  # type: ignore[arg-type]
        assert (await fencing(bay).fence("t", 0, epoch=np.int16(5))).epoch == 5  # type: ignore[arg-type]
        assert (await bay.offsets("t", 0)).epoch == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"retention_ms": 1.5},
        {"retention_bytes": True},
        {"retention_bytes": 1 << 70},
        {"compaction": "no"},
        {"compaction": None},
        {"target_bytes": 2.5},
        {"target_bytes": None},
        {"target_bytes": 1 << 30},
        {"compact_min_age_ms": 0.5},
    ],
)
def test_settings_of_the_wrong_kind_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TopicSettings(**settings)


@pytest.mark.parametrize("producer_id", [1, b"x", "", "x" * 5_000, "\ud800"])
async def test_producer_ids_that_are_no_names_are_refused(producer_id: Any) -> None:
    async with forebay.aio.connect("memory://") as bay:
        with pytest.raises(UsageError):
            await append(bay, producer_id=producer_id, sequence=0)


@pytest.mark.parametrize(
    "columns",
    [
        {"records": None},
        {"records": iter([b"x"])},
        {"timestamps_ms": [None]},
        {"timestamps_ms": [1.5]},
        {"timestamps_ms": [True]},
        {"timestamps_ms": [1 << 70]},
        {"timestamps_ms": ["now"]},
        {"timestamps_ms": [[1]]},
        {"headers": [{1: 2}]},
        {"headers": {"a": b"b"}},
        {"headers": [{"\ud800": b""}]},
    ],
)
async def test_columns_of_the_wrong_kind_are_refused(columns: dict[str, Any]) -> None:
    given = {"records": [b"x"], **columns}
    with pytest.raises(UsageError):
        AppendGroup.of("t", 0, given.pop("records"), **given)


async def test_groups_take_topics_as_a_list_and_know_two_starts() -> None:
    async with forebay.aio.connect("memory://") as bay:
        await append(bay)
        for wrong in ({"topics": "t"}, {"topics": ["a/b"]}, {"topics": ["t"], "start_at": "middle"}):
            with pytest.raises(UsageError):
                bay.groups.consumer("g", **wrong)
        with pytest.raises(NotFound):
            await bay.groups.delete("g")
