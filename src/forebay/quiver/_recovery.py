"""Opening a directory: read everything, decide what is true, refuse nothing that a crash can leave.

Order: newest valid checkpoint; `ack.log` behind it; footers of all segments; reconcile; sequence floors; WAL.

**Rules.** A number is never given out twice: floors are above everything any file speaks of. A WAL entry is
replayed unless a durable segment has it, or had it when it was deleted. A segment that should be there and is
not is lost, and said to be; one that nobody speaks of is delivered, unless all its entries are in others,
which is what a deletion or a failed write leaves when it is cut short. Damage to what subscribers did means
redelivery, never a skipped segment. Damaged bytes are put aside under `quarantine/`.

A directory that cannot be *read* is an error: an empty store would hide the data and reuse its numbers.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field

from forebay.errors import FormatError
from forebay.formats import Corrupt, quiver_ack, quiver_wal
from forebay.formats.quiver_ack import Dropped, Finalized, Outcome, Record
from forebay.formats.quiver_frame import (
    ACK_MAGIC,
    FILE_HEADER_BYTES,
    WAL_MAGIC,
    Damage,
    FileHeader,
    Frame,
    decode_file_header,
    scan,
)
from forebay.quiver._ack_state import AckState
from forebay.quiver._acks import RECORD_TYPE, CheckpointFile
from forebay.quiver._aside import total_bytes
from forebay.quiver._disk import Disk, write_file
from forebay.quiver._log_files import SPARE, LogFile, file_name, generation_of
from forebay.quiver._report import RecoveryReport
from forebay.quiver._runs import RunSet
from forebay.quiver._segment_file import SegmentInfo, info_of, read_meta, segment_name

__all__ = ["DIRECTORIES", "ENTRY_TYPE", "Recovered", "ReplayEntry", "recover"]

DIRECTORIES = ("wal", "ack", "segments", "quarantine", "dead")
ENTRY_TYPE = 1
"""Frame type of a batch in the WAL."""
_QUARANTINED = re.compile(r"segment-(\d{16})\.arrow")


@dataclass(frozen=True, slots=True)
class ReplayEntry:
    """A WAL entry that no segment has."""

    sequence: int
    time_ms: int
    entry: quiver_wal.Entry
    segment: int | None = None
    """The number that its segment has, where it has one and no file."""


@dataclass(slots=True)
class Recovered:
    """What was found."""

    state: AckState = field(default_factory=AckState)
    report: RecoveryReport = field(default_factory=RecoveryReport)
    segments: dict[int, SegmentInfo] = field(default_factory=dict)
    unrecorded: list[Finalized] = field(default_factory=list)
    """Segments that `ack.log` does not know yet."""
    checkpoints: list[CheckpointFile] = field(default_factory=list)
    next_checkpoint: int = 1
    ack_files: list[LogFile] = field(default_factory=list)
    ack_spares: list[tuple[str, int]] = field(default_factory=list)
    wal_files: list[LogFile] = field(default_factory=list)
    wal_spares: list[tuple[str, int]] = field(default_factory=list)
    """Names and sizes of WAL files that wait to be used again."""
    next_ack_generation: int = 1
    next_ack_sequence: int = 1
    next_wal_generation: int = 1
    replay: list[ReplayEntry] = field(default_factory=list)
    aside_bytes: int = 0
    """Bytes in `quarantine/` and `dead/`."""
    newest_ms: int = 0
    """The latest time that a file speaks of."""

    def losses(self) -> list[Record]:
        """What subscribers are told of segments that are gone."""
        records: list[Record] = []
        for number in self.report.segments_lost:
            records.extend(
                Outcome(who.name, number, number, "dropped", "lost")
                for who in self.state.subscribers.values()
                if not who.is_resolved(number)
            )
            records.append(Dropped(number, "lost", 0, 0))
        return records


def recover(disk: Disk, *, read_only: bool = False) -> Recovered:
    """Read the directory. With `read_only` nothing is moved or removed. Raises `OSError`."""
    recovery = _Recovery(disk, read_only=read_only)
    recovery.acks()
    recovery.segments()
    recovery.reconcile()
    recovery.wal()
    recovery.found.aside_bytes = total_bytes(disk)
    return recovery.found


class _Recovery:
    def __init__(self, disk: Disk, *, read_only: bool) -> None:
        self.disk = disk
        self.read_only = read_only
        self.found = Recovered()
        self.report = self.found.report
        self._tail: tuple[str, memoryview] | None = None
        """What lies behind the last good frame of all that were read of a log, and a name for it."""

    # The acknowledgement log.

    def acks(self) -> None:
        found, checkpoint = self.found, None
        names = self.disk.list("ack")
        for name, size in reversed(names):
            number = generation_of(name, "ckpt")
            if name.endswith(".tmp"):
                self._remove_temporary(f"ack/{name}")
            if number is None:
                continue
            found.next_checkpoint = max(found.next_checkpoint, number + 1)
            try:
                each = quiver_ack.decode_checkpoint(self.disk.read(f"ack/{name}"))
            except FormatError:
                self.report.checkpoints_damaged += 1
                self._put_aside(f"ack/{name}", f"checkpoint-{number:016d}.ckpt")
                continue
            checkpoint = checkpoint or each
            found.checkpoints.insert(0, CheckpointFile(number, each.generation, size))
        if checkpoint is not None:
            found.state = AckState.from_checkpoint(checkpoint)
        found.state.implied = set()
        self._replay_acks(names, 0 if checkpoint is None else checkpoint.generation)
        found.state.settle_implied(keep=self.report.redelivery_possible)
        # One that began at `latest` while a segment was written counts its number as gone. Should a crash
        # have kept that segment from being, no other may get the number: it would be passed over.
        for who in found.state.subscribers.values():
            found.state.saw_segment(who.high_water)

    def _replay_acks(self, names: list[tuple[str, int]], since: int) -> None:
        found, begins, last = self.found, 0, 0
        for name, size in names:
            generation = generation_of(name, "log")
            if generation is None:
                if (spare := generation_of(name, SPARE)) is not None:
                    found.ack_spares.append((name, size))
                    found.next_ack_generation = max(found.next_ack_generation, spare + 1)
                continue
            file = LogFile(generation, size)
            found.ack_files.append(file)
            found.next_ack_generation = max(found.next_ack_generation, generation + 1)
            tail = self._tail
            frames = self._frames("ack", file, "log", ACK_MAGIC)
            if frames and tail is not None and file.first_sequence > last + 1:
                # The next record would have had the number of one that a crash tore: this one was durable.
                self.report.torn_bytes -= len(tail[1])
                self._damaged(*tail)
            last = file.last_sequence if frames else max(last, file.first_sequence - 1)
            for frame in frames:
                found.next_ack_sequence = max(found.next_ack_sequence, frame.sequence + 1)
                record = self._record(frame, generation)
                if generation >= since and record is not None:
                    found.state.apply(record)
            begins = begins or file.first_sequence
        # Without a checkpoint the log must begin with the first record there ever was. Numbers of files do
        # not tell: a spare may have had the first.
        if since == 0 and (self.report.checkpoints_damaged or begins > 1):
            self.report.redelivery_possible = True
        if self.report.damaged_ranges:
            self.report.redelivery_possible = True

    def _record(self, frame: Frame, generation: int) -> Record | None:
        if frame.type != RECORD_TYPE:
            self.report.unknown_frames += 1
            return None
        try:
            return quiver_ack.decode(frame.body)
        except Corrupt:
            self._damaged(f"ack-{generation:016d}-{frame.offset}", frame.body)
            return None

    # Segments.

    def segments(self) -> None:
        found = self.found
        for name, size in self.disk.list("segments"):
            if name.endswith(".tmp"):
                self._remove_temporary(f"segments/{name}")
                continue
            number = generation_of(name, "arrow")
            if number is None:
                continue
            found.state.next_segment = max(found.state.next_segment, number + 1)
            try:
                meta = read_meta(self.disk, f"segments/{name}", size)
                if meta.segment != number:
                    raise FormatError(f"{name} says that it is segment {meta.segment}")
            except FormatError:
                self.report.segments_quarantined += 1
                self._put_aside(f"segments/{name}", f"segment-{number:016d}.arrow")
                continue
            found.segments[number] = info_of(meta, size)
            found.newest_ms = max(found.newest_ms, meta.ingested_ms[1])
        for name, _ in self.disk.list("quarantine"):
            if match := _QUARANTINED.fullmatch(name):
                found.state.next_segment = max(found.state.next_segment, int(match[1]) + 1)

    def reconcile(self) -> None:
        found, state = self.found, self.found.state
        for number, info in found.segments.items():
            if number in state.live:
                self._cover(info)
        for number in [each for each in found.segments if each not in state.live]:
            self._adopt(number, found.segments[number])
        self._settle_sealed()
        missing = [each for each in state.live if each not in found.segments and each not in state.sealed]
        # A file that nobody needs was deleted on purpose: its outcomes are durable, or nobody is registered.
        who = list(state.subscribers.values())
        lost = [each for each in missing if not all(one.is_resolved(each) for one in who)]
        self.report.segments_lost = lost
        for number in set(missing).difference(lost):
            state.live.remove(number)
        present = RunSet((number, number) for number in sorted((*found.segments, *state.sealed, *lost)))
        for first, last in present.gaps(1, state.next_segment - 1):
            for subscriber in state.subscribers.values():
                subscriber.resolve(first, last)

    def _settle_sealed(self) -> None:
        """Segments that had no file when they were last spoken of. One that got it is as any other. One that
        everybody is done with needs none; nor does one whose entries are in others, because its record could
        not be known to be durable."""
        found, state = self.found, self.found.state
        for number, entries in list(state.sealed.items()):
            is_elsewhere = all(not state.covered.gaps(first, last) for first, last in entries)
            if number in found.segments:
                found.unrecorded.append(Finalized(number, entries))
            elif state.is_resolved(number) or is_elsewhere:
                state.live.remove(number)
            else:
                continue
            del state.sealed[number]
            for first, last in entries:
                state.cover(first, last)

    def _adopt(self, number: int, info: SegmentInfo) -> None:
        """A segment that `ack.log` does not speak of: new, or the rest of something cut short."""
        state = self.found.state
        is_elsewhere = all(not state.covered.gaps(first, last) for first, last in info.entries)
        # Nobody would get one whose number is told to be gone, because its write seemed to fail: the WAL
        # still has its entries, and they get a number of their own.
        if is_elsewhere or state.is_resolved(number):
            del self.found.segments[number]
            self.report.strays_removed += 1
            self._remove(segment_name(number))
            return
        self._cover(info)
        self.found.unrecorded.append(Finalized(number, info.entries))
        state.live.add(number)

    def _cover(self, info: SegmentInfo) -> None:
        for first, last in info.entries:
            self.found.state.cover(first, last)

    # The WAL.

    def wal(self) -> None:
        found, state = self.found, self.found.state
        self._sealed = {number: RunSet(entries) for number, entries in state.sealed.items()}
        present = RunSet()
        for name, size in self.disk.list("wal"):
            generation = generation_of(name, "wal")
            if generation is None:
                spare = generation_of(name, SPARE)
                if spare is not None:
                    found.wal_spares.append((name, size))
                    # The number of its last use is in its old frames, so it must not be given out again.
                    found.next_wal_generation = max(found.next_wal_generation, spare + 1)
                continue
            file = LogFile(generation, size)
            found.wal_files.append(file)
            found.next_wal_generation = max(found.next_wal_generation, generation + 1)
            for frame in self._frames("wal", file, "wal", WAL_MAGIC):
                state.next_entry = max(state.next_entry, frame.sequence + 1)
                if frame.sequence in state.covered:
                    self.report.entries_covered += 1
                elif self._replay(frame, generation):
                    present.add(frame.sequence)
        self._lose_sealed({each.segment for each in found.replay})
        # What is in no file needs no replay: damaged, refused for want of space, or finished long ago.
        for first, last in present.gaps(1, state.next_entry - 1):
            self.report.sequence_gaps += sum(b - a + 1 for a, b in state.covered.gaps(first, last))
            state.cover(first, last)

    def _lose_sealed(self, made_again: set[int | None]) -> None:
        """Segments without a file whose entries are gone as well."""
        state = self.found.state
        for number in [each for each in state.sealed if each not in made_again]:
            del state.sealed[number]
            if state.subscribers:
                self.report.segments_lost.append(number)
            else:
                state.live.remove(number)

    def _segment_of(self, sequence: int) -> int | None:
        return next((number for number, entries in self._sealed.items() if sequence in entries), None)

    def _replay(self, frame: Frame, generation: int) -> bool:
        if frame.type != ENTRY_TYPE:
            self.report.unknown_frames += 1
            return False
        segment = self._segment_of(frame.sequence)
        try:
            # Subscribers get it from memory, and may look at it when its WAL file is written over already.
            entry = quiver_wal.decode(frame.body if segment is None else bytes(frame.body))
        except Corrupt:
            self._damaged(f"wal-{generation:016d}-{frame.offset}", frame.body)
            return False
        self.found.replay.append(ReplayEntry(frame.sequence, frame.time_ns // 1_000_000, entry, segment))
        self.report.entries_replayed += 1
        return True

    # Both logs.

    def _frames(self, directory: str, file: LogFile, suffix: str, magic: bytes) -> list[Frame]:
        data = self.disk.read(f"{directory}/{file_name(file.generation, suffix)}")
        header: FileHeader | None
        try:
            header = decode_file_header(data, magic)
            if header.generation != file.generation:
                raise Corrupt("quiver log", 16, f"generation {header.generation}")
        except FormatError:
            # The name tells the generation as well, so a damaged header costs no frame.
            header = None
        frames: list[Frame] = []
        tail = None
        for each in scan(data, header or FileHeader(magic, file.generation, 0)):
            if isinstance(each, Frame):
                frames.append(each)
            elif each.is_tail:
                self.report.torn_bytes += each.length
                name = f"{directory}-{file.generation:016d}-{each.offset}"
                tail = (name, data[each.offset : each.offset + each.length])
            else:
                self._damaged_range(directory, file.generation, data, each)
        if frames or tail is not None:
            self._tail = tail
        if header is None and frames:
            self._damaged(f"{directory}-{file.generation:016d}-0", data[:FILE_HEADER_BYTES])
        if frames:
            newest_ns = max(each.time_ns for each in frames)
            self.found.newest_ms = max(self.found.newest_ms, newest_ns // 1_000_000)
            file.first_sequence, file.last_sequence = frames[0].sequence, frames[-1].sequence
        elif header is not None:
            file.first_sequence = header.first_sequence
        return frames

    def _damaged_range(self, directory: str, generation: int, data: memoryview, damage: Damage) -> None:
        piece = data[damage.offset : damage.offset + damage.length]
        self._damaged(f"{directory}-{generation:016d}-{damage.offset}", piece)

    # What is put aside.

    def _damaged(self, name: str, piece: memoryview) -> None:
        self.report.damaged_ranges += 1
        self.report.damaged_bytes += len(piece)
        if self.read_only:
            return
        # A full disk must not keep a store from opening: the report says it all the same.
        with contextlib.suppress(OSError):
            write_file(self.disk, f"quarantine/{name}.bin", [piece])
            self.report.quarantined.append(f"quarantine/{name}.bin")

    def _put_aside(self, name: str, new: str) -> None:
        if self.read_only:
            return
        with contextlib.suppress(OSError):
            self.disk.rename(name, f"quarantine/{new}")
            self.report.quarantined.append(f"quarantine/{new}")

    def _remove_temporary(self, name: str) -> None:
        self.report.temporary_removed += 1
        self._remove(name)

    def _remove(self, name: str) -> None:
        if not self.read_only:
            with contextlib.suppress(OSError):
                self.disk.remove(name)
