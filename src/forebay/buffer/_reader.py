"""Looking at a queue without taking part in it: no epoch, no acknowledgement, nothing written.

Opening a consumer only to look would shut out the one that works. A reader sees the manifest as it is at each
call and reads any batch that still exists, for inspection, for Spark, and for the command line.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from forebay.buffer._batches import ConsumedBatch
from forebay.buffer._config import BufferConfig
from forebay.buffer._fetch import Fetcher, describe
from forebay.buffer._manifest_file import ManifestFile
from forebay.errors import FormatError, NotFound
from forebay.formats import buffer_batch
from forebay.formats.buffer_batch import Compression
from forebay.formats.buffer_manifest import Entry, Manifest
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.retry import retry
from forebay.storage import ObjectStore, open_store

__all__ = ["BufferStats", "EntryInfo", "Reader", "manifest_as_json"]

LOOKS_AT_ONCE = 16
"""Requests for sizes and counts under way at once."""


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """An entry and what the store knows of its object."""

    entry: Entry
    size_bytes: int | None
    """Bytes of the object; None where it is missing."""
    record_count: int | None = None
    """None where the object is missing, or is no batch."""
    compression: Compression | None = None


@dataclass(frozen=True, slots=True)
class BufferStats:
    """A queue in numbers."""

    exists: bool
    """Whether there is a manifest."""
    entries: int
    next_sequence: int
    epoch: int
    manifest_bytes: int
    oldest_entry_age_s: float | None
    """Seconds since the first input of the first entry; None where the queue is empty."""
    newest_entry_age_s: float | None
    """Seconds since the last input of the last entry."""
    pending_bytes: int | None = None
    """Bytes of all batches in the queue; None where they were not asked for."""
    missing_batches: int | None = None
    """Entries whose object is gone; None where they were not asked for."""


class Reader:
    """A view of a queue that changes nothing."""

    def __init__(
        self,
        config: BufferConfig,
        clock: Clock | None = None,
        *,
        store: ObjectStore | None = None,
        randomness: random.Random | None = None,
    ) -> None:
        """The store is opened from `config.url` unless handed in; only an own one is closed at the end."""
        self._config = config
        self._clock = clock or SystemClock()
        self._random = randomness or random.SystemRandom()
        self._owns_store = store is None
        self._store = store if store is not None else open_store(config.url, clock=self._clock)
        self._file = ManifestFile(
            self._store, config.manifest_path, self._clock, bytes_max=config.manifest_bytes_max
        )
        self._fetcher = Fetcher(self._store, config, clock=self._clock, randomness=self._random)

    async def manifest(self) -> Manifest:
        """The manifest as it is now; empty where there is none yet. Downloaded only if it has changed."""
        return await retry(
            self._file.load, policy=self._config.read_retry, clock=self._clock, randomness=self._random
        )

    async def entries(self) -> list[Entry]:
        """All entries, in order."""
        return list((await self.manifest()).entries)

    async def inspect(self, entries: Sequence[Entry] | None = None) -> list[EntryInfo]:
        """Entries with sizes and record counts, two small requests each. What is damaged holds up nobody."""
        wanted = await self.entries() if entries is None else entries
        turns = asyncio.Semaphore(LOOKS_AT_ONCE)

        async def one(entry: Entry) -> EntryInfo:
            async with turns:
                return await self._inspect(entry)

        return list(await asyncio.gather(*[one(entry) for entry in wanted]))

    async def _inspect(self, entry: Entry) -> EntryInfo:
        if not entry.location:
            return EntryInfo(entry, None)  # Nothing can lie there; reading it says what is wrong.
        try:
            size = (await self._store.head(entry.location)).size
            if size < buffer_batch.FOOTER_BYTES:
                return EntryInfo(entry, size)
            start = size - buffer_batch.FOOTER_BYTES
            data = await self._store.get_range(entry.location, start, buffer_batch.FOOTER_BYTES)
        except NotFound:
            return EntryInfo(entry, None)
        try:
            footer = buffer_batch.decode_footer(data, name=entry.location)
        except FormatError:
            return EntryInfo(entry, size)  # Reading it says what is wrong.
        return EntryInfo(entry, size, footer.record_count, footer.compression)

    async def read(self, entry: Entry | int) -> ConsumedBatch:
        """The records of an entry, or of a sequence. Raises `NotFound` where the queue does not hold it."""
        if isinstance(entry, int):
            found = (await self.manifest()).entry(entry)
            if found is None:
                raise NotFound(
                    f"sequence {entry} of {self._file.path}", hint="it was consumed, or is to come"
                )
            entry = found
        return await self._fetcher.fetch(describe(entry))

    async def stats(self, *, sizes: bool = False) -> BufferStats:
        """The queue in numbers; with `sizes` also its bytes, at a request per entry."""
        manifest = await self.manifest()
        pending = missing = None
        if sizes:
            found = await self.inspect(list(manifest.entries))
            pending = sum(info.size_bytes or 0 for info in found)
            missing = sum(info.size_bytes is None for info in found)
        first = manifest.entry_at(0).metadata if len(manifest) else ()
        last = manifest.entry_at(len(manifest) - 1).metadata if len(manifest) else ()
        return BufferStats(
            exists=self._file.exists,
            entries=len(manifest),
            next_sequence=manifest.next_sequence,
            epoch=manifest.epoch,
            manifest_bytes=len(manifest.data) if self._file.exists else 0,
            oldest_entry_age_s=self._age_s(first[0].ingestion_time_ms) if first else None,
            newest_entry_age_s=self._age_s(last[-1].ingestion_time_ms) if last else None,
            pending_bytes=pending,
            missing_batches=missing,
        )

    def _age_s(self, time_ms: int) -> float:
        return max(0.0, (self._clock.now_ms() - time_ms) / 1000)

    async def close(self) -> None:
        """Close the store, if it was opened here."""
        if self._owns_store:
            await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def manifest_as_json(manifest: Manifest) -> dict[str, Any]:
    """A manifest as plain data, payloads in base64."""
    return {
        "version": manifest.version,
        "epoch": manifest.epoch,
        "next_sequence": manifest.next_sequence,
        "entries": [
            {
                "sequence": entry.sequence,
                "location": entry.location,
                "metadata": [
                    {
                        "start_index": item.start_index,
                        "ingestion_time_ms": item.ingestion_time_ms,
                        "payload": base64.b64encode(item.payload).decode(),
                    }
                    for item in entry.metadata
                ],
            }
            for entry in manifest.entries
        ],
    }
