"""A live directory: partial chunks, rolls, retention, restarts, new epochs; cuts by age; lag."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.stream.logs import STREAM, HandClock, expected, read_all, reader_of, tier_of, write_log

from forebay.errors import ForebayError, UsageError
from forebay.formats import osiris_file
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.metrics_views import as_json
from forebay.kit.service import HealthStatus
from forebay.storage import MemoryStore
from forebay.stream import Diverged, Sidecar, StreamWriter, TierConfig, WriterConfig, verify_stream
from forebay.stream._local import LocalLog
from forebay.stream._sidecar import stream_directories


async def test_an_open_fragment_waits_for_its_size_or_its_age(tmp_path: Path) -> None:
    clock = HandClock()
    write_log(tmp_path, 3, clock=clock, per_segment=100, step_ms=0)
    tier = tier_of(
        tmp_path,
        MemoryStore(),
        clock=clock,
        config={"fragment_bytes": 10_000, "fragment_age_ms": 5000, "root_interval_ms": 0},
    )
    await tier.catch_up()
    assert tier.progress.fragments == 0
    assert tier.lag().bytes > 0
    clock.ms += 4999
    await tier.catch_up()
    assert (tier.progress.fragments, tier.lag().age_ms) == (0, 4999)
    clock.ms += 1
    await tier.catch_up()
    assert (tier.progress.fragments, tier.lag().bytes) == (1, 0)


async def test_roots_are_debounced_and_never_forgotten(tmp_path: Path) -> None:
    clock = HandClock()
    store = MemoryStore()
    tier = tier_of(
        tmp_path,
        store,
        clock=clock,
        config={"fragment_bytes": 1, "fragment_age_ms": 0, "root_interval_ms": 1000, "changes_max": 50},
    )
    write_log(tmp_path, 1, clock=clock, step_ms=0)
    await tier.catch_up()
    assert tier.progress.roots == 1  # The first one comes at once: without it there is nothing to read.
    write_log(tmp_path, 3, clock=clock, step_ms=0)
    await tier.catch_up()
    assert (tier.progress.fragments, tier.progress.roots) == (4, 1)
    clock.ms += 999
    write_log(tmp_path, 2, clock=clock, step_ms=0)
    await tier.catch_up()
    assert (tier.progress.fragments, tier.progress.roots) == (6, 1)
    clock.ms += 1
    await tier.catch_up()
    assert (tier.progress.roots, tier.lag().bytes) == (2, 0)
    write_log(tmp_path, 60, clock=clock, step_ms=0)
    await tier.catch_up()
    assert tier.progress.roots >= 3


async def test_a_tier_that_is_stopped_before_every_root_gets_on_all_the_same(tmp_path: Path) -> None:
    clock, store = HandClock(), MemoryStore()
    waits = {"fragment_bytes": 1, "fragment_age_ms": 0, "root_interval_ms": 10_000, "changes_max": 1000}
    for _ in range(4):
        write_log(tmp_path, 2, clock=clock)
        await tier_of(tmp_path, store, clock=clock, config=waits).catch_up()
    reader = reader_of(store)
    await reader.refresh()
    assert reader.next_offset >= 9  # All but what the last of them has uploaded.
    tier = tier_of(tmp_path, store, clock=clock, config=waits)
    await tier.catch_up()
    write_log(tmp_path, 2, clock=clock)
    await tier.catch_up()
    assert tier.lag().bytes > 0
    await tier.settle()
    assert tier.lag().bytes == 0


async def test_a_partial_last_chunk_is_left_until_it_is_whole_and_indexed(tmp_path: Path) -> None:
    write_log(tmp_path, 4, per_segment=100)
    segment = tmp_path / osiris_file.file_name(0, "segment")
    data, index = _read(segment), _read(segment.with_suffix(".index"))
    _write(segment.with_suffix(".index"), index[: 8 + 3 * 29])
    store = MemoryStore()
    tier = tier_of(tmp_path, store)
    last = int.from_bytes(index[8 + 3 * 29 + 24 : 8 + 3 * 29 + 28], "big")
    for cut in (last, last + 10, last + 60, len(data)):
        _write(segment, data[:cut])
        await tier.run_once()
        assert tier.remote.persisted.next_offset == 4
    for part in (15, 28):
        _write(segment.with_suffix(".index"), index[: 8 + 3 * 29 + part])
        await tier.run_once()
        assert tier.remote.persisted.next_offset == 4
    # The index may be ahead of the segment, too: the operating system writes in any order.
    _write(segment.with_suffix(".index"), index)
    _write(segment, data[:-1])
    await tier.run_once()
    assert tier.remote.persisted.next_offset == 4
    _write(segment, data)
    await tier.run_once()
    assert tier.remote.persisted.next_offset == 6


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(5))
async def test_a_log_written_rolled_trimmed_and_reopened_arrives_whole(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    clock, store = HandClock(), MemoryStore()
    epoch = 1
    tier = tier_of(tmp_path, store, clock=clock, config={"fragment_age_ms": 0, "root_interval_ms": 0})
    for _ in range(25):
        action = draw.randrange(5)
        if action <= 2:
            write_log(tmp_path, draw.randint(1, 4), epoch=epoch, clock=clock)
        elif action == 3:
            epoch += 1
            write_log(tmp_path, 1, epoch=epoch, clock=clock)
            tier = tier_of(tmp_path, store, clock=clock, config={"fragment_age_ms": 0, "root_interval_ms": 0})
        else:
            await tier.catch_up()
            _trim(tmp_path, tier, clock, epoch)
        if draw.random() < 0.5:
            await tier.catch_up()
        clock.ms += 1000
    await tier.run_once()
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)
    assert await read_all(reader_of(store, tmp_path)) == expected(0, tier.log.next_offset)
    assert (await verify_stream(reader_of(store).remote)).problems == []


def _trim(path: Path, tier: Any, clock: HandClock, epoch: int) -> None:
    from forebay.stream import RetentionPolicy

    with StreamWriter(path, epoch=epoch, clock=clock, config=WriterConfig(segment_chunks_max=5)) as writer:
        writer.trim(tier.remote.persisted.next_offset, RetentionPolicy(max_bytes=1))


async def test_a_new_epoch_that_cut_the_end_off_under_a_running_tier_is_noticed(tmp_path: Path) -> None:
    clock, store = HandClock(), MemoryStore()
    log = tmp_path / "log"
    write_log(log, 6, clock=clock, per_segment=100)
    _copy(log, tmp_path / "kept")
    write_log(log, 4, clock=clock, per_segment=100, tag="lost")
    tier = tier_of(log, store, clock=clock, config={"fragment_age_ms": 0, "root_interval_ms": 0})
    await tier.catch_up()
    _copy(tmp_path / "kept", log)
    await tier.catch_up()  # Shorter, and the same as far as it goes.
    write_log(log, 20, epoch=2, clock=clock, per_segment=100)
    with pytest.raises(Diverged):
        await tier.catch_up()
    assert tier.health().status is HealthStatus.FAILED
    await tier.repair()
    await tier.run_once()
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)


async def test_a_running_tier_carries_a_new_epoch_into_the_record(tmp_path: Path) -> None:
    clock, store = HandClock(), MemoryStore()
    tier = tier_of(tmp_path, store, clock=clock, config={"fragment_age_ms": 0, "root_interval_ms": 0})
    for epoch in (1, 2, 5):
        write_log(tmp_path, 3, epoch=epoch, clock=clock)
        await tier.catch_up()
        assert tier.remote.held is not None
        assert tier.remote.held.head.epoch == epoch


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


async def test_a_sidecar_takes_up_streams_as_they_come_and_fails_one_by_one(tmp_path: Path) -> None:
    clock, store = HandClock(), MemoryStore()
    write_log(tmp_path / "__a_1700000000000000001", 5, clock=clock)
    (tmp_path / "notes").mkdir()
    config = TierConfig(fragment_age_ms=0, root_interval_ms=0, poll_interval_ms=10)
    sidecar = Sidecar(tmp_path, store, config=config, clock=clock, randomness=random.Random(1))
    rounds: list[tuple[int, int]] = []

    def report(each: Sidecar) -> None:
        rounds.append((len(each.tiers), len(each.errors)))
        if len(rounds) == 2:
            write_log(tmp_path / "__b_1700000000000000002", 5, clock=clock)
            bad = tmp_path / "__c_1700000000000000003"
            write_log(bad, 1, clock=clock)
            (bad / osiris_file.file_name(0, "index")).write_bytes(b"something else, longer than a header")
        if len(rounds) == 5:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await sidecar.follow(report)
    assert rounds[0] == (1, 0)
    assert rounds[-1] == (3, 1)
    assert [tier.lag().bytes for tier in sidecar.tiers if tier.stream not in sidecar.errors] == [0, 0]
    with pytest.raises(ForebayError):
        await sidecar.run_once()
    with pytest.raises(UsageError):
        Sidecar(tmp_path / "none", store, clock=clock, randomness=random.Random(1)).discover()


async def test_lag_is_told_in_figures_and_by_health(tmp_path: Path) -> None:
    clock = HandClock()
    write_log(tmp_path, 20, clock=clock)
    registry = MetricsRegistry()
    alarms = {"lag_bytes_alarm": 500, "lag_ms_alarm": 10_000}
    tier = tier_of(
        tmp_path,
        MemoryStore(),
        clock=clock,
        metrics=registry,
        config=alarms,
    )
    tier.log.refresh()
    assert tier.health().status is HealthStatus.DEGRADED
    clock.ms += 20_000
    assert len(tier.health().reasons) == 2
    await tier.run_once()
    assert tier.health().status is HealthStatus.HEALTHY
    text = str(as_json(registry))
    assert "stream.lag_bytes" in text
    assert STREAM in text


async def test_a_defect_in_one_stream_is_told_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, store = HandClock(), MemoryStore()
    for name in ("__a_1700000000000000001", "__b_1700000000000000002"):
        write_log(tmp_path / name, 5, clock=clock)
    config = TierConfig(fragment_age_ms=0, root_interval_ms=0, poll_interval_ms=10)
    sidecar = Sidecar(tmp_path, store, config=config, clock=clock, randomness=random.Random(1))
    sidecar.discover()
    broken, sound = sidecar.tiers

    async def defect() -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(broken, "step", defect)
    rounds: list[dict[str, Exception]] = []

    def report(each: Sidecar) -> None:
        rounds.append(each.errors)
        if len(rounds) == 2:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await sidecar.follow(report)
    assert {name: str(error) for name, error in rounds[-1].items()} == {broken.stream: "a defect"}
    assert sound.lag().bytes == 0


def test_a_stream_that_vanishes_during_the_look_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker removes the directory of a deleted stream whenever it likes."""
    for name in ("__a_1700000000000000001", "__b_1700000000000000002"):
        write_log(tmp_path / name, 2)
    scandir = os.scandir

    def vanishing(path: Any) -> Any:
        found = list(scandir(path))
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "__a_1700000000000000001")
        return iter(found)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert [path.name for path in stream_directories(tmp_path)] == ["__b_1700000000000000002"]


