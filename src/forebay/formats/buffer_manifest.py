"""The queue manifest of the stateless buffer: which batches wait, in which order, for whom.

    entry 0, entry 1, ...
    footer, 22 bytes:
        u32 LE  entry count
        u64 LE  next sequence
        u64 LE  epoch
        u16 LE  version, 1

    entry:
        u32 LE  bytes of the entry after this field
        u64 LE  sequence
        u16 LE  bytes of the location, then the location, UTF-8
        u32 LE  number of metadata items, then for each of them:
            u32 LE  start index: the first record of the batch it is about
            i64 LE  ingestion time, ms since the Unix epoch
            u32 LE  bytes of the payload, then the payload
        tail    whatever follows up to the end of the entry: see `entry_tail`

A manifest is changed by compare-and-set of the whole object, so every change here is a function from bytes to
bytes. Entries are never taken apart to be written again: appending, removing and raising the epoch copy them,
so what a newer writer put into their tail survives us.

Two depths of checking. `decode` looks into every entry. With `deep=False` it follows only the chain of entry
lengths and sequences, and each entry is looked into when it is asked for: a producer that appends to a
million entries pays for neither their locations nor their metadata. With `known`, an earlier manifest of the
same queue, bytes that both share are compared instead of followed again.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, overload

import numpy as np

from forebay.errors import LimitExceeded, UsageError
from forebay.formats._buffer_errors import CorruptManifest, TooLarge, UnsupportedVersion
from forebay.formats.entry_tail import EntryTail, decode_tail

__all__ = [
    "EMPTY",
    "ENTRY_BYTES_MIN",
    "EPOCH_UNSET",
    "FOOTER_BYTES",
    "MANIFEST_BYTES_MAX",
    "VERSION",
    "CorruptManifest",
    "Entry",
    "Manifest",
    "Metadata",
    "NewEntry",
    "TooLarge",
    "UnsupportedVersion",
    "append",
    "bump_epoch",
    "decode",
    "dequeue",
    "encode",
    "encoded_entry_bytes",
]

VERSION: Final = 1
FOOTER_BYTES: Final = 22
ENTRY_BYTES_MIN: Final = 18
"""Smallest entry: no location, no metadata."""
MANIFEST_BYTES_MAX: Final = 1 << 30
"""Largest manifest that `decode` takes unless told otherwise."""
LOCATION_BYTES_MAX: Final = (1 << 16) - 1
"""Longest location: its length is a u16."""
ENTRY_BODY_BYTES_MAX: Final = (1 << 32) - 1
"""Longest entry: its length is a u32."""
ENTRIES_MAX: Final = (1 << 32) - 1
"""Most entries: their count is a u32."""
SEQUENCE_MAX: Final = (1 << 64) - 1
"""Highest sequence: it is a u64."""
EPOCH_UNSET: Final = (1 << 64) - 1
"""What other implementations take for "no epoch yet"; never written."""

_FOOTER: Final = struct.Struct("<IQQH")
_HEAD: Final = struct.Struct("<IQH")
_CHAIN: Final = struct.Struct("<IQ")
_COUNT: Final = struct.Struct("<I")
_ITEM: Final = struct.Struct("<IqI")
_LOCATION_BYTES: Final = struct.Struct("<H")
_BODY_BYTES_MIN: Final = 14
_EVEN_ENTRIES_MIN: Final = 64
"""Entries from which on it is worth looking whether all of them have the same size."""
_WHAT: Final = "buffer manifest"


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a producer said of the records from `start_index` on."""

    start_index: int
    ingestion_time_ms: int
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A batch to be appended."""

    location: str
    metadata: tuple[Metadata, ...] = ()
    tail: bytes = b""
    """Bytes behind the metadata, as `entry_tail.encode_tail` makes them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A batch that waits in the queue."""

    sequence: int
    location: str
    metadata: tuple[Metadata, ...] = ()
    tail: bytes = b""
    """Bytes behind the metadata that belong to extensions, ours or others'."""

    def extension(self, *, name: str = _WHAT) -> EntryTail | None:
        """What our own extension says, or None. Raises `CorruptManifest` where it is damaged."""
        return decode_tail(self.tail, name=name)

    def metadata_of(self, index: int) -> Metadata | None:
        """The item that covers a record: the last one that starts at or before it."""
        found = None
        for item in self.metadata:
            if item.start_index > index:
                break
            found = item
        return found


