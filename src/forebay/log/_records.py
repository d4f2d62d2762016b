"""The records a log keeps in the coordinator, as JSON with the field names of the specification.

Fields of ours that the specification does not have are optional and left out where unset, and fields we do
not know are ignored, so that either side can read the other's. `control` is the heart: log state, counter
and pending append are one record, so a fence is atomic with a commit.

A commit makes several of these per partition. They hold plain values and can be part of no ring, so they are
kept from the garbage collector (`gc=False`), which would run several times in a flush of 100 partitions.

    counter      next offset to be assigned; it starts at 1 and never goes back
    pending      the last append; the next append puts its index entry and replaces it in one request
    epoch        the fencing epoch: it only grows, so a stale writer is told apart from a fenced log
    start_offset the first offset not trimmed
    producers    the last appends of idempotent producers, bounded, so a repeated append finds its offsets
"""

from __future__ import annotations

from typing import Final, Literal, TypeVar

import msgspec

from forebay.errors import StorageDamaged

__all__ = [
    "PRODUCERS_MAX",
    "PRODUCER_APPENDS_KEPT",
    "Claim",
    "Compaction",
    "CompactionState",
    "Control",
    "Cursor",
    "IndexEntry",
    "Pending",
    "ProducerAppend",
    "decode_record",
    "encode_record",
]

PRODUCERS_MAX: Final = 256
"""Idempotent producers a partition remembers; the one silent for longest is forgotten first."""
PRODUCER_APPENDS_KEPT: Final = 5
"""Appends remembered of each: how many a producer may have under way at once."""

EntryType = Literal["WAL", "COMPACTED"]
CompactionState = Literal["WRITING_COMPACTED_INDEX", "DELETING_OLD", "UPDATING_CURSOR"]
LogState = Literal["OPEN", "FENCED"]


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One append or one compacted range. Its key names the last offset it covers."""

    type: EntryType
    msg_count: int
    data_key: str
    """Full URI of the object."""
    encoding: str
    created_at_ms: int
    byte_offset: int | None = None
    """First byte of the slice in a shared object; None: the whole object."""
    byte_length: int | None = None
    crc32c: int | None = None
    """Checksum of the slice, or of the whole object."""
    append_id: str | None = None
    """Unique to one append: how a writer recognises its own after a lost reply."""
    size_bytes: int | None = None
    """Bytes of the whole object of a compacted range, for retention and planning."""
    first_time_ms: int | None = None
    """Earliest append time inside a compacted range; `created_at_ms` is the latest."""
    writer: str | None = None
    """Who appended, for `explain`."""

    def start_offset(self, end_offset: int) -> int:
        """The first offset covered by the entry under the key of `end_offset`."""
        return end_offset - self.msg_count + 1


class Pending(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The last append, before its index entry is put."""

    append_id: str
    start_offset: int
    end_offset: int
    msg_count: int
    entry_type: EntryType
    data_key: str
    encoding: str
    created_at_ms: int
    byte_offset: int | None = None
    byte_length: int | None = None
    crc32c: int | None = None
    writer: str | None = None

    def index_entry(self) -> IndexEntry:
        """The entry this append will have, or has, in the index."""
        return IndexEntry(
            type=self.entry_type,
            msg_count=self.msg_count,
            data_key=self.data_key,
            encoding=self.encoding,
            created_at_ms=self.created_at_ms,
            byte_offset=self.byte_offset,
            byte_length=self.byte_length,
            crc32c=self.crc32c,
            append_id=self.append_id,
            writer=self.writer,
        )


class ProducerAppend(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a partition remembers of one append of an idempotent producer."""

    sequence: int
    start_offset: int
    end_offset: int
    at_ms: int


class Control(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The state of a partition."""

    log_state: LogState
    sequence_counter: int
    """Next offset to be assigned."""
    pending: Pending | None
    epoch: int = 0
    start_offset: int = 1
    """First offset that was not trimmed."""
    producers: dict[str, list[ProducerAppend]] = {}
    """Last appends by producer id, newest last; producers in the order of their last append."""

    @classmethod
    def of_new(cls, first_offset: int) -> Control:
        """The record of a partition before its first append."""
        return cls(log_state="OPEN", sequence_counter=first_offset, pending=None, start_offset=first_offset)

    @property
    def just_begun(self) -> bool:
        """Whether the partition has nothing but its last append: as after the request that makes one."""
        last = self.sequence_counter if self.pending is None else self.pending.start_offset
        return last <= self.start_offset

    def is_left_over(self, topic_state: str, first_offset: int) -> bool:
        """Whether a late request has made this record after the topic that it is of was deleted.

        It begins below the topic then. So does every partition of a topic that is just being deleted.
        """
        steady = topic_state in ("ACTIVE", "DELETED")
        return steady and self.just_begun and self.start_offset < first_offset


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """How far compaction has come."""

    offset: int
    """Next offset that is not compacted."""


class Compaction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A compaction under way: enough for anybody to finish it."""

    compaction_id: str
    state: CompactionState
    start_offset: int
    end_offset: int
    msg_count: int
    data_key: str
    encoding: str
    created_at_ms: int
    tail_start_offset: int | None = None
    """Start of the last selected entry: what the end key held before it was overwritten."""
    size_bytes: int | None = None
    crc32c: int | None = None
    first_time_ms: int | None = None
    last_time_ms: int | None = None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who compacts a partition. An optimisation only: two live compactors are safe."""

    compactor_id: str
    claimed_at_ms: int


Record = TypeVar("Record", bound=msgspec.Struct)

_encoder: Final = msgspec.json.Encoder()
_decoders: Final[dict[type[msgspec.Struct], msgspec.json.Decoder[msgspec.Struct]]] = {}


def encode_record(record: msgspec.Struct) -> bytes:
    """The JSON of a record."""
    return _encoder.encode(record)


def decode_record(kind: type[Record], key: str, value: bytes) -> Record:
    """The record in a value; raises `StorageDamaged` naming the key where it is not one."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        record = decoder.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageDamaged(
            f"{key!r} holds no {kind.__name__}: {error}",
            hint="something else wrote this key; `forebay log verify` shows what is affected",
        ) from error
    assert isinstance(record, kind)
    return record
