"""A stream as its consumers see it: one log over both tiers, without a seam.

A place is the id of a chunk. The tier that has the chunk serves it; the local one where both do, since it
costs nothing. After each chunk the place is the next id, so the change from one tier to the other, and a
local segment that vanishes under the reader, are the same case: ask again who has this id.

    place below everything that is there     told: `Overtaken`, with the first offset that is missing and the
                                             first that is there again; the reader then stands at the latter
    place at the end of everything           wait, or end, as asked
    remote object gone                       the root was old: read it again, then decide as above
    bucket cannot be reached                 repeated with patience, then an error; never taken for the end

Offset specs mean what they mean to a broker; the answers are those of a log that is all local.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np

from forebay.coordination import Coordinator
from forebay.errors import NotFound
from forebay.formats import Corrupt, osiris_chunk
from forebay.formats.osiris_bloom import Matcher
from forebay.formats.osiris_chunk import Chunk, ChunkHeader
from forebay.kit.clock import Clock
from forebay.storage import ObjectStore
from forebay.stream._cache import BlockCache, shared_cache
from forebay.stream._calls import Calls
from forebay.stream._config import ReaderConfig
from forebay.stream._errors import FragmentMissing, OffsetOutOfRange, Overtaken, StreamMissing
from forebay.stream._local import LocalLog, Segment
from forebay.stream._spec import Spec
from forebay.stream._view import RemoteView, Skipped

__all__ = ["StreamReader"]

LOOKS_MAX = 20
"""How often a place is looked up anew because what was found vanished meanwhile."""
LOCAL_READ_BYTES = 4 * 1024 * 1024
"""Bytes of one read of a segment file."""


class StreamReader:
    """Reads one stream from its remote tier and, where there is one, its local directory."""

    def __init__(
        self,
        stream: str,
        store: ObjectStore,
        *,
        coordinator: Coordinator | None = None,
        local: Path | None = None,
        cache: BlockCache | None = None,
        config: ReaderConfig | None = None,
        clock: Clock,
        randomness: random.Random,
    ) -> None:
        self.stream = stream
        self.config = config or ReaderConfig()
        self._clock = clock
        self._local = None if local is None else LocalLog(local)
        calls = Calls(
            store,
            clock=clock,
            randomness=randomness,
            policy=self.config.retry,
            timeout_ms=self.config.request_timeout_ms,
        )
        self.remote = RemoteView(
            stream,
            calls,
            coordinator=coordinator,
            cache=cache or shared_cache(),
            config=self.config,
        )

    async def refresh(self) -> bool:
        """Look at both tiers again; whether there may be more than before."""
        before = self.next_offset
        if self._local is not None:
            self._local.refresh()
        try:
            changed = await self.remote.refresh()
        except StreamMissing:
            # No record means that nothing was tiered yet; only a reader without local files has nothing then.
            if self._local is None:
                raise
            changed = False
        return changed or self.next_offset != before

    # What is there.

    @property
    def first_offset(self) -> int:
        """The first offset there is, as of the last look."""
        return min(self._firsts(), default=0)

    @property
    def next_offset(self) -> int:
        """The offset behind everything there is, as of the last look."""
        ends = [self.remote.manifest.next_offset]
        if self._local is not None:
            ends.append(self._local.next_offset)
        return max(ends)

    def _firsts(self) -> list[int]:
        found = [] if self.remote.manifest.empty else [self.remote.manifest.first_offset]
        if self._local is not None and not self._local.empty:
            found.append(self._local.first_offset)
        return found

    # Where to begin.

    async def attach(self, spec: Spec) -> int:
        """The chunk id at which a reader of this spec begins; behind the end where it waits for new data."""
        for _ in range(LOOKS_MAX):
            await self.refresh()
            try:
                return await self._attach(spec)
            except (NotFound, FileNotFoundError) as error:
                gone = error
        raise gone

    async def _attach(self, spec: Spec) -> int:
        firsts = self._firsts()
        if spec.kind == "abs" and (not firsts or not min(firsts) <= spec.value < self.next_offset):
            first = min(firsts, default=self.next_offset)
            raise OffsetOutOfRange(
                self.stream, offset=spec.value, first_offset=first, next_offset=self.next_offset
            )
        if not firsts or spec.kind == "next":
            return self.next_offset
        if spec.kind == "last":
            return await self._attach_last()
        if spec.kind == "timestamp":
            return await self._attach_timestamp(spec.value)
        offset = min(firsts) if spec.kind == "first" else max(spec.value, min(firsts))
        return await self._attach_offset(offset)

    async def _attach_offset(self, offset: int) -> int:
        if offset >= self.next_offset:
            return self.next_offset
        segment = None if self._local is None else self._local.segment_of(offset)
        if segment is not None:
            return int(segment.records["chunk_id"][segment.find(offset)])
        manifest = self.remote.manifest
        if not manifest.empty and offset < manifest.next_offset:
            return await self.remote.chunk_at_offset(offset)
        return min([first for first in self._firsts() if first > offset], default=self.next_offset)

    async def _attach_timestamp(self, timestamp: int) -> int:
        log = self._local
        # Timestamps do not fall: whatever lies before a local chunk that is too early is too early as well.
        remote_first = log is None or log.empty or log.first_timestamp >= timestamp
        if remote_first and not self.remote.manifest.empty:
            found = await self.remote.chunk_at_timestamp(timestamp)
            if found is not None:
                return found
        for segment in [] if log is None else log.segments:
            later = np.flatnonzero(segment.records["timestamp"] >= timestamp)
            if len(later):
                return int(segment.records["chunk_id"][later[0]])
        return self.next_offset

    async def _attach_last(self) -> int:
        below = self.next_offset
        for segment in [] if self._local is None else reversed(self._local.segments):
            user = np.flatnonzero(segment.records["type"] == osiris_chunk.USER)
            if len(user):
                return int(segment.records["chunk_id"][user[-1]])
            below = segment.first_id
        found = await self.remote.last_user_chunk(below)
        return self.next_offset if found is None else found

    async def resolve(self, spec: Spec) -> ChunkHeader | None:
        """The first user chunk that a consumer of this spec is given, or None where it waits for new data."""
        for _ in range(LOOKS_MAX):
            try:
                return await self._user_header(await self.attach(spec))
            except (NotFound, FileNotFoundError) as error:
                gone = error
        raise gone

    async def _user_header(self, place: int) -> ChunkHeader | None:
        """The header of the first user chunk from `place` on; no data is fetched for it."""
        while self._local is not None and (segment := self._local.segment_of(place)) is not None:
            user = np.flatnonzero(segment.records["type"][segment.find(place) :] == osiris_chunk.USER)
            if len(user):
                return segment.header(segment.find(place) + int(user[0]))
            place = segment.next_id
        manifest = self.remote.manifest
        if manifest.empty or place >= manifest.next_offset:
            return None
        found = await self.remote.header_from(place)
        if found is None and self._local is not None and self._local.next_offset > manifest.next_offset:
            return await self._user_header(manifest.next_offset)
        return found

    # What follows.

    async def chunks(
        self, spec: Spec | int, *, matcher: Matcher | None = None, follow: bool = False
    ) -> AsyncIterator[Chunk]:
        """User chunks from a spec, or from a chunk id, on. With `follow` it waits for more and never ends.

        A chunk is delivered whole: with an offset inside of one, the reader drops the records before it.
        Raises `Overtaken`; call again with its `resume_offset` to go on behind what is gone.
        """
        place = spec if isinstance(spec, int) else await self.attach(spec)
        looked = isinstance(spec, Spec)
        looks = 0
        while True:
            moved = gone = False
            try:
                async for header, chunk in self._stretch(place, matcher):
                    if header.chunk_id != place:
                        self._misplaced(place, header.chunk_id, first=not moved)
                    place = header.next_id
                    moved = True
                    if chunk is not None and header.type == osiris_chunk.USER:
                        yield chunk
            except NotFound:
                # The root was old: read it again, and tell if the place itself is gone.
                self.remote.held, gone = None, True
            if moved:
                looked, looks = False, 0
                continue
            if gone and looked:
                looks += 1
                await self._wait_for_missing(place, looks)
            elif looked:
                if not follow:
                    return
                await self._clock.sleep(self.config.poll_interval_ms / 1000)
            await self.refresh()
            self._check_overtaken(place)
            looked = True

    def _misplaced(self, place: int, found: int, *, first: bool) -> None:
        """Another chunk than the next: what is between was never there, or a header is not what it was."""
        held = self.remote.held
        gap = held is not None and any(start <= place < end == found for start, end in held.head.gaps)
        if found > place and (gap or first):
            raise Overtaken(self.stream, offset=place, resume_offset=found)
        raise Corrupt(f"stream {self.stream!r}", found, f"chunk {found} stands where {place} is expected")

    async def _wait_for_missing(self, place: int, looks: int) -> None:
        """An object is not found, and the newest root names it still: that is no end of the stream."""
        if looks >= LOOKS_MAX:
            raise FragmentMissing(self.stream, offset=place)
        await self._clock.sleep(self.config.retry.wait_s(looks, self.remote.calls.random))

    def _check_overtaken(self, place: int) -> None:
        later = [first for first in self._firsts() if first > place]
        held = self._local is not None and self._local.segment_of(place) is not None
        manifest = self.remote.manifest
        if held or (not manifest.empty and manifest.first_offset <= place < manifest.next_offset):
            return
        if later:
            raise Overtaken(self.stream, offset=place, resume_offset=min(later))

    async def _stretch(
        self, place: int, matcher: Matcher | None
    ) -> AsyncIterator[tuple[ChunkHeader | Skipped, Chunk | None]]:
        """Chunks from `place` on, as far as one tier goes by what is known now; none where neither has it."""
        segment = None if self._local is None else self._local.segment_of(place)
        if segment is not None:
            try:
                for header, chunk in self._local_chunks(segment, place, matcher):
                    yield header, chunk
            except FileNotFoundError:
                assert self._local is not None
                self._local.refresh()
            return
        manifest = self.remote.manifest
        if manifest.empty or not manifest.first_offset <= place < manifest.next_offset:
            return
        local_first = None if self._local is None or self._local.empty else self._local.first_offset
        async for found in self.remote.chunks(place, matcher):
            seen = found.header if isinstance(found, Chunk) else found
            yield seen, found if isinstance(found, Chunk) else None
            if local_first is not None and seen.next_id >= local_first:
                return

    def _local_chunks(
        self, segment: Segment, place: int, matcher: Matcher | None
    ) -> Iterator[tuple[ChunkHeader, Chunk | None]]:
        """A read's worth of chunks of one segment file."""
        number = segment.find(place)
        positions = segment.positions
        start = int(positions[number])
        stop = max(int(np.searchsorted(positions, start + LOCAL_READ_BYTES, side="right")) - 1, number + 1)
        data = memoryview(segment.read(start, int(positions[stop]) - start))
        # One by one: damage keeps nobody from the chunks before it.
        for position in positions[number:stop].tolist():
            try:
                chunk = osiris_chunk.decode(data, position - start, check=self.config.check_crc)
            except Corrupt as error:
                raise Corrupt(segment.path.name, start + error.position, error.reason) from error
            skip = (
                matcher is not None
                and chunk.header.type == osiris_chunk.USER
                and not matcher.matches(chunk.bloom)
            )
            yield chunk.header, None if skip else chunk