class Manifest:
    """A manifest whose chain of entries has been followed. Never changes; operations make new ones."""

    __slots__ = ("_name", "_offsets", "data", "epoch", "first_sequence", "next_sequence", "version")

    def __init__(
        self, data: bytes, offsets: array[int], *, next_sequence: int, epoch: int, name: str = _WHAT
    ) -> None:
        """Use `decode`, or the operations of this module."""
        self.data = data
        """The whole object."""
        self.version = VERSION
        self.next_sequence = next_sequence
        self.epoch = epoch
        self.first_sequence = next_sequence - len(offsets)
        """Sequence of the first entry; the next one where there is none."""
        self._offsets = offsets
        self._name = name

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def entries(self) -> Sequence[Entry]:
        """All entries, each parsed when it is asked for."""
        return _Entries(self)

    def entry(self, sequence: int) -> Entry | None:
        """The entry of a sequence, or None where it is not in the manifest."""
        index = sequence - self.first_sequence
        return self.entry_at(index) if 0 <= index < len(self._offsets) else None

    def entry_at(self, index: int) -> Entry:
        """The entry at a place, from 0. Raises `CorruptManifest` where it is damaged inside."""
        return _parse(self.data, self._offsets[index], self._end(index), index, self._name)

    def locations(self) -> Iterator[str]:
        """The location of every entry, without looking at anything else in it."""
        for index, start in enumerate(self._offsets):
            yield _location(self.data, start, self._end(index), index, self._name)

    def _end(self, index: int) -> int:
        following = index + 1
        return self._offsets[following] if following < len(self._offsets) else len(self.data) - FOOTER_BYTES

    def __eq__(self, other: object) -> bool:
        return self.data == other.data if isinstance(other, Manifest) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"<Manifest of {len(self)} entries, next sequence {self.next_sequence}, epoch {self.epoch}, "
            f"{len(self.data):,} bytes>"
        )


class _Entries(Sequence[Entry]):
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def __len__(self) -> int:
        return len(self._manifest)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self._manifest.entry_at(place) for place in range(len(self))[index]]
        return self._manifest.entry_at(range(len(self))[index])

    def __iter__(self) -> Iterator[Entry]:
        return map(self._manifest.entry_at, range(len(self)))


# -- encoding


def _finish(
    parts: Iterable[bytes | memoryview], offsets: array[int], next_sequence: int, epoch: int
) -> Manifest:
    if len(offsets) > ENTRIES_MAX:
        raise LimitExceeded("ENTRIES_MAX", limit=ENTRIES_MAX, actual=len(offsets))
    footer = _FOOTER.pack(len(offsets), next_sequence, epoch, VERSION)
    return Manifest(b"".join((*parts, footer)), offsets, next_sequence=next_sequence, epoch=epoch)


def encode(entries: Sequence[Entry] = (), *, next_sequence: int | None = None, epoch: int = 0) -> bytes:
    """A manifest from its parts. `next_sequence` is the one after the last entry unless there is none."""
    following = entries[-1].sequence + 1 if entries else next_sequence or 0
    if next_sequence is not None and next_sequence != following:
        raise UsageError(f"next_sequence is {next_sequence}, the entries end before {following}")
    start = following - len(entries)
    if [entry.sequence for entry in entries] != list(range(start, following)):
        raise UsageError("sequences of entries are not contiguous", hint="each one follows the one before")
    if not 0 <= epoch <= SEQUENCE_MAX:
        raise UsageError(f"epoch {epoch}", hint="it is an unsigned 64-bit number")
    blank = Manifest(b"", array("Q"), next_sequence=start, epoch=epoch)
    new = [NewEntry(entry.location, entry.metadata, entry.tail) for entry in entries]
    return _appended(blank, new).data


def append(manifest: Manifest, entries: Sequence[NewEntry]) -> Manifest:
    """The manifest with these batches at its end; they get the next sequences, in order."""
    for entry in entries:
        if not entry.location:
            raise UsageError("an entry without a location", hint="enqueue only batches that were uploaded")
    return _appended(manifest, entries)


def _appended(manifest: Manifest, entries: Sequence[NewEntry]) -> Manifest:
    sequence = manifest.next_sequence
    if sequence + len(entries) > SEQUENCE_MAX:
        raise LimitExceeded("SEQUENCE_MAX", limit=SEQUENCE_MAX, actual=sequence + len(entries))
    block = memoryview(manifest.data)[: max(0, len(manifest.data) - FOOTER_BYTES)]
    parts: list[bytes | memoryview] = [block]
    offsets = array("Q", manifest._offsets)
    place = len(block)
    for number, entry in enumerate(entries, sequence):
        offsets.append(place)
        encoded = _encode_entry(number, entry)
        place += len(encoded)
        parts.append(encoded)
    return _finish(parts, offsets, sequence + len(entries), manifest.epoch)