def test_a_look_reads_only_what_an_index_has_grown_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path, 300, per_segment=1000)
    log = LocalLog(tmp_path)
    log.refresh()
    read: list[int] = []
    pread = os.pread

    def counted(file: int, length: int, at: int) -> bytes:
        read.append(length)
        return pread(file, length, at)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("the whole index is read"))
    log.refresh()
    monkeypatch.undo()
    write_log(tmp_path, 3, per_segment=1000)
    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("the whole index is read"))
    log.refresh()
    # The last record that was known, those behind it, and the header of the last chunk.
    assert read == [29, 48, 4 * 29, 48]
    assert len(log.segments[0].records) == 303


@pytest.mark.parametrize("seed", range(8))
def test_looks_at_a_log_that_grows_and_is_cut_are_those_of_a_first_look(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    log, epoch = LocalLog(tmp_path), 1
    clock = HandClock()
    for _ in range(30):
        if draw.random() < 0.3 and any(tmp_path.iterdir()):
            epoch += 1
            index = max(tmp_path.glob("*.index"))
            os.truncate(index, max(8, index.stat().st_size - draw.randrange(100)))
        write_log(tmp_path, draw.randint(0, 6), epoch=epoch, clock=clock, per_segment=20)
        if draw.random() < 0.7:
            fresh = LocalLog(tmp_path)
            fresh.refresh()
            log.refresh()
            assert [(each.first_id, each.end, each.next_id) for each in log.segments] == [
                (each.first_id, each.end, each.next_id) for each in fresh.segments
            ]
            assert [each.records.tobytes() for each in log.segments] == [
                each.records.tobytes() for each in fresh.segments
            ]
