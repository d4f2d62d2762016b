"""Held segments when a store ends or runs short, and what is said of them to others than subscribers."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from tests.quiver.harness import batch, numbers
from tests.quiver.test_quiver_held import LONG, following, got, segment

from forebay.quiver import Quiver


async def sealed(quiver: Quiver, number: int) -> None:
    """Ingest a segment, and wait until it is there: held, where everybody keeps up."""
    there = len(quiver._segments)
    await segment(quiver, number)
    while len(quiver._segments) == there:
        await quiver._finalizer.changed()


@pytest.mark.parametrize("is_sealed", [False, True], ids=["open", "sealed"])
async def test_reader_of_what_was_replayed_is_not_shown_later_batches(
    tmp_path: Path, is_sealed: bool
) -> None:
    """The WAL file in which it lies is written over once the segment is a file."""
    config = dataclasses.replace(LONG, segment_open_ms=86_400_000, segment_hold_ms=60_000)
    async with Quiver(tmp_path / "1", config) as quiver:
        await following(quiver, "a")
        await (sealed(quiver, 7) if is_sealed else quiver.ingest(batch(7, plain=True)))
        assert bool(quiver._finalizer.held) == is_sealed
        shutil.copytree(tmp_path / "1", tmp_path / "2")
    async with Quiver(tmp_path / "2", dataclasses.replace(config, segment_open_ms=50)) as quiver:
        quiver.activate("a")
        slow = await got(quiver, "a")
        assert numbers(slow) == [7]
        await quiver.flush()
        for number in range(100, 150):
            await segment(quiver, number)
            await quiver.maintain()
        assert numbers(slow) == [7]
