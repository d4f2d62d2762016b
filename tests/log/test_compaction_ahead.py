"""Reading the next run while this one is written: used where it fits, forgotten where it does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.log.compaction_bed import EAGER, Bed

from forebay.errors import Unavailable
from forebay.kit.metrics import MetricsRegistry
from forebay.log import CountingStore, DataLost, Trimmer
from forebay.log._compaction_rewrite import Rewriter
from forebay.log._uris import key_of
from forebay.storage import ObjectStore

PAIRS = replace(EAGER, entries_max=2)


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Start offsets of the runs whose slices were asked for."""
    starts: list[int] = []
    read = Rewriter.read

    async def noted(self: Rewriter, run: Any, **named: Any) -> Any:
        starts.append(run.start_offset)
        return await read(self, run, **named)

    monkeypatch.setattr(Rewriter, "read", noted)
    return starts


def before_upload(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Do `action` once, when the first object is about to be uploaded and the next run was read."""
    upload = Rewriter.upload

    async def with_action(self: Rewriter, *arguments: Any, **named: Any) -> str:
        monkeypatch.setattr(Rewriter, "upload", upload)
        for _ in range(50):
            await asyncio.sleep(0)
        await action()
        return await upload(self, *arguments, **named)

    monkeypatch.setattr(Rewriter, "upload", with_action)


async def test_every_slice_is_read_once_and_every_run_but_the_first_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed()
    await bed.append(*[2] * 7)
    metrics = MetricsRegistry()
    counted: ObjectStore = CountingStore(bed.store, metrics)
    bed.store = counted  # type: ignore[assignment]
    starts = reads_of(monkeypatch)
    seen: list[list[int]] = []
    before_upload(monkeypatch, lambda: _note(seen, starts))
    results = await bed.compactor(PAIRS).compact_all("t", 0)
    assert [each.entries for each in results] == [2, 2, 2, 1, 0]
    assert seen == [[1, 5]]
    assert starts == [1, 5, 9, 13]
    family = metrics.counter("log.store_requests", "Requests to the store", labels=("operation",))
    counts = {labels[0]: int(series.value) for labels, series in family.series() if series.value}
    assert counts == {"range_get": 7 + 4, "put": 4, "head": 4}
    assert await bed.unreadable() == []


async def _note(seen: list[list[int]], starts: list[int]) -> None:
    seen.append(list(starts))


async def test_the_last_of_so_many_runs_reads_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(*[2] * 7)
    starts = reads_of(monkeypatch)
    results = await bed.compactor(PAIRS).compact_all("t", 0, runs_max=2)
    assert [result.outcome for result in results] == ["compacted", "compacted"]
    assert starts == [1, 5]
    assert (await bed.meta()).cursor == 9


async def test_one_call_reads_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(2, 2, 2, 2)
    starts = reads_of(monkeypatch)
    assert (await bed.compact(PAIRS)).outcome == "compacted"
    assert starts == [1]


@pytest.mark.parametrize("entries", [1, 3, 4])
async def test_a_run_read_ahead_is_forgotten_where_a_rival_has_moved_the_cursor(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Bed()
    await bed.append(*[2] * 6)
    starts = reads_of(monkeypatch)
    rival = replace(EAGER, entries_max=entries)
    before_upload(monkeypatch, lambda: bed.compact(rival))
    results = await bed.compactor(PAIRS).compact_all("t", 0)
    assert results[0].outcome == "raced"
    # Ours, what was read ahead, the rival's, and then from where the rival has left the cursor.
    assert starts[:4] == [1, 5, 1, 2 * entries + 1]
    assert await bed.unreadable() == []
    assert await bed.problems() == []
    assert (await bed.meta()).lag == 0


async def test_a_run_read_ahead_is_forgotten_where_its_offsets_were_trimmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed()
    await bed.append(*[2] * 6)
    trimmer = Trimmer(bed.coordinator, clock=bed.clock, randomness=bed.random)

    starts = reads_of(monkeypatch)
    before_upload(monkeypatch, lambda: trimmer.trim("t", 0, 9))
    results = await bed.compactor(PAIRS).compact_all("t", 0)
    assert starts == [1, 5, 9]
    assert "skipped" in [each.outcome for each in results]
    assert await bed.unreadable() == []
    assert (await bed.meta()).earliest == 9
    assert (await bed.meta()).lag == 0


async def test_a_slice_that_is_missing_ahead_stops_its_own_run_only() -> None:
    bed = Bed()
    await bed.append(2, 2, 2, 2)
    await bed.writer.close()
    third = (await bed.index())[2].entry.data_key
    await bed.store.delete([key_of(bed.store, third)])
    told: list[str] = []
    with pytest.raises(DataLost, match="its index entry names it"):
        await bed.compactor(PAIRS).compact_all("t", 0, progress=lambda each: told.append(each.outcome))
    assert told == ["compacted"]
    assert (await bed.meta()).cursor == 5


async def test_nothing_is_read_on_after_a_call_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(2, 2, 2, 2)
    reading = asyncio.Event()
    get_range = bed.store.get_range
    before = asyncio.all_tasks()

    async def stuck(key: str, start: int, length: int) -> bytes:
        if len(calls) >= 2:
            reading.set()
            await asyncio.Event().wait()
        calls.append(key)
        return await get_range(key, start, length)

    calls: list[str] = []
    monkeypatch.setattr(bed.store, "get_range", stuck)

    async def fail(self: Rewriter, *arguments: Any, **named: Any) -> str:
        await reading.wait()
        raise Unavailable("no upload today", hint="none")

    monkeypatch.setattr(Rewriter, "upload", fail)
    with pytest.raises(Unavailable, match="no upload today"):
        await bed.compactor(PAIRS).compact_all("t", 0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_run_that_would_wait_is_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(2, 2, 2)
    await bed.writer.close()
    starts = reads_of(monkeypatch)
    results = await bed.compactor(replace(PAIRS, entries_min=2)).compact_all("t", 0)
    assert [each.outcome for each in results] == ["compacted", "waiting"]
    assert starts == [1]
