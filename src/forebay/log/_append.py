"""What a caller hands to a writer, and what it gets back: groups and results.

A group is the records of one call for one partition. It is taken or refused as a whole, gets consecutive
offsets, and has exactly one result, whatever becomes of the other groups of the same call or flush.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from forebay.errors import ForebayError, LimitExceeded, UsageError
from forebay.formats.bytes_batch import BytesBatch, Headers
from forebay.formats.bytes_batch_piece import Piece, piece_of_lists
from forebay.formats.encoded_batch import EncodedBatch
from forebay.formats.shared_blob import Slice
from forebay.log._keys import PartitionKeys
from forebay.log._numbers import WHOLE_MAX

__all__ = [
    "FLUSH_BYTES_MAX",
    "GROUPS_PER_CALL_MAX",
    "PRODUCER_ID_CHARS_MAX",
    "RECORD_BYTES_MAX",
    "AppendGroup",
    "AppendResult",
    "Unit",
    "failed",
    "validate_group",
]

RECORD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest value or key of a record."""
GROUPS_PER_CALL_MAX: Final = 100_000
"""Most groups of one call."""
FLUSH_BYTES_MAX: Final = 512 * 1024 * 1024
"""Most bytes of all groups of one call, which become one object."""
PRODUCER_ID_CHARS_MAX: Final = 64
"""Longest name of an idempotent producer: each partition keeps the names of the last 256 in one record."""


@dataclass(slots=True, eq=False)
class AppendGroup:
    """The records of one call for one partition. Not to be changed once it was handed to a writer."""

    topic: str
    partition: int
    batch: BytesBatch | Piece
    """Columns, or the sections of an encoded batch, which are not made into columns on their way."""
    producer_id: str | None = None
    """Makes the append idempotent, together with `sequence`."""
    sequence: int | None = None
    """Number of this append among those of the producer to this partition: 0, 1, 2 and so on."""
    epoch: int | None = None
    """Fencing epoch of the writer. Below the partition's epoch the append is refused for ever."""
    _size_bytes: int = field(default=-1, init=False, repr=False)

    @classmethod
    def of(
        cls,
        topic: str,
        partition: int,
        records: Sequence[bytes] | pa.BinaryArray,
        *,
        keys: Sequence[bytes | None] | pa.BinaryArray | None = None,
        timestamps_ms: Sequence[int] | npt.NDArray[np.int64] | None = None,
        headers: Sequence[Headers | None] | pa.ListArray | None = None,
    ) -> AppendGroup:
        """A group from lists or Arrow arrays. `dataclasses.replace` adds producer id, sequence and epoch."""
        if type(records) is list and headers is None and (keys is None or type(keys) is list):
            try:
                return cls(topic, partition, piece_of_lists(records, keys=keys, timestamps_ms=timestamps_ms))
            except (TypeError, UsageError):
                pass  # What is wrong with them is found below, or when the group is appended.
        batch = BytesBatch.of(records, keys=keys, timestamps_ms=timestamps_ms, headers=headers)
        return cls(topic, partition, batch)

    @property
    def size_bytes(self) -> int:
        """Bytes of the records in memory: what counts against the bounds of a producer."""
        # Asked for by the producer and again by the writer, and Arrow takes its time to tell.
        if self._size_bytes < 0:
            self._size_bytes = self.batch.size_bytes
        return self._size_bytes


class AppendResult(msgspec.Struct, frozen=True):
    """What became of one group."""

    topic: str
    partition: int
    start_offset: int | None
    """Offset of the first record, or None where the append failed."""
    end_offset: int | None
    """Offset of the last record."""
    count: int
    index_key: str | None = None
    """Key of the index entry that covers the records; several groups of one flush may share it."""
    wal_uri: str | None = None
    """Object that holds the records, or None where it is not known any more (a recognised repetition)."""
    duplicate: bool = False
    """Nothing was appended: an earlier append with this producer id and sequence has these offsets."""
    error: ForebayError | None = None
    """What went wrong. An `OutcomeUnknown` may have been appended; everything else certainly was not."""

    @property
    def ok(self) -> bool:
        """Whether the records are durable, at these offsets."""
        return self.error is None

    def unwrap(self) -> AppendResult:
        """Itself; raises the error."""
        if self.error is not None:
            raise self.error
        return self


