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
from forebay.quiver import DirectoryView, Forwarder, Quiver, SegmentView, Selection
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
