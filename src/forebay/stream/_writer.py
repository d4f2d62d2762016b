"""The local tier of a stream of our own: entries become chunks, chunks become segments, in the Osiris format.

State: the open segment and index, the next offset, the tracking. Invariants: chunk ids are contiguous, and
timestamps never fall; the index never names a chunk that is not in the segment; one process writes a
directory at a time, which a lock on the directory itself ensures.

A chunk is written with one write to the segment and then one to the index. `commit` makes both durable, in
that order, and moves the commit offset; only what lies below it may be acknowledged, read by consumers or
tiered. A crash between any two of these steps leaves an end that `recover` cuts off, never beyond the commit
offset.

What leaves the directory: `trim` removes whole segments from the old end, never the one being written, and
never one that the remote tier does not hold by a persisted root.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from forebay.errors import Closed, NotDone, OutcomeUnknown, UsageError
from forebay.formats import osiris_bloom, osiris_chunk, osiris_file, osiris_tracking
from forebay.formats.osiris_chunk import TRACKING_DELTA, TRACKING_SNAPSHOT, USER
from forebay.formats.osiris_entry import Entry
from forebay.formats.osiris_file import FILE_HEADER_BYTES, INDEX_HEADER, INDEX_RECORD_BYTES, SEGMENT_HEADER
from forebay.formats.osiris_tracking import OFFSET, SEQUENCE, Track
from forebay.kit.clock import Clock
from forebay.stream._config import RetentionPolicy
from forebay.stream._local import LocalLog
from forebay.stream._pressure import LagGate
from forebay.stream._recovery import recover
from forebay.stream._tracking import Tracking

__all__ = ["Appended", "StreamWriter", "WriterConfig"]


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """How a local log is written."""

    segment_bytes_max: int = 500_000_000
    """Bytes from which on the next chunk opens a new segment. 1 to 2 GiB, default 500,000,000."""
    segment_chunks_max: int = 256_000
    """Chunks from which on it does. At least 1, default 256,000."""
    filter_bytes: int = 16
    """Bytes of a chunk's bloom filter, where its entries have filter values. 16 to 255, default 16."""

    def __post_init__(self) -> None:
        if not (
            1 <= self.segment_bytes_max <= 1 << 31
            and self.segment_chunks_max >= 1
            and osiris_bloom.BYTES_MIN <= self.filter_bytes <= osiris_bloom.BYTES_MAX
        ):
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")


@dataclass(frozen=True, slots=True)
class Appended:
    """Where an append went."""

    chunk_id: int
    next_offset: int
    duplicate: bool = False
    """True: the producer's sequence was known already, and nothing was written."""


