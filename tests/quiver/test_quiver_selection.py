"""What may be asked for, and of which column."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from tests.quiver.harness import SMALL

from forebay.errors import UsageError
from forebay.quiver import (
    DirectoryView,
    Forwarder,
    Quiver,
    QuiverCore,
    SegmentView,
    Selection,
    read_forwarded,
)
from forebay.storage import MemoryStore


@pytest.mark.parametrize(
    "wrong",
    [
        {"event_ns": 5},
        {"event_ns": ("1", None)},
        {"event_ns": (1.5, 2)},
        {"ingested_ms": (1,)},
        {"ingested_ms": (1, 2, 3)},
        {"ingested_ms": (2, 1)},
        {"signal": 5},
    ],
)
def test_selection_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Selection(**wrong)


def test_ends_may_be_integers_of_numpy_and_a_list() -> None:
    ends: Any = [np.int64(1), None]
    assert Selection(event_ns=ends).event_ns == ends


async def timed(path: Path) -> Quiver:
    """A store with event times in `ts`."""
    quiver = await Quiver(path, dataclasses.replace(SMALL, event_time_column="ts")).open()
    await quiver.ingest(pa.record_batch({"ts": [1, 2, 3], "word": ["a", "b", "c"]}))
    await quiver.flush()
    return quiver


async def test_rows_are_chosen_by_the_column_that_the_store_was_told_of(tmp_path: Path) -> None:
    quiver = await timed(tmp_path / "q")
    wanted = Selection(event_ns=(2, 2))
    [view] = [view async for view in quiver.read(wanted)]
    assert wanted.rows(view, "ts")["word"].to_pylist() == ["b"]
    for wrong in ("timestamp", "word"):
        with pytest.raises(UsageError, match=wrong) as caught:
            wanted.rows(view, wrong)
        assert "event_time_column" in caught.value.hint
    assert DirectoryView.read(tmp_path / "q").last_rows(5, wanted, "ts") == [{"ts": 2, "word": "b"}]
    await quiver.close()


@pytest.mark.parametrize("prefix", ["..", "a/../b", "a//b", "./a"])
async def test_prefix_that_no_object_can_have_is_refused_before_anybody_is_registered(
    tmp_path: Path, prefix: str
) -> None:
    async with Quiver(tmp_path / "q", SMALL) as quiver:
        with pytest.raises(UsageError):
            Forwarder(quiver, MemoryStore(), source="edge", prefix=prefix)
        Forwarder(quiver, MemoryStore(), source="edge", prefix="/a/b/")
        Forwarder(quiver, MemoryStore(), source="edge", prefix="")


@pytest.mark.parametrize("file_format", ["arrow", "parquet"])
async def test_segments_are_encoded_for_a_bucket_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: Literal["arrow", "parquet"]
) -> None:
    threads = []
    encode = Forwarder._encode

    def watched(self: Forwarder, view: SegmentView) -> bytes | memoryview:
        threads.append(threading.current_thread())
        return encode(self, view)

    monkeypatch.setattr(Forwarder, "_encode", watched)
    quiver = await timed(tmp_path / "q")
    sender = Forwarder(quiver, MemoryStore(), source="edge", file_format=file_format)
    await sender.register()
    assert (await sender.run(0)).rows == 3
    await quiver.close()
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_rows_of_forwarded_segments_are_counted_without_decoding_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiver = await timed(tmp_path / "q")
    sender = Forwarder(quiver, MemoryStore(), source="edge")
    await sender.register()

    def decoded(view: SegmentView) -> pa.Table:
        raise AssertionError("a compressed segment would keep the event loop")

    monkeypatch.setattr(SegmentView, "table", decoded)
    assert (await sender.run(0)).rows == 3
    await quiver.close()


async def test_forwarder_of_a_core_takes_what_the_core_adopted(tmp_path: Path) -> None:
    for core in range(2):
        async with QuiverCore(tmp_path / "q", core, 2) as quiver:
            await quiver.ingest(pa.record_batch({"timestamp": [core]}))
    bucket = MemoryStore()
    async with QuiverCore(tmp_path / "q", 0, 1) as quiver:
        sender = Forwarder(quiver, bucket, source="edge")
        await sender.register()
        await quiver.flush()
        assert (await sender.run(0)).segments == 2
        await quiver.maintain()
        assert quiver.adopted == []
    found = [view.table()["timestamp"].to_pylist() async for view in read_forwarded(bucket)]
    assert sorted(found) == [[0], [1]]
