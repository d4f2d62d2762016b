"""Records of `ack.log`, and the checkpoint that makes its replay short.

    ack.log     a log of frames (`quiver_frame`), each body one record: msgpack array, tag first
                ["outcome", subscriber, first, last, outcome, reason, batch]
                ["register", subscriber, after]       ["unregister", subscriber]
                ["sealed", seq, [[first, last]..]]    the entry sequences of the WAL that a segment will hold
                ["finalized", seq, [[first, last]..]] those that it holds; they need no replay
                ["dropped", seq, reason, rows, bytes] a segment is about to go before all had it
                ["wal_dropped", first, last, reason, rows, bytes]  entries that will never be in a segment
                ["floor", next_segment, next_entry]   lowest numbers that may be given out

    checkpoint  0    8    magic "FBYQCKP\\0"
                8    2    format version, 1
                10   2    size of this header, 20
                12   4    length of the body
                16   4    crc32c of bytes 0 to 16
                20   n    msgpack map: `Checkpoint`
                20+n 4    crc32c of the body

An outcome speaks of a run of segments, so that a subscriber that is caught up costs one record, however many
segments it acknowledged at once. `ack` and `dropped` are terminal; `nack` is written for the record and
changes no position. Every record may be replayed twice without harm. The checkpoint holds the set resolved
above the high-water mark too: a log that is cut would otherwise lose acknowledgements out of order.
"""

from __future__ import annotations

import re
import struct
from typing import Final, Literal, TypeAlias

import msgspec
from crc32c import crc32c

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = [
    "CHECKPOINT_BYTES_MAX",
    "SUBSCRIBER_CHARS_MAX",
    "Checkpoint",
    "Dropped",
    "Finalized",
    "Floor",
    "Outcome",
    "Record",
    "Register",
    "Runs",
    "Sealed",
    "SubscriberState",
    "Unregister",
    "WalDropped",
    "check_runs",
    "check_subscriber",
    "decode",
    "decode_checkpoint",
    "encode",
    "encode_checkpoint",
]

CHECKPOINT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest checkpoint of Quiver's subscriber state."""
SUBSCRIBER_CHARS_MAX: Final = 64
"""Longest name of a Quiver subscriber."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEAD: Final = struct.Struct("<8sHHI")
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"FBYQCKP\0"
_VERSION: Final = 1

Runs: TypeAlias = list[tuple[int, int]]
Reason: TypeAlias = Literal["", "size", "expired", "rejected", "lost"]


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Common settings of the records."""


class Outcome(_Record, tag="outcome", frozen=True):
    """What a subscriber did with the segments `first` to `last`."""

    subscriber: str
    first: int
    last: int
    outcome: Literal["ack", "nack", "dropped"]
    reason: Reason = ""
    batch: int | None = None
    """Reserved for outcomes of single batches."""


class Register(_Record, tag="register", frozen=True):
    """A subscriber begins behind segment `after`."""

    subscriber: str
    after: int


class Unregister(_Record, tag="unregister", frozen=True):
    """A subscriber is gone and pins nothing."""

    subscriber: str


class Sealed(_Record, tag="sealed", frozen=True):
    """A segment has these WAL entries in it, and no file yet: subscribers may get it from memory. A crash
    leaves it to be made again from the WAL, the same rows under the same number."""

    segment: int
    entries: Runs


class Finalized(_Record, tag="finalized", frozen=True):
    """A segment became durable with these WAL entries in it, or nobody needs them any more."""

    segment: int
    entries: Runs


class Dropped(_Record, tag="dropped", frozen=True):
    """A segment goes before everybody had it."""

    segment: int
    reason: Reason
    rows: int
    bytes: int


class WalDropped(_Record, tag="wal_dropped", frozen=True):
    """WAL entries that will not be put into a segment."""

    first: int
    last: int
    reason: Reason
    rows: int = 0
    bytes: int = 0


class Floor(_Record, tag="floor", frozen=True):
    """Numbers below were given out already."""

    next_segment: int
    next_entry: int


Record: TypeAlias = Outcome | Register | Unregister | Sealed | Finalized | Dropped | WalDropped | Floor


