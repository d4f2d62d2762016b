"""Putting a store right while nobody has it open.

Opening a store needs no repair: it leaves out what is damaged and goes on. Repair does the same for good:
the logs are read and written anew, damaged parts of segments are taken out of their files and put into
`quarantine/`, so that later readings, and other readers of the Arrow files, meet whole ones. A subscriber
that no process will ever serve again can be removed with it.

**Crash points.** Each segment is replaced by a rename; a crash leaves the old file or the new one, and the
damaged bytes are in `quarantine/` before. Repairing twice does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from forebay.errors import FormatError, NotFound
from forebay.formats.quiver_ack import Floor
from forebay.formats.quiver_segment import Encoding, Source
from forebay.quiver._config import QuiverConfig
from forebay.quiver._disk import Disk, Piece, write_file
from forebay.quiver._errors import DirectoryInUse, UnknownSubscriber
from forebay.quiver._inspect import DirectoryView
from forebay.quiver._local_disk import LocalDisk
from forebay.quiver._log_files import generation_of
from forebay.quiver._quiver import Quiver
from forebay.quiver._reading import SegmentView
from forebay.quiver._recovery import DIRECTORIES
from forebay.quiver._report import RecoveryReport
from forebay.quiver._segment_file import segment_name

__all__ = ["UNBOUNDED", "Repaired", "repair", "whole_pieces"]

UNBOUNDED: Final = QuiverConfig(size_cap_bytes=1 << 60, wal_spare_files=0, dead_letter_bytes_max=1 << 50)
"""For tools: the settings of the store are not known there, and nothing may be dropped for want of space."""

OPENINGS_MAX: Final = 4
"""Openings after which a repair ends, whatever is still to be seen of the damage."""


@dataclass(slots=True)
class Repaired:
    """What was done."""

    report: RecoveryReport
    """What opening the store found."""
    rewritten: list[int] = field(default_factory=list)
    """Segments that are whole again, without their damaged parts."""
    put_aside: list[int] = field(default_factory=list)
    """Segments of which nothing could be read; subscribers see them as `dropped`, reason `lost`."""
    rows_lost: int = 0
    unregistered: list[str] = field(default_factory=list)


async def repair(path: str | os.PathLike[str], *, unregister: Sequence[str] = ()) -> Repaired:
    """Repair a store. Raises `DirectoryInUse` where it is open, `NotFound` where there is none."""
    root = Path(path)
    if not all((root / each).is_dir() for each in DIRECTORIES):
        raise NotFound(f"Quiver store {root}", hint="name the directory that holds wal/, ack/ and segments/")
    async with Quiver(root, UNBOUNDED) as quiver:
        done = Repaired(quiver.report)
        for name in unregister:
            if not await quiver.unregister(name):
                there = ", ".join(each.name for each in quiver.stats().subscribers)
                raise UnknownSubscriber(name, hint=f"there is {there or 'none'}")
            done.unregistered.append(name)
    disk = LocalDisk(root)
    # The store is closed by now; the lock keeps it so.
    try:
        disk.lock()
    except BlockingIOError as error:
        raise DirectoryInUse(str(root)) from error
    try:
        for name, _ in disk.list("segments"):
            # What else lies there is not the store's.
            if (number := generation_of(name, "arrow")) is not None:
                _repair_segment(disk, number, done)
        for name, _ in disk.list("dead"):
            _repair_dead_letter(disk, name)
    finally:
        disk.unlock()
    for _ in range(OPENINGS_MAX):
        if DirectoryView.read(root).found.report.is_clean:
            break
        # An opening tells the subscribers what is lost. Damaged files of ack.log stay until the older of two
        # checkpoints needs them no more. It needs the file of the newest record, so there has to be one.
        async with Quiver(root, UNBOUNDED) as quiver:
            state = quiver._acks.state
            await quiver._acks.commit([Floor(state.next_segment, state.next_entry)])
    return done


def _repair_segment(disk: Disk, number: int, done: Repaired) -> None:
    name = segment_name(number)
    data = disk.read(name)
    try:
        view = SegmentView(data)
    except FormatError:
        _put_aside(disk, name, number, done)
        return
    if not view.bad_parts:
        return
    done.rows_lost += sum(view.meta.parts[each].rows for each in view.bad_parts)
    if len(view.bad_parts) == len(view.meta.parts):
        _put_aside(disk, name, number, done)
        return
    for each in view.bad_parts:
        part = view.meta.parts[each]
        piece = data[part.offset : part.offset + part.length]
        _write(disk, f"quarantine/part-{number:016d}-{part.offset}.bin", [piece])
    disk.sync_directory("quarantine")
    temporary = f"{name}.tmp"
    _write(disk, temporary, whole_pieces(view))
    disk.protect(temporary)
    disk.rename(temporary, name)
    disk.sync_directory("segments")
    done.rewritten.append(number)


def _repair_dead_letter(disk: Disk, name: str) -> None:
    """Nobody is waiting for it, so it is not rewritten: a person who wants its rows finds all there is."""
    try:
        is_whole = not SegmentView(disk.read(f"dead/{name}")).bad_parts
    except FormatError:
        is_whole = False
    if not is_whole:
        disk.rename(f"dead/{name}", f"quarantine/dead-{name}")
        disk.sync_directory("quarantine")
        disk.sync_directory("dead")


def whole_pieces(view: SegmentView) -> list[Piece]:
    """A segment file with the good parts of a damaged one."""
    kept = view.row_indices()
    ends, end = [], 0
    for source in view.meta.sources:
        end += source.rows
        ends.append(end)
    begin, sources = 0, []
    for source, end in zip(view.meta.sources, ends, strict=True):
        rows = int(((kept >= begin) & (kept < end)).sum())
        sources.append(Source(rows, source.time_ms, source.context))
        begin = end
    batches = list(view.batches())
    meta = msgspec.structs.replace(view.meta, sources=sources, rows=len(kept))
    return list(Encoding.of(meta, batches))


def _put_aside(disk: Disk, name: str, number: int, done: Repaired) -> None:
    disk.rename(name, f"quarantine/segment-{number:016d}.arrow")
    disk.sync_directory("quarantine")
    disk.sync_directory("segments")
    done.put_aside.append(number)


def _write(disk: Disk, name: str, pieces: Sequence[Piece]) -> None:
    disk.remove(name)
    write_file(disk, name, pieces)
