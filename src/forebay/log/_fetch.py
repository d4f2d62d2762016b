"""From entries to batches: byte ranges of objects, fetched together, checked, decoded.

Slices of one object that are wanted at the same time are fetched by one call, whichever partitions they
belong to: a flush puts many partitions into one object, and a reader of many partitions wants many of them.
Objects never change, so what was decoded once is kept, bounded by bytes: without that, reading a compacted
object in small portions would fetch all of it for each.

What comes back is checked against the entry that named it: the length, the checksum of the slice, the
checksum inside the batch, the number of records. A failure is an answer here, not an exception, because one
missing object must not hide the others of the same request.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, TypeAlias

from forebay.errors import ForebayError, FormatError
from forebay.formats import bytes_batch
from forebay.formats.batch_facts import whole_checksum
from forebay.formats.bytes_batch import BytesBatch
from forebay.kit.clock import Clock
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._errors import DataLost
from forebay.log._resolve import Located
from forebay.log._uris import key_of
from forebay.storage import InvalidRange, ObjectStore
from forebay.storage._api import Range

__all__ = ["Fetcher", "Loaded", "batch_bytes", "decode_slice"]

ENTRY_OVERHEAD_BYTES: Final = 512
"""What a decoded batch counts in the cache beyond its columns."""

_Slot: TypeAlias = tuple[str, int | None]
Loaded: TypeAlias = bytes | memoryview | BytesBatch
"""The bytes of an entry, or its batch where that was kept."""


class Fetcher:
    """Fetches slices of objects. `requests_max` bounds the calls under way at once."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        clock: Clock,
        randomness: random.Random,
        policy: RetryPolicy,
        cache_bytes_max: int,
        requests_max: int,
        maps_objects: bool = False,
        metrics: MetricsRegistry,
    ) -> None:
        self._store = store
        self._clock = clock
        self._random = randomness
        self._policy = policy
        self._cache = _BatchCache(cache_bytes_max)
        self._maps_objects = maps_objects
        self._turns = asyncio.Semaphore(requests_max)
        self._requests = metrics.counter("log.read_requests", "Objects asked for by log readers").labels()
        self._bytes = metrics.counter("log.read_bytes", "Bytes fetched by log readers").labels()
        self._hits = metrics.counter("log.read_cache_hits", "Batches found decoded by log readers").labels()

    async def fetch(self, wanted: Sequence[Located]) -> list[BytesBatch | ForebayError]:
        """The whole batch of every entry, or why it cannot be had, in the order asked for."""
        answers: dict[_Slot, BytesBatch | ForebayError] = {}
        by_object: dict[str, list[Located]] = {}
        for located in wanted:
            slot = _slot(located)
            if slot in answers:
                continue
            cached = self._cached(slot)
            if cached is not None:
                answers[slot] = cached
            else:
                by_object.setdefault(located.entry.data_key, []).append(located)
        if len(by_object) == 1:
            [(uri, group)] = by_object.items()
            await self._fetch_object(uri, group, answers)
        elif by_object:
            await asyncio.gather(
                *(self._fetch_object(uri, group, answers) for uri, group in by_object.items())
            )
        return [_checked_count(answers[_slot(located)], located) for located in wanted]

    def at_hand(self, located: Located) -> Loaded | None:
        """What there is of an entry without waiting for anything; None where it has to be loaded."""
        found = self._cached(_slot(located))
        wanted = _range(located)
        if found is not None or wanted is None or not self._maps_objects:
            return found
        try:
            views = self._store.views_at_hand(key_of(self._store, located.entry.data_key), [wanted])
        except ForebayError:
            return None  # `load` tries again where that may help, and has the words for it.
        if views is None:
            return None
        self._requests.inc()
        return self._counted(views[0])

    async def load(self, located: Located) -> Loaded | ForebayError:
        """What is stored of an entry, or why it cannot be had."""
        try:
            [piece] = await self._get(located.entry.data_key, [located])
        except InvalidRange as error:
            return _damaged(located, error.message)
        except ForebayError as error:
            return error
        return self._counted(piece)

    def decoded(self, located: Located, loaded: Loaded) -> BytesBatch:
        """The batch of an entry, from what was loaded; raises `DataLost` where that is not what it says."""
        if isinstance(loaded, BytesBatch):
            batch = loaded
        else:
            batch = decode_slice(located, loaded)
            self._cache.put(_slot(located), batch)
        answer = _checked_count(batch, located)
        if isinstance(answer, ForebayError):
            raise answer
        return answer

    def _cached(self, slot: _Slot) -> BytesBatch | None:
        found = self._cache.get(slot)
        if found is not None:
            self._hits.inc()
        return found

    def _counted(self, piece: bytes | memoryview) -> bytes | memoryview:
        self._bytes.inc(len(piece))
        return piece

    async def _fetch_object(
        self, uri: str, group: Sequence[Located], answers: dict[_Slot, BytesBatch | ForebayError]
    ) -> None:
        unique = {_slot(located): located for located in group}
        try:
            pieces = await self._get(uri, list(unique.values()))
        except InvalidRange as error:
            answers.update({slot: _damaged(located, error.message) for slot, located in unique.items()})
            return
        except ForebayError as error:
            answers.update(dict.fromkeys(unique, error))
            return
        for (slot, located), piece in zip(unique.items(), pieces, strict=True):
            try:
                batch = decode_slice(located, self._counted(piece))
            except ForebayError as error:
                answers[slot] = error
            else:
                answers[slot] = batch
                self._cache.put(slot, batch)

    async def _get(self, uri: str, group: Sequence[Located]) -> Sequence[bytes | memoryview]:
        key = key_of(self._store, uri)
        ranges = [_range(located) for located in group]
        wanted = [each for each in ranges if each is not None]

        async def request() -> Sequence[bytes | memoryview]:
            async with self._turns:
                self._requests.inc()
                if len(wanted) == len(ranges):
                    if self._maps_objects:
                        return await self._store.view_ranges(key, wanted)
                    return await self._store.get_ranges(key, wanted)
                whole = (await self._store.get(key)).data
                return [whole if each is None else whole[each[0] : each[0] + each[1]] for each in ranges]

        return await retry(request, policy=self._policy, clock=self._clock, randomness=self._random)


