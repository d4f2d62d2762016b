"""The manifest of a stream's remote tier: a root, and groups below it, all arrays of 30-byte entries.

    root    4       "OSIR"
            4       u32 version 1
            8       u64 first offset
            8       u64 next offset
            8       i64 first timestamp, of the first fragment
            8       i64 last timestamp of the first fragment
            9       2 zero bits, u70 sum of the bytes of all fragments
            30 N    entries

    group   4       "OSIG", "OSIK" or "OSIM": a group of fragments, a kilo-group of groups, a mega-group
            4       u32 version 1
            8       u64 offset of its first child
            8       i64 first timestamp of its first child
            9       zeros
            30 M    entries

    entry   8       u64 offset
            8       i64 first timestamp
            8       i64 last timestamp
            6       fragment: 2 bits kind 0, 1 bit first of its segment, 45 bits bytes of chunks
                    group:    2 bits kind 1 to 3 (its height), 46 bits uid

Entries are sorted by offset, so each array is searched by bisection. A manifest without entries has offsets 0
and timestamps -1.

The uid of a root or a group is written as 12 hexadecimal digits in its key. Ours are made of 14 random bits
and, below them, the CRC-32C of the object: two writers never collide, and a node that was damaged is found
out by whoever read its uid in the parent, without another object that would hold the checksum.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._errors import Corrupt, UnsupportedEncoding

__all__ = [
    "ENTRY_BYTES",
    "ENTRY_DTYPE",
    "FRAGMENT",
    "GROUP",
    "KILO_GROUP",
    "MEGA_GROUP",
    "UID_BITS",
    "Root",
    "check_uid",
    "decode_group",
    "decode_root",
    "encode_group",
    "encode_root",
    "entries_from",
    "fragment_entries",
    "group_entry",
    "join_entries",
    "kinds_of",
    "make_uid",
    "sizes_of",
    "uid_text",
    "uids_of",
]

Bytes: TypeAlias = bytes | bytearray | memoryview
Entries: TypeAlias = npt.NDArray[Any]

VERSION: Final = 1
ROOT_HEADER_BYTES: Final = 49
GROUP_HEADER_BYTES: Final = 33
ENTRY_DTYPE: Final = np.dtype(
    [("offset", ">u8"), ("first_ts", ">i8"), ("last_ts", ">i8"), ("high", ">u2"), ("low", ">u4")]
)
ENTRY_BYTES: Final = ENTRY_DTYPE.itemsize
FRAGMENT: Final = 0
GROUP: Final = 1
KILO_GROUP: Final = 2
MEGA_GROUP: Final = 3
UID_BITS: Final = 46
UID_RANDOM_BITS: Final = UID_BITS - 32
FRAGMENT_BYTES_MAX: Final = (1 << 45) - 1
"""Most bytes of chunks of one fragment that an entry can say."""
TOTAL_BYTES_MAX: Final = (1 << 70) - 1
"""Most bytes of a whole stream that a root can say."""
NODE_ENTRIES_MAX: Final = 1 << 20
"""Most entries of a node that we read: a damaged object must not decide how much memory we take."""

_ROOT: Final = struct.Struct(">4sIQQqq")
_GROUP: Final = struct.Struct(">4sIQq9s")
_TOTAL_BYTES: Final = 9
_MAGICS: Final = {GROUP: b"OSIG", KILO_GROUP: b"OSIK", MEGA_GROUP: b"OSIM"}
_KIND_SHIFT: Final = 14
_FIRST_BIT: Final = 1 << 13


class Root(NamedTuple):
    """The root of a manifest."""

    first_offset: int
    next_offset: int
    first_timestamp: int
    first_last_timestamp: int
    """Last timestamp of the first fragment."""
    total_bytes: int
    entries: Entries


def entries_from(data: Bytes, at: int, what: str) -> Entries:
    """The entries from `at` to the end, sorted or refused."""
    body = len(data) - at
    if body % ENTRY_BYTES:
        raise Corrupt(what, at, f"{body} bytes are no whole number of entries")
    if body // ENTRY_BYTES > NODE_ENTRIES_MAX:
        raise Corrupt(what, at, f"{body // ENTRY_BYTES} entries")
    entries = np.frombuffer(data, ENTRY_DTYPE, offset=at)
    _check_entries(entries, at, what)
    return entries


def _check_entries(entries: Entries, at: int, what: str) -> None:
    wrong = np.flatnonzero(entries["offset"][1:] <= entries["offset"][:-1])
    if len(wrong):
        raise Corrupt(what, at + ENTRY_BYTES * (int(wrong[0]) + 1), "offsets of the entries do not increase")
    kinds = kinds_of(entries)
    if (kinds[1:] > kinds[:-1]).any():
        raise Corrupt(what, at, "a group comes after a smaller one")


def encode_root(root: Root) -> bytes:
    """The bytes of a root."""
    if not 0 <= root.total_bytes <= TOTAL_BYTES_MAX:
        raise LimitExceeded(
            "TOTAL_BYTES_MAX", limit=TOTAL_BYTES_MAX, actual=root.total_bytes, hint="it has 70 bits"
        )
    head = _ROOT.pack(
        b"OSIR",
        VERSION,
        root.first_offset,
        root.next_offset,
        root.first_timestamp,
        root.first_last_timestamp,
    )
    return head + root.total_bytes.to_bytes(_TOTAL_BYTES, "big") + _bytes_of(root.entries)


def decode_root(data: Bytes) -> Root:
    """A root, its entries within its bounds."""
    what = "manifest root"
    _check_head(data, ROOT_HEADER_BYTES, b"OSIR", what)
    _, _, first, following, first_ts, first_last_ts = _ROOT.unpack_from(data)
    total = int.from_bytes(data[_ROOT.size : ROOT_HEADER_BYTES], "big")
    if total > TOTAL_BYTES_MAX:
        raise Corrupt(what, _ROOT.size, "the reserved bits are set")
    entries = entries_from(data, ROOT_HEADER_BYTES, what)
    if first > following or following >= 1 << 63:
        raise Corrupt(what, 8, f"offsets {first} to {following}")
    if len(entries) and (int(entries["offset"][0]) != first or int(entries["offset"][-1]) >= following):
        raise Corrupt(
            what, ROOT_HEADER_BYTES, f"the entries do not lie within offsets {first} to {following}"
        )
    return Root(first, following, first_ts, first_last_ts, total, entries)


def encode_group(kind: int, entries: Entries) -> bytes:
    """The bytes of a group of `kind` over these entries."""
    if kind not in _MAGICS or len(entries) == 0:
        raise UsageError(f"no group of kind {kind} over {len(entries)} entries", hint="kinds are 1 to 3")
    _check_children(kind, entries, UsageError)
    head = _GROUP.pack(
        _MAGICS[kind], VERSION, int(entries["offset"][0]), int(entries["first_ts"][0]), bytes(9)
    )
    return head + _bytes_of(entries)


def decode_group(data: Bytes, kind: int) -> Entries:
    """The entries of a group that must be of `kind`."""
    what = f"manifest group of kind {kind}"
    if kind not in _MAGICS:
        raise UsageError(f"there is no group of kind {kind}", hint="kinds are 1 to 3")
    _check_head(data, GROUP_HEADER_BYTES, _MAGICS[kind], what)
    _, _, offset, first_ts, reserved = _GROUP.unpack_from(data)
    # Readers of other origin require the two topmost bits to be zero and ignore the rest.
    if reserved[0] >> 6:
        raise Corrupt(what, 24, "the reserved bits are set")
    entries = entries_from(data, GROUP_HEADER_BYTES, what)
    if len(entries) == 0:
        raise Corrupt(what, GROUP_HEADER_BYTES, "no entries")
    if int(entries["offset"][0]) != offset or int(entries["first_ts"][0]) != first_ts:
        raise Corrupt(what, 8, "the header does not agree with the first entry")
    _check_children(kind, entries, lambda text: Corrupt(what, GROUP_HEADER_BYTES, text))
    return entries


def _check_children(kind: int, entries: Entries, error: Any) -> None:
    if (kinds_of(entries) != kind - 1).any():
        raise error(f"a group of kind {kind} holds only entries of kind {kind - 1}")


def _check_head(data: Bytes, size: int, magic: bytes, what: str) -> None:
    if len(data) < size:
        raise Corrupt(what, len(data), f"{len(data)} bytes are too short for a header")
    found, version = bytes(data[:4]), int.from_bytes(data[4:8], "big")
    if found != magic:
        raise Corrupt(what, 0, f"magic {found!r}, expected {magic!r}")
    if version != VERSION:
        raise UnsupportedEncoding(what, f"version {version}")


def fragment_entries(rows: list[tuple[int, int, int, bool, int]]) -> Entries:
    """Entries of fragments: offset, first and last timestamp, first of its segment, bytes of chunks."""
    entries = np.empty(len(rows), ENTRY_DTYPE)
    for number, (offset, first_ts, last_ts, first, size) in enumerate(rows):
        if not 0 < size <= FRAGMENT_BYTES_MAX:
            raise UsageError(f"a fragment of {size} bytes", hint="its size has 45 bits")
        high = size >> 32 | (_FIRST_BIT if first else 0)
        entries[number] = (offset, first_ts, last_ts, high, size & 0xFFFFFFFF)
    return entries


def group_entry(kind: int, entries: Entries, uid: int) -> Entries:
    """The one entry that stands for these in their parent."""
    if kind not in _MAGICS or not 0 <= uid < 1 << UID_BITS:
        raise UsageError(
            f"no entry of kind {kind} with uid {uid}", hint="kinds are 1 to 3, a uid has 46 bits"
        )
    row = (
        int(entries["offset"][0]),
        int(entries["first_ts"][0]),
        int(entries["last_ts"][-1]),
        kind << _KIND_SHIFT | uid >> 32,
        uid & 0xFFFFFFFF,
    )
    return np.array([row], ENTRY_DTYPE)


def join_entries(*parts: Entries) -> Entries:
    """One array of all of them, in the byte order of the format."""
    # Not numpy's concatenate: it turns fields into the byte order of the machine.
    return np.frombuffer(b"".join([_bytes_of(part) for part in parts]), ENTRY_DTYPE)


def _bytes_of(entries: Entries) -> bytes:
    return entries.astype(ENTRY_DTYPE, copy=False).tobytes()


def kinds_of(entries: Entries) -> npt.NDArray[np.uint8]:
    """The kind of each entry."""
    return (entries["high"] >> _KIND_SHIFT).astype(np.uint8)


def sizes_of(entries: Entries) -> npt.NDArray[np.int64]:
    """Bytes of chunks of each fragment; the entries must be fragments."""
    high = (entries["high"] & (_FIRST_BIT - 1)).astype(np.int64)
    return high << 32 | entries["low"].astype(np.int64)


def uids_of(entries: Entries) -> npt.NDArray[np.int64]:
    """The uid of each group; the entries must be groups."""
    high = (entries["high"] & ((1 << _KIND_SHIFT) - 1)).astype(np.int64)
    return high << 32 | entries["low"].astype(np.int64)


def make_uid(data: Bytes, random_bits: int) -> int:
    """The uid of a root or group with these bytes."""
    if not 0 <= random_bits < 1 << UID_RANDOM_BITS:
        raise UsageError(f"{random_bits} has more than {UID_RANDOM_BITS} bits", hint="draw so many")
    return random_bits << 32 | crc32c(data)


def check_uid(data: Bytes, uid: int, what: str) -> None:
    """Raise `Corrupt` unless these are the bytes that the uid was made of."""
    found = crc32c(data)
    if found != uid & 0xFFFFFFFF:
        raise Corrupt(what, 0, f"checksum {found:#x} is not {uid & 0xFFFFFFFF:#x}, the one in its uid")


def uid_text(uid: int) -> str:
    """As it stands in keys: 12 hexadecimal digits."""
    return f"{uid:012x}"