class SubscriberState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A subscriber in a checkpoint."""

    high_water: int
    resolved_above: Runs
    dropped: dict[str, int]
    """Segments it never got, by reason, since it was registered."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that replaying `ack.log` from its beginning would give."""

    generation: int
    """Replay goes on with the log file of this number."""
    next_segment: int
    next_entry: int
    live: Runs
    """Segments whose files should be there."""
    covered: Runs
    """WAL entries that need no replay."""
    subscribers: dict[str, SubscriberState]
    losses: dict[str, int]
    """Cumulative counts of what was dropped, by kind and reason."""
    sealed: list[tuple[int, Runs]] = []
    """Segments without a file, and their WAL entries."""


_encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_checkpoint = msgspec.msgpack.Decoder(Checkpoint).decode


def check_subscriber(name: object) -> str:
    """Return `name`, or raise `UsageError` where it cannot be a subscriber's."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r:.80} is not a name for a subscriber",
            hint=f"1 to {SUBSCRIBER_CHARS_MAX} of A-Z a-z 0-9 _ . -",
        )
    return name


def encode(record: Record) -> bytes:
    """The body of the frame."""
    return _encode(record)


def decode(body: bytes | memoryview) -> Record:
    """Raises `Corrupt` for anything but one record."""
    try:
        record: Record = _decode_record(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt("ack.log record", 0, str(error)) from error
    _check(record)
    return record


def _check(record: Record) -> None:
    match record:
        case Outcome(subscriber=name) | Register(subscriber=name) | Unregister(subscriber=name):
            if not _NAME.fullmatch(name):
                raise Corrupt("ack.log record", 0, f"subscriber {name[:80]!r}")
        case _:
            pass
    match record:
        case Outcome(first=first, last=last) | WalDropped(first=first, last=last):
            runs: Runs = [(first, last)]
        case Sealed(entries=runs) | Finalized(entries=runs):
            pass
        case _:
            runs = []
    check_runs("ack.log record", runs)


def check_runs(what: str, runs: Runs) -> None:
    """Raise `Corrupt` unless the runs are in order and apart."""
    last = -1
    for first, end in runs:
        if first <= last or end < first or end >= 1 << 63:
            raise Corrupt(what, 0, f"run {first} to {end} is out of order")
        last = end


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The whole file."""
    body = _encode(checkpoint)
    if len(body) > CHECKPOINT_BYTES_MAX:
        raise LimitExceeded(
            "CHECKPOINT_BYTES_MAX", limit=CHECKPOINT_BYTES_MAX, actual=len(body), hint="remove subscribers"
        )
    head = _HEAD.pack(_MAGIC, _VERSION, _HEAD.size + _CRC.size, len(body))
    return b"".join((head, _CRC.pack(crc32c(head)), body, _CRC.pack(crc32c(body))))


def decode_checkpoint(data: bytes | memoryview) -> Checkpoint:
    """Raises `Corrupt`, or `UnsupportedEncoding` for a later version."""
    what, size = "quiver checkpoint", _HEAD.size + _CRC.size
    if len(data) < size:
        raise Corrupt(what, len(data), "cut short")
    magic, version, header_size, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or _CRC.unpack_from(data, _HEAD.size)[0] != crc32c(data[: _HEAD.size]):
        raise Corrupt(what, 0, "magic or checksum of the header does not match")
    if version != _VERSION or header_size != size:
        raise UnsupportedEncoding(what, f"version {version}")
    if length > CHECKPOINT_BYTES_MAX or len(data) != size + length + _CRC.size:
        raise Corrupt(what, 12, f"a body of {length} bytes in a file of {len(data)}")
    body = data[size : size + length]
    if _CRC.unpack_from(data, size + length)[0] != crc32c(body):
        raise Corrupt(what, size, "the checksum does not match")
    try:
        checkpoint = _decode_checkpoint(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(what, size, str(error)) from error
    for runs in (
        checkpoint.live,
        checkpoint.covered,
        *(entries for _, entries in checkpoint.sealed),
        *(each.resolved_above for each in checkpoint.subscribers.values()),
    ):
        check_runs(what, runs)
    if not all(_NAME.fullmatch(name) for name in checkpoint.subscribers):
        raise Corrupt(what, size, "the name of a subscriber")
    return checkpoint
