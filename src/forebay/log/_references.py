"""Which objects a log still needs: one rule, used by vacuum to delete and by verify to list orphans.

An object is needed while any partition names it in one of

    a WAL entry that ends at or above the compaction cursor      and at or above the earliest offset
    a COMPACTED entry                                            that ends at or above the earliest offset
    the pending append of the control record
    the compaction under way

Per partition control, cursor and compaction are read together and *before* the index. An append that is still
pending at the first look may be in the index at the second, and a compaction that is under way may be
finished; what moves the other way does not exist. What is committed only after the first look lies in an
object that was uploaded shortly before, which no caller may take for a candidate: candidates are listed
first, and are older than any writer may take to commit.

A WAL entry below the cursor is a late put only where a compacted entry covers it: what was folded is there in
its place. Without one the cursor is wrong, the entry is all there is, and its object stays.

The catalog says which partitions there are, but is not believed when it says that there are none: a candidate
tells by its name, or by the table in its header, whose it is, and those partitions are asked as well.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from forebay.coordination import SCAN_RECORDS_MAX, Coordinator, Delete, Operation, Record
from forebay.errors import FormatError, NotFound, Unavailable, UsageError
from forebay.formats import shared_blob
from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._keys import ROOT, PartitionKeys
from forebay.log._meta import located, read_meta
from forebay.log._resolve import Located
from forebay.log._uris import key_of
from forebay.storage import ObjectInfo, ObjectStore

__all__ = ["LogObjects", "Visit", "is_shared", "is_write_ahead", "owner_of", "read_header"]

T = TypeVar("T")

HEADER_GUESS_BYTES: Final = 16 * 1024
"""First request for the header of a shared object: enough for about a hundred partitions."""
LATE_ENTRIES_MAX: Final = 1_000
"""Late entries that wait for the compacted one above them; of more, the first keep their objects."""
READ_POLICY: Final = RetryPolicy(attempts_max=20, base_ms=50, cap_ms=2_000, deadline_ms=60_000)

_OWN_OBJECT: Final = re.compile(rf"{ROOT}/([^/]+)/partitions/([0-9]+)/data/(?:compacted|wal)/[^/]+")
_SHARED_OBJECT: Final = re.compile(rf"{ROOT}/wal-shared/[^/]+")


@dataclass(frozen=True, slots=True)
class Visit:
    """What a look at one partition showed."""

    keys: PartitionKeys
    exists: bool
    compaction_since_ms: int | None = None
    """When the compaction under way began."""
    stale: list[tuple[str, int]] = field(default_factory=list)
    """Index keys below the cursor, with their versions: late puts that nobody needs."""


def _named_key(late: tuple[Located, int]) -> tuple[str, int]:
    """The index key of an entry, and its version."""
    entry, version = late
    return entry.keys.index(entry.end_offset), version


def owner_of(key: str) -> PartitionKeys | None:
    """The partition a compacted object, or one of the older layout, belongs to; None for shared ones."""
    match = _OWN_OBJECT.fullmatch(key)
    if match is None:
        return None
    try:
        return PartitionKeys(match[1], int(match[2]))
    except UsageError:
        return None


def is_shared(key: str) -> bool:
    """Whether the key is that of a shared write-ahead object."""
    return _SHARED_OBJECT.fullmatch(key) is not None


def is_write_ahead(key: str) -> bool:
    """Whether the key is that of a write-ahead object, shared or of the older layout."""
    return is_shared(key) or (owner_of(key) is not None and "/data/wal/" in key)


class LogObjects:
    """Looks at a store and a coordinator; changes nothing but stale index keys."""

    def __init__(
        self,
        store: ObjectStore,
        coordinator: Coordinator,
        *,
        clock: Clock,
        randomness: random.Random,
        policy: RetryPolicy = READ_POLICY,
    ) -> None:
        self.store = store
        self.coordinator = coordinator
        self._clock = clock
        self._random = randomness
        self._policy = policy

    async def listed(self, prefix: str = f"{ROOT}/", after: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects of the log in key order. A listing that fails goes on behind the last key."""
        failures = 0
        while True:
            try:
                async for page in self.store.list_pages(prefix, after=after):
                    for info in page:
                        yield info
                    after, failures = page[-1].key, 0
            except Unavailable:
                failures += 1
                if failures >= self._policy.attempts_max:
                    raise
                await self._clock.sleep(self._policy.wait_s(failures, self._random))
            else:
                return

    async def visit(self, keys: PartitionKeys, named: Callable[[str], None]) -> Visit:
        """Call `named` with the key of every object this partition needs."""
        meta = await self.patiently(lambda: read_meta(self.coordinator, keys))
        if meta.control is not None and meta.control.pending is not None:
            named(self._key(meta.control.pending.data_key))
        under_way = meta.compaction
        if under_way is not None and under_way.data_key:
            named(self._key(under_way.data_key))
        stale: list[tuple[str, int]] = []
        late: deque[tuple[Located, int]] = deque()
        async for record in self._index(keys):
            entry = located(keys, record)
            if entry.entry.type == "WAL" and entry.end_offset < meta.cursor:
                late.append((entry, record.version))
                if len(late) <= LATE_ENTRIES_MAX:
                    continue
                entry = late.popleft()[0]
            elif entry.entry.type == "COMPACTED":
                stale += [_named_key(each) for each in late if each[0].start_offset >= entry.start_offset]
                late = deque(each for each in late if each[0].start_offset < entry.start_offset)
            if entry.end_offset >= meta.earliest:
                named(self._key(entry.entry.data_key))
        for each in late:
            if each[0].end_offset < meta.earliest:
                stale.append(_named_key(each))
            else:
                named(self._key(each[0].entry.data_key))
        return Visit(
            keys, meta.control is not None, None if under_way is None else under_way.created_at_ms, stale
        )

    async def _index(self, keys: PartitionKeys) -> AsyncIterator[Record]:
        start, end = keys.index_range()
        while True:
            records = await self.patiently(
                lambda start=start: self.coordinator.range_scan(  # type: ignore[misc]
                    start, end, partition_key=keys.partition_key
                )
            )
            for record in records:
                yield record
            if len(records) < SCAN_RECORDS_MAX:
                return
            start = records[-1].key + "\0"

    def _key(self, uri: str) -> str:
        return key_of(self.store, uri)

    async def sweep(self, visit: Visit) -> int:
        """Delete the stale index keys of a visit, by version; how many went."""
        operations: list[Operation] = [
            Delete(key, version, visit.keys.partition_key) for key, version in visit.stale
        ]
        results = await self.coordinator.write(operations) if operations else []
        return sum(result.error is None for result in results)

    async def owners(self, infos: Iterable[ObjectInfo]) -> dict[str, list[PartitionKeys] | None]:
        """Whose records each object holds, by its name or its header; None where it does not tell."""
        found: dict[str, list[PartitionKeys] | None] = {}
        for info in infos:
            own = owner_of(info.key)
            found[info.key] = [own] if own is not None else await self._header_owners(info)
        return found

    async def _header_owners(self, info: ObjectInfo) -> list[PartitionKeys] | None:
        if not is_shared(info.key):
            return None
        try:
            header = await self.patiently(lambda: read_header(self.store, info.key, info.size))
            return [PartitionKeys(part.topic, part.partition) for part in header.partitions]
        except NotFound:
            return []
        except (FormatError, UsageError):
            return None

    async def patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        """`operation` again while the other side cannot be reached."""
        return await retry(operation, policy=self._policy, clock=self._clock, randomness=self._random)


async def read_header(store: ObjectStore, key: str, size: int) -> shared_blob.Header:
    """The table of contents of a shared object: one request, or two where it is long."""
    first = await store.get_range(key, 0, min(size, HEADER_GUESS_BYTES))
    needed = 8 + int.from_bytes(first[4:8], "big")
    if len(first) < needed <= min(size, 8 + shared_blob.HEADER_BYTES_MAX):
        first = await store.get_range(key, 0, needed)
    return shared_blob.decode(first, blob_bytes=size)
