from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.errors import UsageError
from forebay.quiver import _segment_file
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000)


@pytest.mark.parametrize(
    "named",
    [
        {"context": {"tenant": 1}},
        {"context": {"tenant": None}},
        {"context": {1: "tenant"}},
        {"context": {"tenant": "\ud800"}},
        {"context": ["tenant"]},
        {"signal": None},
        {"signal": "\ud800"},
    ],
)
def test_what_a_replay_could_not_read_is_refused(named: dict[str, Any]) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            with pytest.raises(UsageError):
                await quiver.ingest(batch(0), **named)
            await quiver.ingest(batch(1), context={"tenant": "x"})
            crashed = disk.after_crash(power_loss=True)
        async with store(world, crashed, SLOW) as quiver:
            assert quiver.report.is_clean
            await quiver.flush()
            assert await drain(quiver, "a") == [1]

    simulate(scenario)


@pytest.mark.parametrize("wrong", [pa.table({"a": [1]}), {"a": [1]}, None])
def test_what_is_no_record_batch_is_refused(wrong: Any) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            with pytest.raises(UsageError, match="no record batch"):
                await quiver.ingest(wrong)

    simulate(scenario)


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
@pytest.mark.parametrize("value", [2**62, -(2**62)])
def test_event_time_beyond_nanoseconds_has_no_range_and_stops_nothing(unit: str, value: int) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            far = pa.record_batch({"timestamp": pa.array([value], pa.timestamp(unit))})
            await quiver.ingest(far)
            await quiver.flush()
            delivery = await quiver.next("a", 1)
            assert delivery is not None
            assert delivery.view.meta.event_ns is None
            assert delivery.view.table()["timestamp"].cast(pa.int64()).to_pylist() == [value]

    simulate(scenario)


def test_error_of_any_kind_in_the_writing_of_a_segment_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build, failures = _segment_file.build, [OverflowError("too large")]

    def flaky(*given: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return build(*given, **named)

    monkeypatch.setattr(_segment_file, "build", flaky)

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk) as quiver:
            await quiver.register("a")
            await quiver.ingest(batch(1))
            assert await drain(quiver, "a", timeout_s=5) == [1]
            assert failures == []

    simulate(scenario)


def test_schemas_that_differ_in_the_metadata_of_a_column_are_kept_apart() -> None:
    def tagged(tag: str) -> pa.RecordBatch:
        field = pa.field("a", pa.int64(), metadata={"tag": tag})
        return pa.record_batch([pa.array([1])], schema=pa.schema([field]))

    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            for tag in ("x", "y", "x"):
                await quiver.ingest(tagged(tag))
            crashed = disk.after_crash(power_loss=True)
        async with store(world, crashed, SLOW) as quiver:
            await quiver.flush()
            found = {}
            while (delivery := await quiver.next("a", 1)) is not None:
                found[delivery.view.schema.field("a").metadata[b"tag"]] = delivery.view.meta.rows
                await delivery.ack()
            assert found == {b"x": 2, b"y": 1}

    simulate(scenario)
