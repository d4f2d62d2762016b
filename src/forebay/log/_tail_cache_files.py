"""The tail cache of one machine: files in a directory that its processes share.

    DIR/{log}/{topic}/{partition}/{start:020d}-{count}.tail   one committed append, see `formats.tail_file`
    DIR/{log}/{topic}/{partition}/earliest         highest start of the log that anybody here has seen
    DIR/{log}/pulse                                new with every append: what waiting readers look at

The first level is the name of the log (`log_identity`): another deployment that was given the same directory,
or a log that was removed and made anew in the same place, has the same topics and offsets and other records.

A writer process puts a file, a reader process finds it by its name and believes only what is inside. Files
appear by rename, so a reader sees a whole file or none; one that is damaged all the same, by a full disk or a
crash of the machine, fails its checksum and is a miss. Nothing is synced: the cache may vanish at any moment.

The rules of what a hit may not hide are those of the cache in memory (`_tail_cache`). Each process sweeps
after having written a sixteenth of the bound: too old or too much goes, oldest first, whichever log it
belongs to. The directory is therefore over the bound by a sixteenth per process at most. A file counts as the
blocks it takes, so that the bound holds for many small appends, too: on the disk, and for the listings.

File calls are made on the event loop. They are few, small, and nearly always answered by the page cache; put
the directory on a RAM disk where that is not good enough.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.errors import FormatError, UsageError
from forebay.formats import tail_file
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.encoded_batch import EncodedBatch
from forebay.formats.tail_file import TailHeader
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.log._fetched import Fetched, FetchedBatch, ReadRequest, fitting
from forebay.log._keys import PartitionKeys
from forebay.log._tail_cache import TailCache, TailCacheConfig

__all__ = ["FileTailCache"]

SUFFIX: Final = ".tail"
SWEEPS_PER_BOUND: Final = 16
"""How often a process sweeps while it writes as much as the bound."""
PULSE_POLL_S: Final = 0.02
"""Seconds between two looks of a waiting reader."""
CLOCK_SLACK_MS: Final = 1_000
"""Milliseconds by which a file must be older than a control record that contradicts it. A file that is
younger than now by more than this was written before the clock was set back: nobody knows its age."""
BLOCK_BYTES: Final = 4096
"""What a file takes on the disk at least, and a multiple of which it takes."""


@dataclass(frozen=True, slots=True)
class _File:
    start: int
    count: int
    path: Path

    @property
    def end(self) -> int:
        return self.start + self.count - 1


class FileTailCache(TailCache):
    """A tail cache shared by the processes of one machine."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        clock: Clock,
        ids: IdSource,
        config: TailCacheConfig | None = None,
        *,
        log: str,
    ) -> None:
        """`log`: which log this is, as `log_identity` tells."""
        if not (log.isascii() and log.isalnum()):
            raise UsageError(f"{log!r} is no name of a log", hint="`log_identity` tells it")
        self._shared = Path(directory)
        self._directory = self._shared / log
        self._clock = clock
        self._ids = ids
        self._config = config or TailCacheConfig()
        self._written = 0
        self._seen_next: dict[tuple[str, int], tuple[int, float]] = {}
        """The end of a partition by its control record, and when that was asked for, monotonic."""
        self._directory.mkdir(parents=True, exist_ok=True)

    # -- writing

    def committed(
        self, topic: str, partition: int, start_offset: int, batch: BytesBatch | EncodedBatch, time_ms: int
    ) -> None:
        """Put a file. A cache that cannot be written is no reason to fail an append that was committed."""
        header = TailHeader(
            topic=topic,
            partition=partition,
            start_offset=start_offset,
            msg_count=len(batch),
            time_ms=time_ms,
        )
        with contextlib.suppress(OSError, FormatError):
            data = tail_file.encode(header, batch if isinstance(batch, BytesBatch) else batch.columns())
            if _on_disk(len(data)) > self._config.bytes_max:
                return
            folder = self._folder(topic, partition)
            folder.mkdir(parents=True, exist_ok=True)
            self._put(folder / f"{start_offset:020d}-{len(batch)}{SUFFIX}", data)
            self._written += _on_disk(len(data))
            if self._written * SWEEPS_PER_BOUND >= self._config.bytes_max:
                self._written = 0
                self.sweep()
            # Not a touch: two within one tick of the file system's clock would look like one.
            self._pulse.write_text(self._ids.token())

    def _put(self, path: Path, data: bytes) -> None:
        draft = path.with_name(f".{self._ids.token()}")
        try:
            draft.write_bytes(data)
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    # -- reading

    def read(self, request: ReadRequest, bytes_max: int) -> Fetched | None:
        """Files that follow each other from the offset on, or an end of the log that is trusted."""
        topic, partition = request.topic, request.partition
        earliest = self._earliest(topic, partition)
        if request.offset < earliest:
            return None
        files = self._files(topic, partition)
        batches = self._contiguous(request, files, bytes_max)
        known = max(files[-1].end + 1 if files else 0, self._seen(topic, partition)[0])
        if not batches and not self._trusted(request):
            return None
        kept = fitting(batches, bytes_max, request.records_max)
        next_offset = kept[-1].end_offset + 1 if kept else request.offset
        known = max(known, next_offset)
        return Fetched(topic, partition, kept, next_offset, earliest, known, from_cache=True)

    def _contiguous(self, request: ReadRequest, files: list[_File], bytes_max: int) -> list[FetchedBatch]:
        found: list[FetchedBatch] = []
        offset = request.offset
        place = bisect_right([file.start for file in files], offset) - 1
        while 0 <= place < len(files) and bytes_max > 0 and files[place].start <= offset <= files[place].end:
            batch = self._load(files[place], request)
            if batch is None:
                break
            part = batch.part(offset, batch.end_offset - offset + 1)
            found.append(part)
            bytes_max -= int(part.batch.values.nbytes)
            offset = batch.end_offset + 1
            place += 1
        return found

    def _load(self, file: _File, request: ReadRequest) -> FetchedBatch | None:
        """The batch of a file, if it is what its name says and young enough."""
        try:
            if self._is_old(self._clock.now_ms() - _modified_ms(file.path)):
                return None
            header, batch = tail_file.decode(file.path.read_bytes())
        except (OSError, FormatError):
            return None
        named = (request.topic, request.partition, file.start, file.count)
        if (header.topic, header.partition, header.start_offset, header.msg_count) != named:
            return None
        return FetchedBatch(header.topic, header.partition, header.start_offset, batch, header.time_ms)

    def _is_old(self, age_ms: float) -> bool:
        return not -CLOCK_SLACK_MS < age_ms < self._config.age_max_ms

    def _trusted(self, request: ReadRequest) -> bool:
        """Whether the offset is the end of the log, as far as is known and for as long as that is trusted."""
        trust_s = self._config.empty_trust_ms / 1000
        next_offset, asked_at = self._seen(request.topic, request.partition)
        if request.offset == next_offset and self._clock.monotonic() - asked_at < trust_s:
            return True
        files = self._files(request.topic, request.partition)
        if not files or request.offset != files[-1].end + 1:
            return False
        try:
            age_ms = self._clock.now_ms() - _modified_ms(files[-1].path)
        except OSError:
            return False
        return 0 <= age_ms < self._config.empty_trust_ms

    def known_next(self, topic: str, partition: int) -> int | None:
        """One past the highest offset of any file or control record."""
        files = self._files(topic, partition)
        known = max(files[-1].end + 1 if files else 0, self._seen(topic, partition)[0])
        return known or None

    async def wait(self) -> None:
        """Return after the next append that any process of this machine puts here."""
        before = self._beat()
        while self._beat() == before:
            await self._clock.sleep(PULSE_POLL_S)

    # -- what control records tell

    def saw_control(
        self, topic: str, partition: int, earliest: int, next_offset: int, asked_at: float
    ) -> None:
        """Learn where the log begins and ends."""
        self._seen_next[topic, partition] = (next_offset, asked_at)
        if earliest > self._earliest(topic, partition):
            with contextlib.suppress(OSError):
                folder = self._folder(topic, partition)
                folder.mkdir(parents=True, exist_ok=True)
                self._put(folder / "earliest", str(earliest).encode())
        files = self._files(topic, partition)
        if files and files[-1].end >= next_offset:
            waited_ms = (self._clock.monotonic() - asked_at) * 1000
            asked_at_ms = self._clock.now_ms() - waited_ms
            with contextlib.suppress(OSError):
                if _modified_ms(files[-1].path) + CLOCK_SLACK_MS < asked_at_ms:
                    # The log ends before something that was committed: it is another one by now.
                    self.forget(topic, partition)

    def forget(self, topic: str, partition: int | None = None) -> None:
        """Remove the files of a partition, or of a topic."""
        for folder in _partition_folders(self._directory / topic):
            if partition in (None, int(folder.name)):
                for path in _entries(folder):
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
        for key in [key for key in self._seen_next if key[0] == topic and partition in (None, key[1])]:
            del self._seen_next[key]

    # -- housekeeping

    def sweep(self) -> int:
        """Remove what is too old or too much, oldest first; the bytes that are left."""
        now_ms = self._clock.now_ms()
        found: list[tuple[float, int, Path]] = []
        for path in self._every_file():
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, _on_disk(status.st_size), path))
        found.sort()
        left = sum(size for _, size, _ in found)
        for modified, size, path in found:
            if left <= self._config.bytes_max and not self._is_old(now_ms - modified * 1000):
                continue
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                left -= size
        return left

    def _every_file(self) -> Iterator[Path]:
        """Batches, and drafts that a crash left behind."""
        for topic in (topic for log in _entries(self._shared) for topic in _entries(log)):
            for folder in _partition_folders(topic):
                yield from (path for path in _entries(folder) if path.name != "earliest")

    @property
    def _pulse(self) -> Path:
        return self._directory / "pulse"

    def _beat(self) -> str:
        try:
            return self._pulse.read_text()
        except OSError:
            return ""

    def _folder(self, topic: str, partition: int) -> Path:
        PartitionKeys(topic, partition)  # Refuses names that would lead out of the directory.
        return self._directory / topic / str(partition)

    def _files(self, topic: str, partition: int) -> list[_File]:
        folder = self._folder(topic, partition)
        try:
            names = [path.name for path in folder.iterdir()]
        except OSError:
            return []
        files = [file for name in names if (file := _parsed(folder, name)) is not None]
        return sorted(files, key=lambda file: (file.start, file.count))

    def _earliest(self, topic: str, partition: int) -> int:
        try:
            return int((self._folder(topic, partition) / "earliest").read_bytes())
        except (OSError, ValueError):
            return 1

    def _seen(self, topic: str, partition: int) -> tuple[int, float]:
        return self._seen_next.get((topic, partition), (0, float("-inf")))


def _entries(folder: Path) -> list[Path]:
    """What lies in a directory; nothing where it is none, or is gone."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _partition_folders(topic: Path) -> list[Path]:
    """The directories of a topic's partitions. Whatever else lies there is not ours."""
    return [path for path in _entries(topic) if path.name.isascii() and path.name.isdigit()]


def _parsed(folder: Path, name: str) -> _File | None:
    start, dash, rest = name.partition("-")
    count, suffix = rest[: -len(SUFFIX)], rest[-len(SUFFIX) :]
    if not dash or suffix != SUFFIX or not (start.isdecimal() and count.isdecimal()) or int(count) < 1:
        return None
    return _File(int(start), int(count), folder / name)


def _on_disk(size: int) -> int:
    """Bytes of the blocks of a file."""
    return max(1, -(-size // BLOCK_BYTES)) * BLOCK_BYTES


def _modified_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000
