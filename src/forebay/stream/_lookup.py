"""Finding things in a manifest: by offset and by timestamp, through groups of every height, down to a chunk.

Each node is searched by bisection, so a lookup costs one request per level of groups, and two for the index
of the fragment: its size, then its end. Groups and indexes are immutable and held in memory, within a bound.

Offsets: the last entry that begins at or below it. Timestamps: the first entry whose last timestamp is at or
above it, because a fragment that begins before the moment may well contain it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.formats import osiris_chunk
from forebay.formats import stream_manifest as fmt
from forebay.formats.osiris_chunk import HEADER_BYTES, ChunkHeader
from forebay.formats.stream_fragment import Trailer
from forebay.formats.stream_manifest import FRAGMENT, Entries
from forebay.stream._fragments import FragmentStore
from forebay.stream._manifest import FragmentInfo, Manifest, find_offset, find_timestamp
from forebay.stream._nodes import NodeStore

__all__ = ["FragmentRef", "Lookup"]


@dataclass(frozen=True, slots=True)
class FragmentRef:
    """A fragment as the manifest knows it."""

    offset: int
    data_bytes: int


class Lookup:
    """Searches in the tree of one stream."""

    def __init__(self, nodes: NodeStore, fragments: FragmentStore) -> None:
        self._nodes = nodes
        self._fragments = fragments

    async def by_offset(self, manifest: Manifest, offset: int) -> FragmentRef | None:
        """The fragment that holds `offset`; the first where it is below all. None in an empty manifest."""
        entries = manifest.entries
        while len(entries):
            at = find_offset(entries, max(offset, manifest.first_offset))
            entry = entries[at : at + 1]
            if int(fmt.kinds_of(entry)[0]) == FRAGMENT:
                return _ref(entry)
            entries = await self._nodes.children(entry)
        return None

    async def by_timestamp(self, manifest: Manifest, timestamp: int) -> FragmentRef | None:
        """The first fragment with a chunk at or after `timestamp`, or None."""
        entries = manifest.entries
        while True:
            at = find_timestamp(entries, timestamp)
            if at is None:
                return None
            entry = entries[at : at + 1]
            if int(fmt.kinds_of(entry)[0]) == FRAGMENT:
                return _ref(entry)
            entries = await self._nodes.children(entry)

    async def from_offset(self, manifest: Manifest, offset: int) -> AsyncIterator[FragmentRef]:
        """Every fragment from the one that holds `offset` on, once and in order."""
        path: list[tuple[Entries, int]] = []
        entries, at = manifest.entries, 0
        if len(entries):
            at = find_offset(entries, max(offset, manifest.first_offset))
        while True:
            while at >= len(entries):
                if not path:
                    return
                entries, at = path.pop()
            entry = entries[at : at + 1]
            if int(fmt.kinds_of(entry)[0]) == FRAGMENT:
                yield _ref(entry)
                at += 1
                continue
            path.append((entries, at + 1))
            entries = await self._nodes.children(entry)
            at = find_offset(entries, max(offset, manifest.first_offset))

    async def index(self, ref: FragmentRef) -> tuple[Trailer, npt.NDArray[Any]]:
        """Trailer and index of a fragment. Raises `NotFound`."""
        return await self._fragments.index(ref.offset, ref.data_bytes)

    async def chunk_header(
        self, manifest: Manifest, pending: Sequence[FragmentInfo], chunk_id: int
    ) -> ChunkHeader | None:
        """The header of the chunk with this id, or None where no such chunk is in the bucket."""
        ref: FragmentRef | None = None
        for info in pending:
            if info.first_offset <= chunk_id < info.next_offset:
                ref = FragmentRef(info.first_offset, info.data_bytes)
        if ref is None and manifest.first_offset <= chunk_id < manifest.next_offset:
            ref = await self.by_offset(manifest, chunk_id)
        if ref is None:
            return None
        _, index = await self.index(ref)
        found = np.flatnonzero(index["chunk_id"] == chunk_id)
        return await self.header_at(ref, int(index["position"][found[0]])) if len(found) else None

    async def header_at(self, ref: FragmentRef, position: int) -> ChunkHeader:
        """The chunk header at a position of a fragment."""
        return osiris_chunk.decode_header(await self._fragments.read(ref.offset, position, HEADER_BYTES))


def _ref(entry: Entries) -> FragmentRef:
    return FragmentRef(int(entry["offset"][0]), int(fmt.sizes_of(entry)[0]))
