"""Proof that a stream in the bucket is whole: every node, every fragment, every chunk, every sum."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import FormatError, NotFound
from forebay.formats import stream_filters
from forebay.formats.stream_filters import Filters
from forebay.stream._lookup import FragmentRef
from forebay.stream._runs import FragmentRuns, blooms_of
from forebay.stream._view import RemoteView

__all__ = ["Verification", "verify"]

PROBLEMS_MAX = 1000
"""Most problems that are named one by one."""


@dataclass(slots=True)
class Verification:
    """What was looked at, and what is wrong with it."""

    stream: str
    fragments: int = 0
    chunks: int = 0
    records: int = 0
    """Records of all chunks, tracking included: the offsets that are covered."""
    bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        names = ("stream", "fragments", "chunks", "records", "bytes", "problems")
        return {"ok": self.ok} | {name: getattr(self, name) for name in names}

    def note(self, problem: str) -> None:
        """Remember a problem."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)


async def verify(view: RemoteView) -> Verification:
    """Read a whole stream and check it against its manifest, some megabytes of it in memory at a time."""
    found = Verification(view.keys.stream)
    await view.refresh()
    manifest = view.manifest
    assert view.held is not None
    gaps = dict(view.held.head.gaps)
    expected = manifest.first_offset
    try:
        async for ref in view.lookup.from_offset(manifest, manifest.first_offset):
            if gaps.get(expected) == ref.offset:
                expected = ref.offset
            if ref.offset != expected:
                found.note(f"offset {expected}: the next fragment begins at {ref.offset}")
            expected = await _fragment(view, ref, found)
    except (FormatError, NotFound) as error:
        found.note(f"the manifest cannot be read behind offset {expected}: {error}")
        return found
    if expected != manifest.next_offset:
        found.note(f"the fragments end at {expected}, the root at {manifest.next_offset}")
    if found.bytes != manifest.total_bytes:
        found.note(f"the fragments have {found.bytes} bytes, the root counts {manifest.total_bytes}")
    return found


async def _fragment(view: RemoteView, ref: FragmentRef, found: Verification) -> int:
    """Check one fragment; the offset behind it, as far as it can be told."""
    key = view.keys.fragment(ref.offset)
    found.fragments += 1
    found.bytes += ref.data_bytes
    try:
        fragment = await FragmentRuns.open(view, ref)
        blooms = []
        async with aclosing(fragment.runs()) as runs:
            async for run in runs:
                blooms.append(blooms_of(run))
                found.chunks += run.stop - run.first
                found.records += int(run.headers["records"].sum())
        await _filters(view, ref, fragment.filters(blooms), found)
    except (FormatError, NotFound) as error:
        found.note(f"{key}: {error}")
        return await _next_after(view, ref)
    return fragment.trailer.next_offset


async def _filters(view: RemoteView, ref: FragmentRef, expected: Filters | None, found: Verification) -> None:
    """What stands beside a fragment to save its download must say what is in it."""
    key = view.keys.filters(ref.offset)
    if expected is None or not await view.calls.exists(key):
        return
    if await view.calls.get(key) != stream_filters.encode(expected):
        found.note(f"{key}: it does not tell the filters of its fragment")


async def _next_after(view: RemoteView, ref: FragmentRef) -> int:
    async for following in view.lookup.from_offset(view.manifest, ref.offset):
        if following.offset > ref.offset:
            return following.offset
    return view.manifest.next_offset
