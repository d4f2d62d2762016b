"""The data of a compaction: slices in, one object out, checked at both ends.

Slices are fetched in order, some ahead of the others, and joined without being decoded. The run is cut at the
entry where its *uncompressed* size passes the target, so that compressed batches cannot blow it up. A store
that gathers writes the object straight from the slices; for others it is put together, and the slices and it
are the peak: about twice the target, and what the store needs to send it. The slices of the next run may be
read while this one is uploaded; they are joined after it was let go.

Every slice is held against the length, checksum and count of its entry, as soon as it is there and by one
look at its bytes: a batch ends with its own checksum, which says what that of the whole must be. The checksum
of the object is computed over the slices before they are copied together, so reading the object back and
comparing shows whether it was joined, sent and stored right. The sources are only let go after that.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias, TypeVar

from crc32c import crc32c

from forebay.errors import ForebayError, FormatError, OutcomeUnknown, Unavailable
from forebay.formats.batch_facts import plain_bytes, whole_checksum
from forebay.formats.batch_pieces import open_pieces
from forebay.formats.bytes_batch import ENCODING, Codec
from forebay.formats.bytes_batch_join import Piece, join_frame, open_piece
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._compaction_run import Run
from forebay.log._errors import DataLost
from forebay.log._keys import PartitionKeys
from forebay.log._resolve import Located
from forebay.log._uris import key_of
from forebay.storage import ABSENT, ObjectStore

__all__ = ["Folded", "Rewriter", "Source"]

T = TypeVar("T")

_Slice: TypeAlias = tuple[Piece, int, int]
"""A slice, its bytes as stored, and its bytes without compression."""
_Fetched: TypeAlias = tuple[list[_Slice], ForebayError | None]
"""Slices, and what is the matter with the one after them."""

GROUP_ENTRIES_MAX: Final = 64
"""Most slices that one task fetches one after the other."""
READ_BACK_BYTES: Final = 8 * 1024 * 1024
"""Bytes of one request when a new object is read back."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A run as one body."""

    parts: list[bytes | memoryview]
    """The body, in one or many buffers."""
    size: int
    """Bytes of the body."""
    entries: list[Located]
    """What it was made of: the run, or the first part of it."""
    bytes_read: int
    checksum: int
    """crc32c of the body."""

    @property
    def count(self) -> int:
        """Records."""
        return self.entries[-1].end_offset - self.entries[0].start_offset + 1


@dataclass(slots=True)
class Source:
    """What was read of a run, checked."""

    pieces: list[tuple[Piece, int]] = field(default_factory=list)
    entries: list[Located] = field(default_factory=list)
    bytes_read: int = 0
    bytes_plain: int = 0


