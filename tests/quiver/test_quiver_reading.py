"""Reads without a claim: everything intact is given, whatever lies beside it."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
from tests.quiver.harness import SMALL, batch, simulate, store
from tests.quiver.sim_disk import SimDisk
from tests.quiver.test_quiver_lifecycle import SLOW, segments

from forebay.errors import Closed, Unavailable
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver import Forwarder, Quiver, Selection, read_forwarded
from forebay.storage import MemoryStore
from forebay.testing.world import World


@pytest.mark.parametrize("offset", [-3, -400])
def test_segment_with_a_damaged_footer_is_left_out_and_told_and_all_others_are_given(
    offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        registry = MetricsRegistry()
        async with store(world, disk, SLOW, metrics=registry) as quiver:
            await segments(quiver, 3)
            disk.flip("segments/0000000000000002.arrow", offset)
            for _ in range(2):
                assert [view.segment async for view in quiver.read()] == [1, 3]
            errors = registry.counter("quiver.read.errors_total", "Reads of a segment that failed")
            assert errors._only().value == 2

    simulate(scenario)
    said = [each.getMessage() for each in caplog.records]
    assert sum(each.startswith("quiver.segment.unreadable: segment 2: ") for each in said) == 2


def test_read_that_fails_for_another_reason_is_no_incomplete_answer() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await segments(quiver, 3)
            disk.faults.append(("read", "0000000000000002.arrow", errno.EMFILE))
            with pytest.raises(Unavailable):
                [view async for view in quiver.read()]
            assert len([view async for view in quiver.read()]) == 3

    simulate(scenario)


async def test_read_ends_when_the_store_is_closed(tmp_path: Path) -> None:
    quiver = await Quiver(tmp_path / "q", SMALL).open()
    await segments(quiver, 3)
    views = quiver.read()
    assert (await anext(views)).segment == 1
    await quiver.close()
    with pytest.raises(Closed):
        await anext(views)


async def test_objects_beside_forwarded_segments_and_damaged_ones_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = MemoryStore()
    async with Quiver(tmp_path / "q", SMALL) as quiver:
        await segments(quiver, 3)
        sender = Forwarder(quiver, bucket, source="edge")
        await sender.register()
        assert (await sender.run(0)).segments == 3
    keys = [info.key async for info in bucket.list("quiver/")]
    damaged = bytearray((await bucket.get(keys[1])).data)
    damaged[-3] ^= 1
    await bucket.put(keys[1], bytes(damaged))
    await bucket.put("quiver/signal=logs/date=2026-99-01/other.arrow", b"something else")
    await bucket.put("quiver/empty.arrow", b"")
    wanted = Selection(ingested_ms=(0, None))
    with caplog.at_level(logging.WARNING, "forebay.quiver"):
        found = [view.segment async for view in read_forwarded(bucket, selection=wanted)]
    assert found == [1, 3]
    said = "\n".join(each.getMessage() for each in caplog.records)
    assert all(each in said for each in (keys[1], "other.arrow", "empty.arrow"))
    assert batch(0).num_rows * 2 == sum(
        [view.meta.rows async for view in read_forwarded(bucket, selection=wanted)]
    )


async def test_forwarded_object_that_goes_during_the_read_is_left_out(tmp_path: Path) -> None:
    bucket = MemoryStore()
    async with Quiver(tmp_path / "q", SMALL) as quiver:
        await segments(quiver, 3)
        sender = Forwarder(quiver, bucket, source="edge")
        await sender.register()
        await sender.run(0)
    keys = [info.key async for info in bucket.list("quiver/")]
    found = []
    async for view in read_forwarded(bucket):
        found.append(view.segment)
        await bucket.delete([keys[1]])
    assert found == [1, 3]
