"""A reader that reads local objects where they lie gives the same records, and trusts them as little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from forebay import aio
from forebay.kit.retry import RetryPolicy
from forebay.log import AppendGroup, DataLost, ReaderConfig
from forebay.storage._api import Range
from forebay.storage._local import LocalStore

RECORDS = [b"%06d" % number + bytes([number % 251]) * 1000 for number in range(1_000)]
MAPPING = ReaderConfig(
    maps_objects=True, attempts_max=1, retry=RetryPolicy(attempts_max=1), cache_bytes_max=0
)


async def fill(data: Path) -> None:
    async with aio.connect(data) as bay:
        await bay.topics.create("t")
        for first in (0, 700):
            group = AppendGroup.of("t", 0, RECORDS[first : first + 700])
            [result] = await bay.writer.append_shared([group])
            result.unwrap()


async def records_of(data: Path, config: ReaderConfig) -> list[bytes]:
    async with aio.connect(data, reader_config=config) as bay:
        found = bay.reader.scan_batches("t", 0)
        return [record async for batch in found for record in batch.batch.records()]


def flip_a_bit_of_the_largest(data: Path) -> None:
    files = (path for path in data.rglob("*") if path.is_file())
    with max(files, key=lambda path: path.stat().st_size).open("r+b") as file:
        file.seek(100_000)
        [byte] = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[memoryview]:
    """What stores gave as views."""
    seen: list[memoryview] = []
    views_at_hand = LocalStore.views_at_hand

    def watched(self: LocalStore, key: str, ranges: Sequence[Range]) -> Sequence[memoryview] | None:
        found = views_at_hand(self, key, ranges)
        seen.extend(found or ())
        return found

    monkeypatch.setattr(LocalStore, "views_at_hand", watched)
    return seen


async def test_mapped_objects_hold_the_same_records(tmp_path: Path, views: list[memoryview]) -> None:
    await fill(tmp_path)
    assert await records_of(tmp_path, MAPPING) == RECORDS
    assert len(views) == 1  # The second append is too small for it.


async def test_nobody_maps_who_did_not_ask_for_it(tmp_path: Path, views: list[memoryview]) -> None:
    await fill(tmp_path)
    assert await records_of(tmp_path, ReaderConfig()) == RECORDS
    assert views == []


async def test_a_flipped_bit_of_a_mapped_object_is_never_served(
    tmp_path: Path, views: list[memoryview]
) -> None:
    await fill(tmp_path)
    flip_a_bit_of_the_largest(tmp_path)
    with pytest.raises(DataLost):
        await records_of(tmp_path, MAPPING)
    assert len(views) == 1
