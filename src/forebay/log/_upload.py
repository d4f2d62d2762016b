"""From groups to one object: merge by partition, encode, put.

All groups of one partition in a flush become one slice and later one index entry, in the order they came. Two
things forbid it, and then the partition gets several units: groups of different epochs, of which one may be
refused and the other not, and a repetition of an idempotent append that is in the same flush.

The object's key is fresh, so a put whose outcome is unknown is simply sent again, and an upload that failed
for good has left nothing that anybody can see: the append certainly did not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pyarrow as pa

from forebay.errors import ForebayError, LimitExceeded, OutcomeUnknown, Unavailable, UsageError
from forebay.formats import bytes_batch, shared_blob
from forebay.formats.bytes_batch import BytesBatch, Frame
from forebay.formats.bytes_batch_join import merge
from forebay.formats.bytes_batch_piece import piece_of
from forebay.formats.encoded_batch import EncodedBatch
from forebay.kit.retry import retry
from forebay.log._append import (
    FLUSH_BYTES_MAX,
    GROUPS_PER_CALL_MAX,
    AppendGroup,
    AppendResult,
    Unit,
    failed,
    validate_group,
)
from forebay.log._keys import PartitionKeys, shared_wal_key
from forebay.log._uris import uri_of
from forebay.log._writer_config import WriterParts

__all__ = ["Uploaded", "Uploader", "units_of"]

VIEWED_BYTES_MAX: Final = 8 * 1024 * 1024
"""Largest object that batches in a tail cache are views of; of larger ones they are copies."""
BUFFERS_MAX: Final = 512
"""Buffers that an object is written from; of more it is put together first. The kernel takes 1,024."""
BUFFER_BYTES_MIN: Final = 4 * 1024
"""Bytes that they have on average; smaller ones are put together, which costs less than to gather them."""


@dataclass(slots=True, eq=False)
class Uploaded:
    """One flush between upload and commit."""

    answers: list[AppendResult | None]
    """One per group; those that failed already are there."""
    units: list[Unit]
    began_at: float
    """When the flush began, on the monotonic clock."""

    def results(self) -> list[AppendResult]:
        """The answers, once all are there."""
        answered = [answer for answer in self.answers if answer is not None]
        assert len(answered) == len(self.answers), "a group was left without an answer"
        return answered


def units_of(groups: Sequence[AppendGroup]) -> tuple[list[AppendResult | None], list[Unit]]:
    """Groups by partition, in order; those that can never be appended are answered at once."""
    sizes = [group.size_bytes for group in groups]
    _check_call(sizes)
    answers: list[AppendResult | None] = [None] * len(groups)
    units: list[Unit] = []
    open_units: dict[tuple[str, int], Unit] = {}
    idempotent: dict[Unit, set[tuple[str, int]]] = {}
    for place, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        try:
            validate_group(group, size)
            unit = open_units.get((group.topic, group.partition))
            keys = _keys(group.topic, group.partition) if unit is None else unit.keys
        except ForebayError as error:
            answers[place] = failed(group, error)
            continue
        name = None if group.producer_id is None else (group.producer_id, group.sequence or 0)
        if unit is None or unit.epoch != group.epoch or (name and name in idempotent.get(unit, ())):
            unit = open_units[group.topic, group.partition] = Unit(keys, group.epoch, answers)
            units.append(unit)
        unit.add(group, place)
        if name is not None:
            idempotent.setdefault(unit, set()).add(name)
    return answers, units


# Names are checked and joined once, not in every flush.
_keys = lru_cache(maxsize=65_536)(PartitionKeys)


def _check_call(sizes: Sequence[int]) -> None:
    if len(sizes) > GROUPS_PER_CALL_MAX:
        raise LimitExceeded(
            "GROUPS_PER_CALL_MAX", limit=GROUPS_PER_CALL_MAX, actual=len(sizes), hint="append in parts"
        )
    if sum(sizes) > FLUSH_BYTES_MAX:
        raise LimitExceeded(
            "FLUSH_BYTES_MAX", limit=FLUSH_BYTES_MAX, actual=sum(sizes), hint="append in parts"
        )


class Uploader:
    """Puts units into objects."""

    def __init__(self, parts: WriterParts) -> None:
        self._store = parts.store
        self._clock = parts.clock
        self._ids = parts.ids
        self._random = parts.randomness
        self._policy = parts.config.upload
        self._codec: bytes_batch.Codec = parts.config.codec
        self._metrics = parts.metrics
        self._keeps_batches = parts.tail_cache is not None

    async def upload(self, units: Sequence[Unit]) -> list[Unit]:
        """Put the units into one new object; returns those that are there, the others are answered."""
        began = self._clock.monotonic()
        now_ms = self._clock.now_ms()
        parts: list[shared_blob.Part] = []
        encoded: list[Unit] = []
        for unit in units:
            try:
                parts.append(self._part(unit, now_ms))
            except (ForebayError, pa.ArrowException) as error:
                unit.fail(_usage(error))
            else:
                encoded.append(unit)
        if not encoded:
            return []
        unique = self._ids.uuid()
        key = shared_wal_key(unique)
        try:
            buffers, slices = self._object(parts, now_ms)
            await self._put(key, buffers)
        except ForebayError as error:
            for unit in encoded:
                unit.fail(_not_done(error))
            return []
        size = slices[-1].body_offset + slices[-1].body_length
        self._metrics.uploaded(size, self._clock.monotonic() - began)
        uri = uri_of(self._store, key)
        for number, (unit, where, part) in enumerate(zip(encoded, slices, parts, strict=True)):
            unit.slice, unit.uri, unit.uploaded_at = where, uri, began
            if not unit.append_id:
                unit.append_id = f"{unique}-{number}"
            if self._keeps_batches:
                unit.batch = _kept(buffers, part, where)
        return encoded

    def _object(
        self, parts: Sequence[shared_blob.Part], now_ms: int
    ) -> tuple[list[bytes | memoryview], list[shared_blob.Slice]]:
        """The buffers to write: from where the records lie, where they are few and none of them tiny."""
        buffers, slices = shared_blob.buffers(parts, created_at_ms=now_ms)
        size = slices[-1].body_offset + slices[-1].body_length
        if self._store.gathers and len(buffers) <= min(BUFFERS_MAX, size // BUFFER_BYTES_MIN):
            return buffers, slices
        # The one copy of the data on its way from the callers to the store.
        return [b"".join(buffers)], slices

    def _part(self, unit: Unit, now_ms: int) -> shared_blob.Part:
        pieces = [
            piece_of(batch) if isinstance(batch := group.batch, BytesBatch) else batch
            for group in unit.groups
        ]
        frame = merge(pieces, time_ms=now_ms, codec=self._codec)
        return shared_blob.Part(unit.keys.topic, unit.keys.partition, unit.count, frame)

    async def _put(self, key: str, buffers: Sequence[bytes | memoryview]) -> None:
        async def put() -> None:
            self._metrics.store_requests["put"].inc()
            if len(buffers) == 1:
                await self._store.put(key, buffers[0])
            else:
                await self._store.put_parts(key, buffers)

        await retry(
            put,
            policy=self._policy,
            clock=self._clock,
            randomness=self._random,
            retryable=_may_be_repeated,
        )


def _may_be_repeated(error: ForebayError) -> bool:
    # The same bytes under a key that nobody else uses: sending them twice is sending them once.
    return isinstance(error, Unavailable | OutcomeUnknown)


def _kept(
    buffers: Sequence[bytes | memoryview], part: shared_blob.Part, where: shared_blob.Slice
) -> EncodedBatch:
    """What the log will give for a slice: exactly the bytes that were written are what a cache serves."""
    size = where.body_offset + where.body_length
    if len(buffers) > 1 and isinstance(part.body, Frame):
        frame = part.body
        return EncodedBatch(frame if size <= VIEWED_BYTES_MAX else frame.tobytes(), where.msg_count)
    [blob] = buffers
    view = memoryview(blob)[where.body_offset : size]
    # A view keeps the whole object in memory for as long as any slice of it is cached.
    return EncodedBatch(view if len(blob) <= VIEWED_BYTES_MAX else bytes(view), where.msg_count)


def _usage(error: Exception) -> ForebayError:
    return error if isinstance(error, ForebayError) else UsageError(f"records that Arrow refuses: {error}")


def _not_done(error: ForebayError) -> ForebayError:
    if not isinstance(error, OutcomeUnknown):
        return error
    return Unavailable(f"the upload did not succeed: {error}", hint="check that the store can be reached")
