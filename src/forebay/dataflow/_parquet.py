"""The Parquet exporter: a file per segment, in directories by signal and hour.

    path/signal=traces/date=2026-11-16/hour=17/persistence-000000000012-9f3a51c07be2.parquet

**Once per segment.** The name and the directory depend on the segment alone: on its number, its checksums and
the time at which it came in. A delivery that is repeated, after a crash between the file and the
acknowledgement or because the acknowledgement failed, replaces the file by an equal one. A file appears
whole or not at all: written under another name, synced, renamed, directory synced. What a crash leaves of a
half-written file has a name that begins with a dot and ends in `.tmp`; the next attempt writes over it, and
the next start removes it. Where that file belongs to another process that lives and writes to the same path,
its renaming fails and it writes the file again. An attempt that fails takes its file away again, above all
where the disk is full.

The hour is that of ingestion and not of the events: one request with ten thousand different hours would make
ten thousand files. Rows are decoded and written in groups, in a thread, so that memory stays bounded and the
receivers go on. What the rows of a group share counts for each of them. Between two groups a writer looks
whether it should stop: a segment of small records takes half a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.dataflow._columns import SCHEMAS, Row, repeated_bytes, rows_of, table_of
from forebay.dataflow._parcels import Parcel, Refused
from forebay.dataflow._settings import ParquetSettings
from forebay.dataflow._signals import SIGNALS, items_in, parse
from forebay.errors import FormatError, Unavailable
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource

__all__ = ["ParquetExporter"]

_log = logging.getLogger(__name__)

ROW_GROUP_ROWS: Final = 16_384
"""Rows decoded and written at once."""
ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
"""Bytes after which a group is written, even if it has fewer rows."""
REPEATED_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""Most bytes that the rows of one request share, counted in each of them. A request above it is refused, and
the rest of its segment is written: hours of work for a few megabytes are an attack or a mistake."""


_SUFFIX: Final = ".parquet"
_TEMPORARY: Final = ".tmp"


class ParquetExporter:
    """Writes parcels as files."""

    def __init__(self, settings: ParquetSettings, *, clock: Clock, ids: IdSource) -> None:
        self._path = settings.path
        self._codec = settings.compression
        self._clock = clock
        self._ids = ids
        self._thread = ThreadPoolExecutor(1, "forebay-parquet")
        self._is_stopping = False

    async def start(self) -> None:
        """Make sure that the directory can be written to."""
        try:
            for directory in _make_directories(self._path):
                _sync_directory(directory)
            if not os.access(self._path, os.W_OK | os.X_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise _unavailable(self._path, error) from error
        # In the thread that writes: before its first file, and nobody else has to wait for a long listing.
        self._thread.submit(_remove_leftovers, self._path)

    async def take(self, parcel: Parcel) -> None:
        """Return when the file is durable under its name."""
        ingested_ms = parcel.ingested_ms or self._clock.now_ms()
        key = parcel.key or f"direct-{self._ids.ulid()}"
        target = self._path / directory_of(parcel.signal, ingested_ms) / f"{key}{_SUFFIX}"
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._write, target, parcel)
        try:
            refused = await work
        except OSError as error:
            raise _unavailable(target, error) from error
        except (FormatError, pa.ArrowInvalid) as error:
            hint = "it cannot be written as Parquet"
            raise Refused(f"{target}: {error}", hint=hint, items=parcel.items) from error
        if refused:
            raise Refused(
                f"{target}: requests with {refused:,} items have attributes too large for so many rows",
                hint="they are not in the file; send fewer items with a large resource, scope or description",
                items=refused,
            )

    async def stop(self) -> None:
        """End. A file that is being written is given up: it is delivered again after the next start."""
        self._is_stopping = True
        await asyncio.to_thread(self._thread.shutdown)

    def _write(self, target: Path, parcel: Parcel) -> int:
        """Returns how many items are in requests that were left out."""
        made = _make_directories(target.parent)
        temporary = target.with_name(f".{target.name}{_TEMPORARY}")
        try:
            refused = self._fill(temporary, parcel)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        for directory in {target.parent, *made}:
            _sync_directory(directory)
        return refused

    def _fill(self, path: Path, parcel: Parcel) -> int:
        groups = _Groups(parcel)
        with path.open("wb") as file:
            with pq.ParquetWriter(file, SCHEMAS[parcel.signal], compression=self._codec) as writer:
                for rows in groups:
                    if self._is_stopping:
                        raise Unavailable("the exporter stops", hint="it is tried again after the next start")
                    writer.write_table(table_of(parcel.signal, rows))
            file.flush()
            os.fsync(file.fileno())
        return groups.refused


def directory_of(signal: str, ingested_ms: int) -> str:
    """Where a file of this signal and time belongs."""
    moment = datetime.datetime.fromtimestamp(ingested_ms / 1000, tz=datetime.UTC)
    return f"signal={signal}/date={moment:%Y-%m-%d}/hour={moment:%H}"


class _Groups:
    """The rows of a parcel, in groups."""

    def __init__(self, parcel: Parcel) -> None:
        self._parcel = parcel
        self.refused = 0
        """Items in requests that were left out."""

    def __iter__(self) -> Iterator[list[Row]]:
        signal = self._parcel.signal
        rows: list[Row] = []
        size = 0
        for request in self._parcel.requests:
            message = parse(SIGNALS[signal], bytes(request))
            if repeated_bytes(signal, message) > REPEATED_BYTES_MAX:
                self.refused += items_in(SIGNALS[signal], message)
                continue
            size += len(request)
            for row, repeated in rows_of(signal, message):
                if rows and (len(rows) >= ROW_GROUP_ROWS or size + repeated > ROW_GROUP_BYTES):
                    yield rows
                    rows, size = [], 0
                rows.append(row)
                size += repeated
        if rows:
            yield rows


def _remove_leftovers(path: Path) -> None:
    for each in path.glob(f"signal=*/date=*/hour=*/.*{_SUFFIX}{_TEMPORARY}"):
        with contextlib.suppress(OSError):
            each.unlink()
            _log.warning("dataflow.parquet.leftover_removed: %s", each)


def _make_directories(path: Path) -> list[Path]:
    """Create what is missing; the directories whose entries are new."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
    return [each.parent for each in missing]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unavailable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(f"{path}: {error.strerror or error}", hint="see to the directory; it is tried again")
