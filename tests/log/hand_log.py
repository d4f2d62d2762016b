"""A log written by hand, step by step, so that tests can stand between any two steps of a protocol."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from crc32c import crc32c

from forebay.coordination import ABSENT, Coordinator, MemoryCoordinator
from forebay.formats import bytes_batch, shared_blob
from forebay.kit.clock import SystemClock
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import RetryPolicy
from forebay.log._fetched import FetchedBatch, ReaderConfig
from forebay.log._keys import PartitionKeys, shared_wal_key
from forebay.log._reader import LogReader
from forebay.log._records import Control, Cursor, IndexEntry, Pending, encode_record
from forebay.log._tail_cache import TailCache
from forebay.log._uris import uri_of
from forebay.storage import MemoryStore, ObjectStore

FAST = ReaderConfig(retry=RetryPolicy(base_ms=0, cap_ms=0))
"""Retries without waiting."""


@dataclass
class HandLog:
    """One partition of a log."""

    keys: PartitionKeys = field(default_factory=lambda: PartitionKeys("orders", 0))
    store: ObjectStore = field(default_factory=MemoryStore)
    coordinator: Coordinator = field(default_factory=MemoryCoordinator)
    control: Control = field(
        default_factory=lambda: Control(log_state="OPEN", sequence_counter=1, pending=None)
    )
    objects: int = 0
    now_ms: int = 1_000

    async def append(self, records: Sequence[bytes], *, clear: bool = False, **columns: object) -> Pending:
        """Commit as a writer does: the object, the index entry of the append before, the control record."""
        pending = await self.upload(records, **columns)
        await self.materialize()
        self.control = msgspec.structs.replace(
            self.control, sequence_counter=pending.end_offset + 1, pending=pending
        )
        await self.put_control()
        if clear:
            await self.materialize()
            self.control = msgspec.structs.replace(self.control, pending=None)
            await self.put_control()
        return pending

    async def upload(self, records: Sequence[bytes], **columns: object) -> Pending:
        """The object alone, and the append it could become."""
        body = bytes_batch.encode(list(records), **columns)  # type: ignore[arg-type]
        other = shared_blob.Part("other", 7, 1, bytes_batch.encode([b"of somebody else"]))
        mine = shared_blob.Part(self.keys.topic, self.keys.partition, len(records), body)
        blob, slices = shared_blob.encode([other, mine], created_at_ms=self.now_ms)
        key = shared_wal_key(f"wal-{self._number()}-{self.keys.partition}")
        await self.store.put(key, blob)
        start = self.control.sequence_counter
        return Pending(
            append_id=key,
            start_offset=start,
            end_offset=start + len(records) - 1,
            msg_count=len(records),
            entry_type="WAL",
            data_key=uri_of(self.store, key),
            encoding=bytes_batch.ENCODING,
            created_at_ms=self.now_ms,
            byte_offset=slices[1].body_offset,
            byte_length=slices[1].body_length,
            crc32c=slices[1].crc32c,
        )

    async def materialize(self, pending: Pending | None = None) -> None:
        """Put the index entry of an append, if absent."""
        pending = pending or self.control.pending
        if pending is not None:
            key = self.keys.index(pending.end_offset)
            if await self.coordinator.get(key, partition_key=self.keys.partition_key) is None:
                await self.put_entry(pending.end_offset, pending.index_entry())

    async def put_entry(self, end_offset: int, entry: IndexEntry) -> None:
        await self.coordinator.put(
            self.keys.index(end_offset), encode_record(entry), partition_key=self.keys.partition_key
        )

    async def put_control(self) -> None:
        await self.coordinator.put(
            self.keys.control, encode_record(self.control), partition_key=self.keys.partition_key
        )

    async def put_cursor(self, offset: int) -> None:
        await self.coordinator.put(
            self.keys.cursor, encode_record(Cursor(offset=offset)), partition_key=self.keys.partition_key
        )

    async def compact(self, start: int, end: int, *, steps: int = 3, times: Sequence[int] = ()) -> str:
        """Fold a range: 1 the end key, 2 the keys below it, 3 the cursor. `steps` says how far."""
        fetched = await self._entries(start, end)
        parts = [(each.batch, times[n] if times else each.time_ms) for n, each in enumerate(fetched)]
        body = bytes_batch.concat(parts)
        key = self.keys.compacted_object(f"compacted-{self._number()}")
        await self.store.put(key, body)
        entry = IndexEntry(
            type="COMPACTED",
            msg_count=end - start + 1,
            data_key=uri_of(self.store, key),
            encoding=bytes_batch.ENCODING,
            created_at_ms=max(time for _, time in parts),
            first_time_ms=min(time for _, time in parts),
            crc32c=crc32c(body),
            size_bytes=len(body),
        )
        await self.put_entry(end, entry)
        if steps >= 2:
            await self.coordinator.delete_range(
                self.keys.index(start), self.keys.index(end), partition_key=self.keys.partition_key
            )
        if steps >= 3:
            await self.put_cursor(end + 1)
        return key

    async def _entries(self, start: int, end: int) -> list[FetchedBatch]:
        """The whole batches of a range, also where its beginning is trimmed."""
        kept = self.control
        self.control = msgspec.structs.replace(kept, start_offset=min(start, kept.start_offset))
        await self.put_control()
        found = [batch async for batch in self.reader().scan_batches(*self.place, start, end + 1)]
        self.control = kept
        await self.put_control()
        return found

    async def trim(self, offset: int) -> None:
        self.control = msgspec.structs.replace(self.control, start_offset=offset)
        await self.put_control()
        first, _ = self.keys.index_range()
        await self.coordinator.delete_range(
            first, self.keys.index(offset), partition_key=self.keys.partition_key
        )

    async def vacuum(self, pending: Pending) -> None:
        """Remove the object of an append."""
        await self.store.delete([pending.append_id])

    @property
    def place(self) -> tuple[str, int]:
        return self.keys.topic, self.keys.partition

    def reader(
        self,
        config: ReaderConfig = FAST,
        *,
        cache: TailCache | None = None,
        metrics: MetricsRegistry | None = None,
    ) -> LogReader:
        return LogReader(
            self.store,
            self.coordinator,
            clock=SystemClock(),
            randomness=random.Random(1),
            config=config,
            tail_cache=cache,
            metrics=metrics,
        )

    async def everything(self) -> list[bytes]:
        """Every record, by a fresh reader."""
        return [
            value
            async for batch in self.reader().scan_batches(*self.place)
            for value in batch.batch.records()
        ]

    def _number(self) -> int:
        self.objects += 1
        return self.objects


def numbered(start: int, count: int) -> list[bytes]:
    """Records that say which offset they should have."""
    return [b"%d" % number for number in range(start, start + count)]


__all__ = ["ABSENT", "FAST", "HandLog", "numbered"]
