"""Which streams a bucket holds, and what is known of each without reading its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import UsageError
from forebay.formats import stream_manifest as fmt
from forebay.stream._calls import Calls
from forebay.stream._errors import StreamMissing
from forebay.stream._keys import BASE, StreamKeys, as_stream_id, names_of, stream_of
from forebay.stream._pointer import read_current
from forebay.stream._view import RemoteView

__all__ = ["StreamStats", "find_stream", "list_streams", "stats_of"]

STREAMS_MAX = 100_000
"""Most streams that one listing returns."""


async def list_streams(calls: Calls) -> list[str]:
    """The ids of all streams in the bucket, in order: one request each, whatever they hold."""
    found: list[str] = []
    after = BASE
    while len(found) < STREAMS_MAX:
        key = await calls.again(lambda after=after: _first_key(calls, after))  # type: ignore[misc]
        stream = None if key is None else stream_of(key)
        if key is None:
            return found
        if stream is not None:
            found.append(stream)
        # The letter behind the slash: everything of this stream is below it.
        after = f"{BASE}{stream}0" if stream is not None else key
    return found


async def _first_key(calls: Calls, after: str) -> str | None:
    async for page in calls.store.list_pages(BASE, after=after, page_keys=1):
        for info in page:
            return info.key
    return None


async def find_stream(calls: Calls, name: str) -> str:
    """The id of the stream that a name means: the id, the id without its time, or the plain name in it.

    A name that several streams have means the one that is not deleted. Raises `StreamMissing`, or
    `UsageError` where it cannot be told which one is meant.
    """
    try:
        if await calls.exists(StreamKeys(name).current):
            return name
    except UsageError:
        pass
    streams = await list_streams(calls)
    wanted = {name, as_stream_id(name)}
    alike = [stream for stream in streams if wanted & names_of(stream)]
    if len(alike) > 1:
        alike = [stream for stream in alike if not await _deleted(calls, stream)] or alike
    if name in alike:
        return name
    if len(alike) > 1:
        raise UsageError(f"{name!r} may be any of {', '.join(alike)}", hint="give the whole id")
    if not alike:
        raise StreamMissing(name)
    return alike[0]


async def _deleted(calls: Calls, stream: str) -> bool:
    held = await read_current(calls, StreamKeys(stream))
    return held is not None and held.head.deleted


@dataclass(frozen=True, slots=True)
class StreamStats:
    """What the root of a stream tells."""

    stream: str
    epoch: int
    revision: int
    first_offset: int
    next_offset: int
    first_timestamp: int
    last_timestamp: int
    bytes: int
    entries: dict[str, int]
    """Entries of the root by kind."""
    gaps: list[list[int]]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


def stats_of(view: RemoteView) -> StreamStats:
    """The figures of a view that was refreshed."""
    manifest = view.manifest
    counts = np.bincount(fmt.kinds_of(manifest.entries), minlength=4).tolist()
    assert view.held is not None
    head = view.held.head
    return StreamStats(
        stream=view.keys.stream,
        epoch=head.epoch,
        revision=head.revision,
        first_offset=manifest.first_offset,
        next_offset=manifest.next_offset,
        first_timestamp=manifest.first_timestamp,
        last_timestamp=-1 if manifest.empty else int(manifest.entries["last_ts"][-1]),
        bytes=manifest.total_bytes,
        entries=dict(zip(("fragments", "groups", "kilo_groups", "mega_groups"), counts, strict=True)),
        gaps=[list(gap) for gap in head.gaps],
    )