@dataclass(frozen=True, slots=True)
class Rewriter:
    """Reads runs and writes compacted objects."""

    store: ObjectStore
    clock: Clock
    ids: IdSource
    randomness: random.Random
    policy: RetryPolicy
    on_stage: Callable[[str, float], None]

    async def read(self, run: Run, *, target_bytes: int, fetches_max: int) -> Source:
        """The slices of a run, or of its first part, in order. Raises `NotFound` or `DataLost`."""
        began = self.clock.monotonic()
        source = await self._read(run, target_bytes + target_bytes // 4, fetches_max)
        self.on_stage("read", self.clock.monotonic() - began)
        return source

    def fold(self, source: Source, codec: Codec) -> Folded:
        """The records of a source as one batch. The source is empty afterwards."""
        began = self.clock.monotonic()
        _check_count(source)
        frame = join_frame(source.pieces, codec=codec)
        # Where they are joined, the slices are let go before the upload makes copies of its own.
        parts: list[bytes | memoryview] = frame.parts if self.store.gathers else [frame.tobytes()]
        source.pieces.clear()
        folded = Folded(parts, len(frame), source.entries, source.bytes_read, frame.crc32c)
        self.on_stage("encode", self.clock.monotonic() - began)
        return folded

    async def _read(self, run: Run, plain_bytes_max: int, fetches_max: int) -> Source:
        """The slices of the run in order, up to so many uncompressed bytes."""
        source = Source()
        groups = _grouped(run.entries, fetches_max)
        ahead: deque[asyncio.Task[_Fetched]] = deque()
        upcoming = iter(groups)
        try:
            for group in groups:
                while len(ahead) < fetches_max and (following := next(upcoming, None)):
                    ahead.append(asyncio.create_task(self._fetch_group(following)))
                slices, error = await ahead.popleft()
                for entry, (piece, stored, plain) in zip(group, slices, strict=False):
                    source.pieces.append((piece, entry.entry.created_at_ms))
                    source.entries.append(entry)
                    source.bytes_read += stored
                    source.bytes_plain += plain
                    if source.bytes_plain >= plain_bytes_max:
                        return source
                if error is not None:
                    raise error
        finally:
            for task in ahead:
                task.cancel()
        return source

    async def _fetch_group(self, group: Sequence[Located]) -> _Fetched:
        """The slices up to the first that cannot be had or is damaged, and what is the matter with that one.

        It is not raised: a request that nobody waits for any more must not complain.
        """
        found: list[bytes] = []
        failure: ForebayError | None = None
        try:
            for wanted in group:
                try:
                    found.append(await self._get(wanted))
                except Unavailable:
                    again = partial(self._get, wanted)
                    found.append(await self._patiently(again))
        except ForebayError as error:
            failure = error
        slices, damage = _checked(group, found)
        return slices, damage or failure

    async def _get(self, wanted: Located) -> bytes:
        entry = wanted.entry
        key = key_of(self.store, entry.data_key)
        if entry.byte_offset is None or entry.byte_length is None:
            return (await self.store.get(key)).data
        return await self.store.get_range(key, entry.byte_offset, entry.byte_length)

    async def upload(self, keys: PartitionKeys, folded: Folded, *, read_back: bool) -> str:
        """Write the object under a fresh name, see that it arrived whole, and return its key."""
        began = self.clock.monotonic()
        if not read_back and _checksum(folded.parts) != folded.checksum:
            raise ForebayError(f"{keys}: slices were joined wrongly", hint="check the memory of this machine")

        async def put() -> str:
            # A new name for every attempt: an attempt whose reply was lost leaves an orphan, no puzzle.
            key = keys.compacted_object(self.ids.uuid())
            if len(folded.parts) == 1:
                await self.store.put(key, folded.parts[0], ABSENT)
            else:
                await self.store.put_parts(key, folded.parts, ABSENT)
            return key

        key = await retry(
            put,
            policy=self.policy,
            clock=self.clock,
            randomness=self.randomness,
            retryable=lambda error: isinstance(error, Unavailable | OutcomeUnknown),
        )
        if read_back:
            await self._read_back(key, folded)
        self.on_stage("write", self.clock.monotonic() - began)
        return key

    async def _read_back(self, key: str, folded: Folded) -> None:
        size, checksum = folded.size, 0
        for position in range(0, size, READ_BACK_BYTES):
            length = min(READ_BACK_BYTES, size - position)
            piece = await self._patiently(
                lambda position=position, length=length: self.store.get_range(  # type: ignore[misc]
                    key, position, length
                )
            )
            checksum = crc32c(piece, checksum)
        if checksum != folded.checksum:
            raise DataLost(
                f"{key} was read back with other bytes than were written",
                hint="nothing was let go; check the store before compacting again",
            )

    async def _patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        return await retry(operation, policy=self.policy, clock=self.clock, randomness=self.randomness)


def _checksum(parts: Sequence[bytes | memoryview]) -> int:
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
    return checksum


def _grouped(entries: Sequence[Located], fetches_max: int) -> list[Sequence[Located]]:
    """Neighbours that one task fetches one after the other. Single entries, where there are few."""
    size = min(GROUP_ENTRIES_MAX, max(1, len(entries) // (4 * fetches_max)))
    return [entries[first : first + size] for first in range(0, len(entries), size)]


def _checked(group: Sequence[Located], found: Sequence[bytes]) -> _Fetched:
    """The slices up to the first that is not what its entry says."""
    pieces: Sequence[Piece | None]
    try:
        pieces = open_pieces(found)
    except FormatError:
        pieces = [None] * len(found)  # Each by itself, to see which it is.
    slices: list[_Slice] = []
    try:
        for wanted, data, piece in zip(group, found, pieces, strict=False):
            slices.append((_compared(wanted, data, piece), len(data), plain_bytes(data)))
    except DataLost as damage:
        return slices, damage
    return slices, None


def _compared(wanted: Located, data: bytes, piece: Piece | None) -> Piece:
    """The slice, if it is what its entry says; raises `DataLost`. `piece`: it was opened already."""
    entry = wanted.entry
    if entry.encoding != ENCODING:
        raise _damaged(wanted, f"it is encoded as {entry.encoding[:50]!r}")
    if entry.byte_length is not None and len(data) != entry.byte_length:
        raise _damaged(wanted, f"{len(data)} bytes, {entry.byte_length} expected")
    if piece is None:
        try:
            piece = open_piece(data)
        except FormatError as error:
            raise _damaged(wanted, str(error)) from error
    if entry.crc32c is not None and whole_checksum(data) != entry.crc32c:
        raise _damaged(wanted, "the checksum of the bytes is not that of the index entry")
    if piece.count != entry.msg_count:
        raise _damaged(wanted, f"it holds {piece.count} records, its entry says {entry.msg_count}")
    return piece


def _damaged(wanted: Located, reason: str) -> DataLost:
    offsets = f"offsets {wanted.start_offset} to {wanted.end_offset}"
    return DataLost(
        f"{wanted.keys}: {wanted.entry.data_key} with {offsets} is damaged: {reason}",
        hint="restore the object from a copy; `forebay log verify` lists what else is affected",
    )


def _check_count(source: Source) -> None:
    found = sum([piece.count for piece, _ in source.pieces])
    expected = source.entries[-1].end_offset - source.entries[0].start_offset + 1
    if found != expected:
        raise ForebayError(
            f"{source.entries[0].keys}: {found} records were read for {expected} offsets",
            hint="this is a defect of Forebay",
        )
