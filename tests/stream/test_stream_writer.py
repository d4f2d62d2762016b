"""The local tier: what a broker would accept, what survives a crash, what may be removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.stream.logs import STREAM, HandClock, expected, read_all, reader_of, tier_of, write_log
from tests.stream.shared import VARY, osiris_files

from forebay.errors import Closed, NotDone, OutcomeUnknown, UsageError
from forebay.formats import osiris_chunk, osiris_file, osiris_tracking
from forebay.formats.osiris_entry import sub_batch
from forebay.storage import MemoryStore
from forebay.stream import RetentionPolicy, StreamWriter, WriterConfig
from forebay.stream._local import LocalLog


def opened(path: Path, **named: int) -> StreamWriter:
    return StreamWriter(path, epoch=1, clock=HandClock(), config=WriterConfig(**named))


def log_of(path: Path) -> LocalLog:
    log = LocalLog(path)
    log.refresh()
    return log


def types_of(path: Path) -> list[list[int]]:
    return [segment.records["type"].tolist() for segment in log_of(path).segments]


async def test_appended_records_are_read_back_in_order(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 23)
    end = log_of(tmp_path / "log").next_offset
    assert await read_all(reader_of(MemoryStore(), tmp_path / "log")) == expected(0, end)


def test_chunk_files_and_index_agree_with_the_format(tmp_path: Path) -> None:
    with opened(tmp_path, segment_chunks_max=3) as writer:
        writer.append([b"a", sub_batch([b"b", b"c"], 1)], filters=[b"red", b""])
        for _ in range(4):
            writer.append([b"x" * 100])
        writer.commit()
    assert types_of(tmp_path) == [[0, 0, 0], [0, 0]]
    for segment in log_of(tmp_path).segments:
        data = segment.path.read_bytes()
        osiris_file.check_segment_header(data)
        walk = osiris_chunk.walk(data, 8)
        assert walk.end == len(data)
        assert (walk.positions == segment.records["position"]).all()
        assert segment.path.name == osiris_file.file_name(int(walk.headers["chunk_id"][0]), "segment")


def test_a_roll_counts_bytes_as_well_and_may_overshoot_by_one_chunk(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes_max=500) as writer:
        for _ in range(10):
            writer.append([b"x" * 200])
    assert [len(types) for types in types_of(tmp_path)] == [2, 2, 2, 2, 2]


def test_a_producer_sequence_is_written_once_also_after_a_restart_and_a_roll(tmp_path: Path) -> None:
    with opened(tmp_path, segment_chunks_max=2) as writer:
        first = writer.append([b"a"], producer=(b"me", 7))
        assert writer.append([b"a"], producer=(b"me", 7)) == type(first)(0, 1, duplicate=True)
        for _ in range(5):
            writer.append([b"other"])
        writer.store_offsets({b"reader": 3})
    with opened(tmp_path, segment_chunks_max=2) as writer:
        assert writer.append([b"a"], producer=(b"me", 6)).duplicate
        assert not writer.append([b"a"], producer=(b"me", 8)).duplicate
        assert writer.tracking.offsets == {b"reader": 3}
    starts = [types[0] for types in types_of(tmp_path)]
    assert starts == [0] + [osiris_chunk.TRACKING_SNAPSHOT] * (len(starts) - 1)


def test_a_snapshot_keeps_the_latest_producers_and_nothing_before_the_stream(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, segment_chunks_max=400) as writer:
        for number in range(300):
            writer.append([b"x"], producer=(b"p%d" % number, 1))
        writer.tracking.offsets = {b"old": 5, b"new": 250}
        tracks = writer.tracking.snapshot(first_offset=100, first_timestamp=0)
    kept = {track.id for track in tracks if track.kind == osiris_tracking.SEQUENCE}
    assert len(kept) == 255
    assert b"p299" in kept
    assert b"p0" not in kept
    assert [track.id for track in tracks if track.kind == osiris_tracking.OFFSET] == [b"new"]


def test_recovery_of_a_segment_torn_anywhere_keeps_what_is_whole(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 4)
    segment = tmp_path / "log" / osiris_file.file_name(0, "segment")
    data, index = segment.read_bytes(), segment.with_suffix(".index").read_bytes()
    ends = [*osiris_chunk.walk(data, 8).positions.tolist()[1:], len(data)]
    for cut in sorted({*range(8, len(data), 9), *ends, *(end - 1 for end in ends)}):
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / segment.name).write_bytes(data[:cut])
        (copy / segment.name).with_suffix(".index").write_bytes(index)
        with opened(copy) as writer:
            whole = sum(end <= cut for end in ends)
            assert len(log_of(copy).segments[0].records if whole else []) == whole
            assert writer.append([b"next"]).chunk_id == [0, 1, 3, 4, 6][whole]
            writer.commit()
        assert log_of(copy).next_offset == [0, 1, 3, 4, 6][whole] + 1
        shutil.rmtree(copy)


def test_recovery_of_an_index_torn_anywhere_drops_what_it_does_not_name(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 3)
    segment = tmp_path / "log" / osiris_file.file_name(0, "segment")
    data, index = segment.read_bytes(), segment.with_suffix(".index").read_bytes()
    for cut in (0, 3, 7, 8, 9, 22, 36, 37, 38, 65, 66, 67, 94):
        segment.write_bytes(data)
        segment.with_suffix(".index").write_bytes(
            index[:cut] + bytes(29 if cut >= 8 and (cut - 8) % 29 == 0 else 0)
        )
        with opened(tmp_path / "log"):
            whole = max(cut - 8, 0) // 29
            assert log_of(tmp_path / "log").next_offset == [0, 1, 3][whole]


def test_a_last_chunk_that_fails_its_checksum_is_cut_off(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 3)
    segment = tmp_path / "log" / osiris_file.file_name(0, "segment")
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    with opened(tmp_path / "log") as writer:
        assert writer.next_offset == 3


def test_files_without_their_pair_and_empty_last_segments_are_removed(tmp_path: Path) -> None:
    write_log(tmp_path, 7, per_segment=3)
    last = log_of(tmp_path).segments[-1].path
    os.truncate(last, 20)
    (tmp_path / osiris_file.file_name(99, "segment")).write_bytes(b"OSIL\0\0\0\1")
    with opened(tmp_path) as writer:
        assert writer.next_offset == log_of(tmp_path).next_offset
    assert len(log_of(tmp_path).segments) == 2
    assert not (tmp_path / osiris_file.file_name(99, "segment")).exists()
    assert not last.exists()


def test_two_writers_cannot_have_one_directory_and_epochs_do_not_fall(tmp_path: Path) -> None:
    with StreamWriter(tmp_path, epoch=2, clock=HandClock()) as writer:
        writer.append([b"a"])
        writer.commit()
        with pytest.raises(NotDone):
            StreamWriter(tmp_path, epoch=3, clock=HandClock())
    with pytest.raises(UsageError):
        StreamWriter(tmp_path, epoch=1, clock=HandClock())
    with pytest.raises(Closed):
        writer.append([b"b"])
    with StreamWriter(tmp_path, epoch=3, clock=HandClock()) as writer:
        writer.append([b"b"])
        writer.commit()
    assert log_of(tmp_path).segments[0].records["epoch"].tolist() == [2, 3]


def test_timestamps_do_not_fall_when_the_clock_steps_back(tmp_path: Path) -> None:
    clock = HandClock(5000)
    with StreamWriter(tmp_path, epoch=1, clock=clock) as writer:
        writer.append([b"a"])
        clock.ms = 100
        writer.append([b"b"])
        writer.commit()
    assert log_of(tmp_path).segments[0].records["timestamp"].tolist() == [5000, 5000]


async def test_only_what_is_committed_is_tiered(tmp_path: Path) -> None:
    store = MemoryStore()
    with StreamWriter(tmp_path, epoch=1, clock=HandClock()) as writer:
        tier = tier_of(tmp_path, store, committed=lambda: writer.commit_offset)
        writer.append([b"a"])
        writer.commit()
        writer.append([b"b"])
        await tier.run_once()
        assert tier.remote.persisted.next_offset == 1
        writer.commit()
        await tier.run_once()
        assert tier.remote.persisted.next_offset == 2


async def test_local_retention_never_removes_what_is_not_in_the_remote_tier(tmp_path: Path) -> None:
    clock = HandClock()
    write_log(tmp_path / "log", 20, clock=clock)
    store = MemoryStore()
    everything = RetentionPolicy(max_bytes=1, max_age_ms=1)
    clock.ms += 1_000_000
    with StreamWriter(tmp_path / "log", epoch=1, clock=clock) as writer:
        assert writer.trim(0, everything) == 0
        tier = tier_of(tmp_path / "log", store)
        await tier.run_once()
        middle = writer.log.segments[1].next_id
        assert writer.trim(middle - 1, everything) == 1
        assert writer.trim(tier.remote.persisted.next_offset, everything) == 2
        assert len(writer.log.segments) == 1
        end = writer.next_offset
    assert await read_all(reader_of(store, tmp_path / "log")) == expected(0, end)
    assert await read_all(reader_of(store)) == expected(0, end)


def test_files_of_a_real_broker_are_opened_and_written_on(tmp_path: Path) -> None:
    shutil.copytree(osiris_files() / VARY, tmp_path / STREAM)
    for path in [tmp_path / STREAM, *(tmp_path / STREAM).iterdir()]:
        path.chmod(0o755)
    before = {path.name: path.read_bytes() for path in (tmp_path / STREAM).iterdir()}
    with StreamWriter(tmp_path / STREAM, epoch=3, clock=HandClock()) as writer:
        assert {path.name: path.read_bytes() for path in (tmp_path / STREAM).iterdir()} == before
        assert writer.next_offset == 2487
        assert writer.tracking.offsets
        writer.append([b"ours"])
        writer.commit()
    assert log_of(tmp_path / STREAM).next_offset == 2488


def test_a_commit_whose_sync_failed_is_unknown_and_never_done_by_a_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed sync the system may forget what it could not write and call the next one a success."""
    writer = StreamWriter(tmp_path, epoch=1, clock=HandClock())
    writer.append([b"one"])
    writer.commit()
    writer.append([b"two"])

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fail)
        with pytest.raises(OutcomeUnknown):
            writer.commit()
    with pytest.raises(Closed):
        writer.commit()
    assert writer.commit_offset == 1


def test_a_new_directory_is_made_durable_with_those_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink())
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    StreamWriter(tmp_path / "streams" / "one", epoch=1, clock=HandClock()).close()
    assert {tmp_path, tmp_path / "streams"} <= set(synced)