def encoded_entry_bytes(entry: NewEntry) -> int:
    """Bytes that the entry will take."""
    return len(_encode_entry(0, entry))


def _encode_entry(sequence: int, entry: NewEntry) -> bytes:
    location = entry.location.encode()
    if len(location) > LOCATION_BYTES_MAX:
        raise LimitExceeded("LOCATION_BYTES_MAX", limit=LOCATION_BYTES_MAX, actual=len(location))
    parts = [location, _COUNT.pack(len(entry.metadata))]
    last = 0
    for item in entry.metadata:
        if item.start_index < last:
            raise UsageError(f"start index {item.start_index} after {last}", hint="items are in record order")
        last = item.start_index
        parts.append(_ITEM.pack(item.start_index, item.ingestion_time_ms, len(item.payload)))
        parts.append(item.payload)
    parts.append(entry.tail)
    size = 10 + sum(map(len, parts))
    if size > ENTRY_BODY_BYTES_MAX:
        raise LimitExceeded("ENTRY_BODY_BYTES_MAX", limit=ENTRY_BODY_BYTES_MAX, actual=size)
    return b"".join((_HEAD.pack(size, sequence, len(location)), *parts))


def dequeue(manifest: Manifest, through: int) -> Manifest:
    """The manifest without the entries up to sequence `through`; the very same one if that removes none."""
    removed = min(max(through + 1 - manifest.first_sequence, 0), len(manifest))
    if removed == 0:
        return manifest
    end = len(manifest.data) - FOOTER_BYTES
    cut = manifest._offsets[removed] if removed < len(manifest) else end
    offsets = array("Q")
    if removed < len(manifest):
        kept = np.frombuffer(manifest._offsets[removed:], np.uint64) - np.uint64(cut)
        offsets.frombytes(kept.tobytes())
    block = memoryview(manifest.data)[cut:end]
    return _finish([block], offsets, manifest.next_sequence, manifest.epoch)


def bump_epoch(manifest: Manifest) -> Manifest:
    """The manifest with the next epoch, which shuts out whoever holds an earlier one."""
    epoch = (manifest.epoch + 1) % (1 << 64)
    block = memoryview(manifest.data)[:-FOOTER_BYTES]
    return _finish([block], manifest._offsets, manifest.next_sequence, 0 if epoch == EPOCH_UNSET else epoch)


# -- decoding


def decode(
    data: bytes | memoryview,
    *,
    name: str = _WHAT,
    deep: bool = True,
    known: Manifest | None = None,
    manifest_bytes_max: int = MANIFEST_BYTES_MAX,
) -> Manifest:
    """A manifest, checked. `name` stands in errors, such as the key it was read from.

    Raises `CorruptManifest` for anything that is not exactly one manifest with contiguous sequences,
    `UnsupportedVersion` for a newer one, and `TooLarge` above the limit. With `deep=False` entries are looked
    into only when they are asked for. `known` is an earlier manifest whose bytes need not be followed again.
    """
    if len(data) > manifest_bytes_max:
        raise TooLarge(name, "manifest_bytes_max", limit=manifest_bytes_max, actual=len(data))
    if len(data) < FOOTER_BYTES:
        raise CorruptManifest(name, len(data), f"{len(data)} bytes, a manifest has at least {FOOTER_BYTES}")
    whole = bytes(data)
    end = len(whole) - FOOTER_BYTES
    count, next_sequence, epoch, version = _FOOTER.unpack_from(whole, end)
    if version != VERSION:
        raise UnsupportedVersion(name, version, str(VERSION))
    if ENTRY_BYTES_MIN * count > end:
        raise CorruptManifest(name, end, f"{count} entries cannot fit into {end} bytes")
    if count > next_sequence:
        raise CorruptManifest(name, end, f"{count} entries before sequence {next_sequence}")
    first = next_sequence - count
    offsets, place = _shared_chain(whole, end, count, first, known)
    if not offsets:
        offsets = _even_chain(whole, end, count, first)
        place = end if offsets else 0
    _follow(whole, end, count, first, offsets, place, name)
    manifest = Manifest(whole, offsets, next_sequence=next_sequence, epoch=epoch, name=name)
    if deep:
        for index in range(count):
            decode_tail(manifest.entry_at(index).tail, name=name, entry=index)
    return manifest