# Like the other things that a commit makes one of per partition, a struct: made in a tenth of the time.
class Unit(msgspec.Struct, eq=False):
    """What one partition gets of one flush: one slice of the object, one index entry, all or nothing."""

    keys: PartitionKeys
    epoch: int | None
    answers: list[AppendResult | None]
    """Of the whole flush."""
    groups: list[AppendGroup] = []
    places: list[int] = []
    """Place of each group's answer in `answers`."""
    count: int = 0
    """Records of all groups."""
    idempotent: bool = False
    """Whether any of them has a producer id."""
    append_id: str = ""
    slice: Slice | None = None
    """None: to be uploaded."""
    uri: str = ""
    uploaded_at: float = 0.0
    """When the upload began, on the monotonic clock."""
    batch: EncodedBatch | None = None
    """The records of all groups as a read will give them; None where nobody wants to be told."""
    start_offset: int = 0
    """Once it is committed."""
    time_ms: int = 0
    """Time of its entry, once it is committed."""

    def add(self, group: AppendGroup, place: int) -> None:
        """One more group."""
        self.groups.append(group)
        self.places.append(place)
        self.count += len(group.batch)
        if group.producer_id is not None:
            self.idempotent = True

    def succeed(self, start_offset: int, uri: str, time_ms: int) -> None:
        """Answer every group: the unit was committed from this offset on, at this time."""
        self.start_offset, self.time_ms = start_offset, time_ms
        topic, partition, answers = self.keys.topic, self.keys.partition, self.answers
        end = start_offset + self.count - 1
        index_key = self.keys.index(end)
        if len(self.places) == 1:
            answers[self.places[0]] = AppendResult(
                topic, partition, start_offset, end, self.count, index_key, uri
            )
            return
        for group, place in zip(self.groups, self.places, strict=True):
            count = len(group.batch)
            end = start_offset + count - 1
            answers[place] = AppendResult(topic, partition, start_offset, end, count, index_key, uri)
            start_offset = end + 1

    def fail(self, error: ForebayError) -> None:
        """Answer every group with the same error."""
        for group, place in zip(self.groups, self.places, strict=True):
            self.answers[place] = failed(group, error)

    def keep(self, numbers: Sequence[int]) -> None:
        """Go on with some of the groups, the others being answered. What was uploaded is not fit any more."""
        self.groups = [self.groups[number] for number in numbers]
        self.places = [self.places[number] for number in numbers]
        self.count = sum([len(group.batch) for group in self.groups])
        self.slice = self.batch = None


def failed(group: AppendGroup, error: ForebayError) -> AppendResult:
    """The result of a group that was not appended."""
    return AppendResult(group.topic, group.partition, None, None, len(group.batch), error=error)


def validate_group(group: AppendGroup, size_bytes: int) -> None:
    """Raise a `UsageError` where a group can never be appended. (Topic and partition: `PartitionKeys`.)"""
    batch = group.batch
    count = len(batch)
    # Here and not only in `PartitionKeys`, which are remembered: True and 1.0 would find those of 1.
    if type(group.partition) is not int:
        raise UsageError(f"partition {group.partition!r}", hint="a partition is an integer from 0 on")
    if count == 0:
        raise UsageError("a group holds at least one record", hint="leave empty groups out")
    if isinstance(batch, BytesBatch):
        _check_columns(batch, count)
    if size_bytes > RECORD_BYTES_MAX and (longest := batch.longest_bytes()) > RECORD_BYTES_MAX:
        raise LimitExceeded(
            "RECORD_BYTES_MAX", limit=RECORD_BYTES_MAX, actual=longest, hint="put it into an object"
        )
    if group.producer_id is not None or group.sequence is not None or group.epoch is not None:
        _validate_producer(group)


def _check_columns(batch: BytesBatch, count: int) -> None:
    if batch.values.null_count:
        raise UsageError("a record is None", hint="an empty record is b''")
    for column in (batch.keys, batch.timestamps_ms, batch.headers):
        if column is not None and len(column) != count:
            raise UsageError(f"a column of {len(column)} for {count} records", hint="give one per record")


def _validate_producer(group: AppendGroup) -> None:
    producer_id, sequence = group.producer_id, group.sequence
    if (producer_id is None) != (sequence is None):
        raise UsageError("a producer id and a sequence belong together", hint="give both or none")
    if producer_id is not None and not _is_name(producer_id):
        raise UsageError(
            f"producer id {str(producer_id)[:PRODUCER_ID_CHARS_MAX]!r}",
            hint=f"a name of 1 to {PRODUCER_ID_CHARS_MAX} characters",
        )
    for name, number in (("sequence", sequence), ("epoch", group.epoch)):
        if number is not None and (type(number) is not int or not 0 <= number <= WHOLE_MAX):
            raise UsageError(f"{name} {number!r}", hint=f"a {name} is an integer from 0 on")


def _is_name(text: object) -> bool:
    """Whether it can be a producer id: text that JSON can hold."""
    if not isinstance(text, str) or not 1 <= len(text) <= PRODUCER_ID_CHARS_MAX:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