class StreamWriter:
    """The one writer of a local log.

    With a `gate` that its tier shares, an append is refused with `Backpressure` where too much is not in the
    bucket yet; `await writer.admit()` before it also slows down on the way there.
    """

    def __init__(
        self,
        path: Path,
        *,
        epoch: int,
        clock: Clock,
        config: WriterConfig | None = None,
        gate: LagGate | None = None,
    ) -> None:
        if not 0 <= epoch < 1 << 63:
            raise UsageError(f"epoch {epoch}", hint="epochs count up from 0")
        self.path = path
        self.epoch = epoch
        self._config = config or WriterConfig()
        self._clock = clock
        self._gate = gate
        _make(path)
        self._lock = _locked(path)
        self._segment = self._index = -1
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        recover(self.path)
        self.log = LocalLog(self.path)
        self.log.refresh()
        if self.log.epoch > self.epoch:
            raise UsageError(
                f"{self.path.name!r} was written by epoch {self.log.epoch}",
                hint=f"open it with that epoch or a higher one, not with {self.epoch}",
            )
        self.tracking = Tracking()
        self.next_offset = self.log.next_offset
        self._timestamp = -1
        segments = self.log.segments
        if segments:
            last = segments[-1]
            self._timestamp = int(last.records["timestamp"][-1])
            data = last.read(0, last.end)
            for position in last.records["position"].tolist():
                self.tracking.apply(osiris_chunk.decode(data, position))
        for segment in segments if self._gate is not None else ():
            assert self._gate is not None
            self._gate.wrote(segment.next_id, segment.data_bytes, int(segment.records["timestamp"][0]))
        parsed = [osiris_file.parse_file_name(file.name) for file in self.path.iterdir()]
        firsts = [name[0] for name in parsed if name is not None]
        self._use(max(firsts, default=0), fresh=not firsts)
        self._sync()
        self.commit_offset = self.next_offset

    # Appending.

    def append(
        self,
        entries: Sequence[Entry],
        *,
        filters: Iterable[bytes] = (),
        producer: tuple[bytes, int] | None = None,
    ) -> Appended:
        """Write one chunk. It counts once `commit` has returned.

        `filters` are the filter values of the entries, empty for an entry without. `producer` is a name and
        the sequence of this append: one that is not higher than the last of that name is not written again.
        """
        self._check_open()
        if self._gate is not None:
            self._gate.check()
        trailer = b""
        if producer is not None:
            name, sequence = producer
            known = self.tracking.sequences.get(name)
            if known is not None and sequence <= known[1]:
                return Appended(known[0], self.next_offset, duplicate=True)
            trailer = osiris_tracking.encode([Track(SEQUENCE, name, sequence)])
        values = list(filters)
        bloom = osiris_bloom.build(values, self._config.filter_bytes) if values else b""
        self._roll_if_due()
        appended = self._write(entries, USER, bloom=bloom, trailer=trailer)
        if producer is not None:
            self.tracking.sequences[producer[0]] = (appended.chunk_id, producer[1])
        return appended

    async def admit(self) -> None:
        """Wait as long as the lag of the tier asks for, or raise `Backpressure`. Without a gate at once."""
        if self._gate is not None:
            await self._gate.admit()

    def store_offsets(self, offsets: Mapping[bytes, int]) -> Appended:
        """Remember how far consumers are, in a chunk of its own."""
        self._check_open()
        blocks = osiris_tracking.encode([Track(OFFSET, name, value) for name, value in offsets.items()])
        self._roll_if_due()
        appended = self._write([blocks], TRACKING_DELTA)
        self.tracking.offsets |= offsets
        return appended

    def commit(self) -> int:
        """Make everything written durable; the commit offset, behind the last record that counts."""
        self._check_open()
        if self.commit_offset != self.next_offset:
            self._sync()
            self.commit_offset = self.next_offset
        return self.commit_offset

    def _write(
        self, entries: Sequence[Entry], kind: int, *, bloom: bytes = b"", trailer: bytes = b""
    ) -> Appended:
        chunk_id = self.next_offset
        self._timestamp = max(self._clock.now_ms(), self._timestamp)
        chunk = osiris_chunk.encode(
            entries,
            chunk_id=chunk_id,
            timestamp=self._timestamp,
            epoch=self.epoch,
            chunk_type=kind,
            bloom=bloom,
            trailer=trailer,
        )
        records = osiris_chunk.decode_header(chunk).records
        row = chunk_id.to_bytes(8, "big") + self._timestamp.to_bytes(8, "big", signed=True)
        row += self.epoch.to_bytes(8, "big") + self._size.to_bytes(4, "big") + bytes((kind,))
        try:
            _write_all(self._segment, chunk)
            _write_all(self._index, row)
        except OSError as error:
            # How much arrived is not known; the next opening cuts the end to what is whole.
            self.close()
            raise NotDone(
                f"{self.path.name!r}: {error}", hint="make room or repair the disk, then open the log again"
            ) from error
        self._size += len(chunk)
        self._chunks += 1
        self.next_offset = chunk_id + records
        if self._gate is not None:
            self._gate.wrote(self.next_offset, len(chunk), self._timestamp)
        return Appended(chunk_id, self.next_offset)

    # Segments.

    def _roll_if_due(self) -> None:
        full = self._size >= self._config.segment_bytes_max or self._chunks >= self._config.segment_chunks_max
        if not full:
            return
        self._sync()
        self._close_files()
        self._use(self.next_offset, fresh=True)
        tracks = self.tracking.snapshot(self.log.first_offset, self.log.first_timestamp)
        if tracks:
            self._write([osiris_tracking.encode(tracks, snapshot=True)], TRACKING_SNAPSHOT)

    def _use(self, first: int, *, fresh: bool) -> None:
        """Open a pair of files at its end, or make it."""
        segment = self.path / osiris_file.file_name(first, "segment")
        index = segment.with_suffix(".index")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        if fresh:
            flags |= os.O_CREAT | os.O_EXCL
        self._segment = os.open(segment, flags, 0o644)
        self._index = os.open(index, flags, 0o644)
        if fresh:
            _write_all(self._segment, SEGMENT_HEADER)
            _write_all(self._index, INDEX_HEADER)
            os.fsync(self._lock)
        self._size = os.fstat(self._segment).st_size
        self._chunks = (os.fstat(self._index).st_size - FILE_HEADER_BYTES) // INDEX_RECORD_BYTES

    def _sync(self) -> None:
        try:
            os.fdatasync(self._segment)
            os.fdatasync(self._index)
        except OSError as error:
            # The system may have dropped what it could not write, and would call a second sync a success.
            self.close()
            raise OutcomeUnknown(
                f"a commit to {self.path.name!r}",
                reason=str(error),
                hint="what was appended since the last commit may be lost: repair the disk, open it again",
            ) from error

    def trim(self, tiered_offset: int, policy: RetentionPolicy) -> int:
        """Remove old segments as the policy says, of those that lie below `tiered_offset`; how many.

        `tiered_offset` is the next offset of the remote tier's persisted manifest, never of one on its way.
        """
        self._check_open()
        self.log.refresh()
        segments = self.log.segments
        total = sum([segment.data_bytes for segment in segments])
        removed = 0
        for segment in segments[:-1]:
            old = (
                policy.max_age_ms is not None
                and int(segment.records["timestamp"][-1]) < self._clock.now_ms() - policy.max_age_ms
            )
            large = policy.max_bytes is not None and total > policy.max_bytes
            if segment.next_id > tiered_offset or not (old or large):
                break
            # The segment first: an index without its segment is removed by whoever opens the log next.
            segment.path.unlink()
            segment.path.with_suffix(".index").unlink()
            total -= segment.data_bytes
            removed += 1
        if removed:
            os.fsync(self._lock)
            self.log.refresh()
        return removed

    # The end.

    def _check_open(self) -> None:
        if self._segment < 0:
            raise Closed(f"the writer of {self.path.name!r} is closed", hint="open it again")

    def _close_files(self) -> None:
        for file in (self._segment, self._index):
            if file >= 0:
                os.close(file)
        self._segment = self._index = -1

    def close(self) -> None:
        """Let go of the files and of the directory. What was not committed may be lost."""
        self._close_files()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _make(path: Path) -> None:
    """Make the directory and those above it, each so that a crash does not take it away again."""
    if path.is_dir():
        return
    _make(path.parent)
    path.mkdir(exist_ok=True)
    above = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def _locked(path: Path) -> int:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(directory)
        raise NotDone(f"{path.name!r} is being written by somebody else", hint="stop that writer") from None
    return directory


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