def _shared_chain(
    data: bytes, end: int, count: int, first: int, known: Manifest | None
) -> tuple[array[int], int]:
    """Offsets of the leading entries that are the same bytes in `known`, and where they end."""
    if known is None or not len(known) or not count:
        return array("Q"), 0
    skip = first - known.first_sequence
    shared = min(len(known) - skip, count)
    if skip < 0 or shared <= 0:
        return array("Q"), 0
    start = known._offsets[skip]
    size = known._end(skip + shared - 1) - start
    if size > end or memoryview(data)[:size] != memoryview(known.data)[start : start + size]:
        return array("Q"), 0
    offsets = known._offsets[skip : skip + shared]
    if start:
        moved = np.frombuffer(offsets, np.uint64) - np.uint64(start)
        offsets = array("Q", moved.tobytes())
    return offsets, size


def _even_chain(data: bytes, end: int, count: int, first: int) -> array[int]:
    """All offsets, where every entry has the size of the first; else none."""
    if count < _EVEN_ENTRIES_MIN or end % count:
        return array("Q")
    size = end // count
    rows = np.frombuffer(data, np.uint8, end).reshape(count, size)
    lengths = np.ascontiguousarray(rows[:, :4]).view("<u4")[:, 0]
    sequences = np.ascontiguousarray(rows[:, 4:12]).view("<u8")[:, 0]
    expected = np.arange(count, dtype=np.uint64) + np.uint64(first)
    if (lengths != size - 4).any() or (sequences != expected).any():
        return array("Q")
    return array("Q", (np.arange(count, dtype=np.uint64) * np.uint64(size)).tobytes())


def _follow(
    data: bytes, end: int, count: int, first: int, offsets: array[int], place: int, name: str
) -> None:
    """Hop from entry to entry until exactly `count` of them end at the footer, filling `offsets`."""
    unpack, add = _CHAIN.unpack_from, offsets.append
    for index in range(len(offsets), count):
        if place + ENTRY_BYTES_MIN > end:
            raise CorruptManifest(name, place, f"entry {index} of {count}: {end - place} bytes are left")
        size, sequence = unpack(data, place)
        following = place + 4 + size
        if size < _BODY_BYTES_MIN or following > end:
            raise CorruptManifest(
                name, place, f"entry {index} of {count}: {size} bytes, {end - place - 4} are left"
            )
        if sequence != first + index:
            raise CorruptManifest(
                name, place + 4, f"entry {index}: sequence {sequence}, expected {first + index}"
            )
        add(place)
        place = following
    if place != end:
        raise CorruptManifest(name, place, f"{end - place} bytes after the last of {count} entries")


def _parse(data: bytes, start: int, end: int, index: int, name: str) -> Entry:
    """One entry. Its end is the bound of everything inside it."""
    _, sequence, location_bytes = _HEAD.unpack_from(data, start)
    location = _location(data, start, end, index, name)
    place = start + _HEAD.size
    place += location_bytes
    [count] = _COUNT.unpack_from(data, place)
    place += _COUNT.size
    if _ITEM.size * count > end - place:
        raise CorruptManifest(
            name, place - 4, f"entry {index}: {count} metadata items cannot fit into {end - place} bytes"
        )
    items = []
    last = 0
    for number in range(count):
        payload = place + _ITEM.size
        if payload > end:
            raise CorruptManifest(name, place, f"entry {index}: metadata item {number} passes its end")
        start_index, time_ms, size = _ITEM.unpack_from(data, place)
        place = payload + size
        if place > end:
            raise CorruptManifest(
                name, payload - 4, f"entry {index}: a payload of {size} bytes, {end - payload} are left"
            )
        if start_index < last:
            raise CorruptManifest(
                name, payload - 16, f"entry {index}: start index {start_index} after {last}"
            )
        last = start_index
        items.append(Metadata(start_index, time_ms, data[payload:place]))
    return Entry(sequence, location, tuple(items), data[place:end])


def _location(data: bytes, start: int, end: int, index: int, name: str) -> str:
    [size] = _LOCATION_BYTES.unpack_from(data, start + 12)
    place = start + _HEAD.size
    if place + size + _COUNT.size > end:
        raise CorruptManifest(name, start + 12, f"entry {index}: a location of {size} bytes passes its end")
    try:
        return data[place : place + size].decode()
    except UnicodeDecodeError as error:
        raise CorruptManifest(
            name, place + error.start, f"entry {index}: its location is not UTF-8: {error.reason}"
        ) from None


EMPTY: Final = _finish([], array("Q"), 0, 0)
"""What a missing manifest stands for: no entries, sequence 0, epoch 0."""