def decode_slice(located: Located, piece: bytes | memoryview) -> BytesBatch:
    """The batch of an entry, from its bytes; raises `DataLost` where they are not what the entry says."""
    entry = located.entry
    if entry.encoding != bytes_batch.ENCODING:
        raise DataLost(
            f"{_where(located)} is encoded as {entry.encoding[:50]!r}",
            hint="it was written by a newer release; upgrade to read it",
        )
    if entry.byte_length is not None and len(piece) != entry.byte_length:
        raise _damaged(located, f"{len(piece)} bytes, {entry.byte_length} expected")
    try:
        batch = bytes_batch.decode(piece)
    except FormatError as error:
        raise _damaged(located, str(error)) from error
    # The batch has just been held against its own checksum: four bytes more give that of the whole.
    if entry.crc32c is not None and whole_checksum(piece) != entry.crc32c:
        raise _damaged(located, "the checksum of the bytes is not that of the index entry")
    return batch


def _checked_count(answer: BytesBatch | ForebayError, located: Located) -> BytesBatch | ForebayError:
    if isinstance(answer, ForebayError) or len(answer) == located.entry.msg_count:
        return answer
    return _damaged(located, f"{len(answer)} records, {located.entry.msg_count} expected")


def _damaged(located: Located, reason: str) -> DataLost:
    return DataLost(
        f"{_where(located)} is damaged: {reason}",
        hint="restore the object from a copy; `forebay log verify` lists what else is affected",
    )


def _where(located: Located) -> str:
    offsets = f"offsets {located.start_offset} to {located.end_offset}"
    return f"{located.keys}: {located.entry.data_key} with {offsets}"


def _slot(located: Located) -> _Slot:
    return located.entry.data_key, located.entry.byte_offset


def _range(located: Located) -> Range | None:
    entry = located.entry
    if entry.byte_offset is None or entry.byte_length is None:
        return None
    return entry.byte_offset, entry.byte_length


def batch_bytes(batch: BytesBatch) -> int:
    """Bytes a decoded batch occupies, about."""
    size = ENTRY_OVERHEAD_BYTES + int(batch.values.nbytes)
    for column in (batch.keys, batch.timestamps_ms, batch.headers):
        size += 0 if column is None else int(column.nbytes)
    return size


class _BatchCache:
    """Decoded batches, the least recently used forgotten first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: OrderedDict[_Slot, tuple[BytesBatch, int]] = OrderedDict()

    def get(self, slot: _Slot) -> BytesBatch | None:
        found = self._batches.get(slot)
        if found is None:
            return None
        self._batches.move_to_end(slot)
        return found[0]

    def put(self, slot: _Slot, batch: BytesBatch) -> None:
        if not self._bytes_max or slot in self._batches:
            return
        size = batch_bytes(batch)
        if size > self._bytes_max:
            return
        self._batches[slot] = (batch, size)
        self._bytes += size
        while self._bytes > self._bytes_max:
            _, (_, freed) = self._batches.popitem(last=False)
            self._bytes -= freed
