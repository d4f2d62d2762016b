from __future__ import annotations

import asyncio
import ctypes
import errno
import threading
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import AccessDenied, StorageFull, Unavailable
from forebay.formats.quiver_frame import WAL_MAGIC
from forebay.formats.quiver_segment import SegmentMeta
from forebay.kit import disk_writes
from forebay.kit.clock import SystemClock
from forebay.quiver import LocalDisk, _local_disk, _segment_file
from forebay.quiver._errors import from_os_error
from forebay.quiver._group_log import GroupLog
from forebay.quiver._log_files import LogSettings
from forebay.quiver._runs import RunSet
from forebay.quiver._segment_file import AHEAD_BYTES, Batch

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 8)), max_size=30)


@given(STEPS)
def test_runs_are_a_set_of_integers(steps: list[tuple[bool, int, int]]) -> None:
    runs, model = RunSet(), set[int]()
    for is_add, first, more in steps:
        if is_add:
            runs.add(first, first + more)
            model |= set(range(first, first + more + 1))
        else:
            runs.remove(first, first + more)
            model -= set(range(first, first + more + 1))
        assert list(runs) == sorted(model)
        assert len(runs) == len(model)
        assert bool(runs) == bool(model)
        assert all((number in runs) == (number in model) for number in range(50))
        missing = {number for first, last in runs.gaps(5, 45) for number in range(first, last + 1)}
        assert missing == set(range(5, 46)) - model
        ends = [last for _, last in runs.runs()]
        assert all(low + 1 < first for low, (first, _) in zip(ends, runs.runs()[1:], strict=False))


@given(st.sets(st.integers(0, 60)), st.integers(0, 60))
def test_end_of_run_is_where_contiguity_ends(numbers: set[int], start: int) -> None:
    runs = RunSet((number, number) for number in numbers)
    end = start
    while end in numbers:
        end += 1
    assert runs.end_of_run(start) == end - 1


async def test_lane_runs_in_order_in_a_thread_of_its_own(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    order: list[int] = []

    def job(at: int) -> str:
        order.append(at)
        return threading.current_thread().name

    names = await asyncio.gather(*(disk.run("wal", partial(job, at)) for at in range(20)))
    assert order == list(range(20))
    assert set(names) == {"quiver-wal"}
    with pytest.raises(OSError, match="told"):
        await disk.run("wal", _fail)
    await disk.close()
    assert not any(thread.name == "quiver-wal" for thread in threading.enumerate())


def _fail() -> None:
    raise OSError(errno.EIO, "told")


def test_many_pieces_are_written_whole_and_over_what_was_there(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    file = disk.open("x", create=True)
    pieces = [bytes([number % 256]) * (number % 7) for number in range(3_000)]
    file.write(0, [b"?" * 10])
    file.write(4, pieces)
    file.sync()
    assert disk.read("x") == b"????" + b"".join(pieces)
    file.truncate(5)
    file.close()
    assert disk.read_range("x", 3, 100) == b"?" + b"".join(pieces)[:1]
    with pytest.raises(FileExistsError):
        disk.open("x", create=True)


def test_what_nobody_waits_for_is_written_whole_and_bit_by_bit(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    for name, pieces in {
        "none": [],
        "large": [bytes(range(256)) * 5_000],
        "many": [bytes([number % 256]) * (number % 700) for number in range(3_000)],
        "even": [b"x" * (1 << 18), b"y" * (1 << 18)],
    }.items():
        file = disk.open(name, create=True)
        file.write_aside(3, pieces)
        file.sync()
        file.close()
        assert disk.read(name) == (b"\0" * 3 + b"".join(pieces) if pieces else b"")


def test_error_of_the_disk_while_it_writes_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(disk_writes, "_sync_file_range", refused)
    file = LocalDisk(tmp_path).open("x", create=True)
    number = errno.ENOSYS
    file.write_aside(0, [b"x" * (1 << 20)])
    number = errno.EIO
    with pytest.raises(OSError, match="error"):
        file.write_aside(0, [b"x" * (1 << 20)])
    file.close()


def test_segment_is_not_in_memory_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LocalDisk(tmp_path)
    disk.make_directory("segments")
    small = pa.record_batch({"number": pa.array(range(500)), "words": pa.array(["some words"] * 500)})
    batches = [Batch(number, 1, small, {}, small.nbytes) for number in range(1, 3_001)]
    template = SegmentMeta(
        segment=1,
        entries=[],
        signal="logs",
        schema_hash=b"",
        rows=0,
        codec="none",
        raw_bytes=0,
        ingested_ms=(0, 0),
        sources=[],
        contexts=[],
        parts=[],
    )
    held: list[int] = []
    before = pa.total_allocated_bytes()
    monkeypatch.setattr(
        _local_disk, "write_out", lambda *given: held.append(pa.total_allocated_bytes() - before)
    )
    info = _segment_file.write(disk, batches, template=template, event_time_column="number")
    assert info.file_bytes > info.raw_bytes > 30_000_000
    assert info.event_ns == (0, 499)
    assert len(held) == info.file_bytes // (512 * 1024)
    assert max(held) < AHEAD_BYTES + 2_000_000


def test_map_stays_readable_when_its_file_is_gone(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    (tmp_path / "x").write_bytes(b"still here")
    view = disk.read("x")
    disk.remove("x")
    disk.remove("x")
    assert bytes(view) == b"still here"
    assert disk.list("") == []


def test_file_system_without_modes_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LocalDisk(tmp_path)
    (tmp_path / "x").write_bytes(b"")
    calls = []

    def chmod(path: Path, mode: int) -> None:
        calls.append(path)
        raise OSError(errno.EPERM, "no modes here")

    monkeypatch.setattr(Path, "chmod", chmod)
    disk.protect("x")
    disk.protect("x")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageFull), (errno.EROFS, AccessDenied), (errno.EIO, Unavailable)],
)
def test_errors_of_the_file_system_are_told_in_our_words(number: int, kind: type[Exception]) -> None:
    told = from_os_error("writing", OSError(number, "why"))
    assert type(told) is kind
    assert told.hint


class _HeldDisk(LocalDisk):
    """Renames wait until they may go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def rename(self, old: str, new: str) -> None:
        self.entered.set()
        assert self.go_on.wait(60)
        super().rename(old, new)


async def test_spare_that_is_made_takes_no_name_from_one_that_becomes_a_log_file(tmp_path: Path) -> None:
    (tmp_path / "wal").mkdir()
    disk = _HeldDisk(tmp_path)
    settings = LogSettings("wal", "wal", "wal", WAL_MAGIC, 65_536, spares_max=1, spare_bytes=8_192)
    log = GroupLog(disk, settings, SystemClock(), on_durable=lambda group: None)
    log.start([], 1, 1)
    await log.prepare()
    item = log.append(1, 0, [b"acknowledged"], 12)
    await asyncio.to_thread(disk.entered.wait, 60)
    await log.prepare()
    disk.go_on.set()
    await item.done
    await log.close()
    await disk.close()
    [file] = (tmp_path / "wal").glob("*.wal")
    assert b"acknowledged" in file.read_bytes()
    assert len(list((tmp_path / "wal").glob("*.spare"))) == 1
