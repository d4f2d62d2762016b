"""The manifest in memory, and everything that can be said of it without asking the bucket.

A manifest is immutable: each change makes a new one, so that what was persisted and what is on its way never
mix. Invariants: entries are sorted by offset and cover [first offset, next offset) without overlap; kinds
never increase along the root (mega, kilo, group, fragment); total bytes are those of all fragments reachable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forebay.errors import UsageError
from forebay.formats import stream_manifest as fmt
from forebay.formats.stream_fragment import Trailer
from forebay.formats.stream_manifest import FRAGMENT, MEGA_GROUP, Entries, Root

__all__ = ["EMPTY", "FragmentInfo", "Manifest", "find_offset", "find_timestamp", "next_group"]

NO_TIMESTAMP = -1


@dataclass(frozen=True, slots=True)
class FragmentInfo:
    """What the manifest and the chain of trailers know of a fragment."""

    first_offset: int
    next_offset: int
    first_timestamp: int
    last_timestamp: int
    data_bytes: int
    """Bytes of chunks."""
    first_of_segment: bool = False
    sequence: int = 0
    """Number in its segment."""
    chunks_after: int = 0
    """Chunks of its segment up to its end: where the next fragment of the same segment goes on."""

    @classmethod
    def from_trailer(cls, trailer: Trailer) -> FragmentInfo:
        """As its trailer tells."""
        return cls(
            trailer.first_offset,
            trailer.next_offset,
            trailer.first_timestamp,
            trailer.last_timestamp,
            trailer.data_bytes,
            trailer.chunks_before == 0,
            trailer.sequence,
            trailer.chunks_before + trailer.chunks,
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A root, decoded."""

    first_offset: int
    next_offset: int
    first_timestamp: int
    first_last_timestamp: int
    total_bytes: int
    entries: Entries

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """From the bytes of a root."""
        return cls(*fmt.decode_root(data))

    def encode(self) -> bytes:
        """The bytes of the root."""
        return fmt.encode_root(
            Root(
                self.first_offset,
                self.next_offset,
                self.first_timestamp,
                self.first_last_timestamp,
                self.total_bytes,
                self.entries,
            )
        )

    @property
    def empty(self) -> bool:
        """Whether nothing is in it."""
        return len(self.entries) == 0

    def append(self, fragments: Sequence[FragmentInfo]) -> Manifest:
        """With these fragments at the end. An empty manifest begins where the first of them does."""
        if not fragments:
            return self
        expected = fragments[0].first_offset if self.empty else self.next_offset
        for fragment in fragments:
            if fragment.first_offset < expected or fragment.next_offset <= fragment.first_offset:
                raise UsageError(f"{fragment} does not follow offset {expected}", hint="apply runs in order")
            expected = fragment.next_offset
        rows = [
            (one.first_offset, one.first_timestamp, one.last_timestamp, one.first_of_segment, one.data_bytes)
            for one in fragments
        ]
        grown = replace(
            self,
            next_offset=expected,
            total_bytes=self.total_bytes + sum([one.data_bytes for one in fragments]),
            entries=fmt.join_entries(self.entries, fmt.fragment_entries(rows)),
        )
        return grown._beginning_with(fragments[0]) if self.empty else grown

    def _beginning_with(self, fragment: FragmentInfo) -> Manifest:
        return replace(
            self,
            first_offset=fragment.first_offset,
            first_timestamp=fragment.first_timestamp,
            first_last_timestamp=fragment.last_timestamp,
        )

    def grouped(self, start: int, count: int, entry: Entries) -> Manifest:
        """With `count` entries from `start` on replaced by the one of their group."""
        entries = fmt.join_entries(self.entries[:start], entry, self.entries[start + count :])
        return replace(self, entries=entries)


EMPTY = Manifest(0, 0, NO_TIMESTAMP, NO_TIMESTAMP, 0, fmt.fragment_entries([]))


def next_group(entries: Entries, branching: int) -> tuple[int, int] | None:
    """Where the next group should be made, and of which kind; None where the node is balanced.

    Fragments leave one of their kind behind, so that the newest is found without a round trip; groups do not.
    """
    kinds = fmt.kinds_of(entries)
    at = 0
    while at < len(kinds):
        kind = int(kinds[at])
        if kind < MEGA_GROUP:
            far = at + (branching if kind == FRAGMENT else branching - 1)
            if far < len(kinds) and kinds[far] == kind:
                return at, kind + 1
        smaller = np.flatnonzero(kinds[at:] < kind)
        if len(smaller) == 0:
            return None
        at += int(smaller[0])
    return None


def find_offset(entries: Entries, offset: int) -> int:
    """The last entry that begins at or below `offset`; the first where all begin above it."""
    return max(int(np.searchsorted(entries["offset"], np.uint64(max(offset, 0)), side="right")) - 1, 0)


def find_timestamp(entries: Entries, timestamp: int) -> int | None:
    """The first entry whose last timestamp is at or above `timestamp`, or None."""
    # Timestamps do not fall within a stream; should a clock have stepped, the running maximum keeps the
    # order.
    latest = np.maximum.accumulate(entries["last_ts"].astype(np.int64))
    at = int(np.searchsorted(latest, timestamp, side="left"))
    return at if at < len(entries) else None
