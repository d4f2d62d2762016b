"""Several byte ranges of one object in few requests, all of the same write.

Ranges that lie close together are fetched as one span. The spans are asked for at once; their answers carry
the version they were taken from, and where these differ the object was replaced in between and all is asked
anew. obstore can fetch several ranges itself, but it does not say of which version, and ends a range past
the end with a panic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.errors import Unavailable
from forebay.storage._api import InvalidRange, Range, validate_range
from forebay.storage._bucket._failure import CLIENT_ERRORS, Failure
from forebay.storage._bucket._url import Client

__all__ = ["fetch_ranges"]

GAP_BYTES_MAX = 256 * 1024
"""Unwanted bytes between two ranges up to which one request is cheaper than two."""
SPANS_AT_ONCE = 16
"""Requests of one call that are under way at once."""


@dataclass(slots=True)
class _Span:
    start: int
    end: int
    members: list[int] = field(default_factory=list)
    """Places of its ranges in the list that was asked for."""


async def fetch_ranges(client: Client, key: str, ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range; none of them empty. Raises `InvalidRange` past the end."""
    spans = _spans(ranges)
    turns = asyncio.Semaphore(SPANS_AT_ONCE)
    fetched = await asyncio.gather(*(_fetch(client, key, span, turns) for span in spans))
    if len({version for _, version in fetched}) > 1:
        raise Unavailable(f"{key!r} was replaced while its ranges were read", hint="try again")
    found = [b""] * len(ranges)
    for span, (data, _) in zip(spans, fetched, strict=True):
        for place in span.members:
            start, length = ranges[place]
            found[place] = bytes(data[start - span.start : start - span.start + length])
    return found


def _spans(ranges: Sequence[Range]) -> list[_Span]:
    spans: list[_Span] = []
    for place in sorted(range(len(ranges)), key=lambda place: ranges[place]):
        start, length = ranges[place]
        if not spans or start - spans[-1].end > GAP_BYTES_MAX:
            spans.append(_Span(start, start))
        spans[-1].end = max(spans[-1].end, start + length)
        spans[-1].members.append(place)
    return spans


async def _fetch(client: Client, key: str, span: _Span, turns: asyncio.Semaphore) -> tuple[memoryview, str]:
    length = span.end - span.start
    async with turns:
        try:
            result = await client.get_async(key, options={"range": (span.start, span.end)})
            validate_range(key, span.start, length, result.meta["size"])
            data = memoryview(await result.bytes_async())
        except CLIENT_ERRORS as error:
            if Failure.of(error).status == 416:
                raise InvalidRange(key, span.start, length) from error
            raise
    if len(data) != length:
        raise Unavailable(f"{key!r}: {len(data)} of {length} bytes came", hint="try again")
    return data, f"{result.meta['e_tag']} {result.meta['version']}"
