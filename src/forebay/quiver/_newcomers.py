"""Where a new subscriber begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forebay.errors import LimitExceeded, UsageError
from forebay.formats.quiver_ack import Outcome, Register, Runs
from forebay.quiver._acks import Acks
from forebay.quiver._finalizer import Finalizer
from forebay.quiver._runs import RunSet
from forebay.quiver._segment_file import SegmentInfo

__all__ = ["Newcomers"]

SUBSCRIBERS_MAX: Final = 1_000
"""Subscribers of one Quiver store: each is asked about each segment."""


class Newcomers:
    """See the module. With `skips_nothing` everybody begins with the oldest segment: damage took
    acknowledgements, and a newcomer may be somebody who was there before."""

    def __init__(
        self, acks: Acks, finalizer: Finalizer, segments: Mapping[int, SegmentInfo], *, skips_nothing: bool
    ) -> None:
        self._acks = acks
        self._finalizer = finalizer
        self._segments = segments
        self._skips_nothing = skips_nothing

    async def add(self, name: str, start: str | int) -> None:
        """Register a subscriber, durably, unless it is there. Not while segments are deleted."""
        there = self._acks.state.subscribers
        if name in there:
            return
        if len(there) >= SUBSCRIBERS_MAX:
            raise LimitExceeded(
                "SUBSCRIBERS_MAX",
                limit=SUBSCRIBERS_MAX,
                actual=len(there) + 1,
                hint="unregister those that nobody serves any more",
            )
        after = self._after(start)
        # Numbers that are gone already are resolved for the newcomer, or its mark would wait for them.
        gone = [Outcome(name, first, last, "ack") for first, last in self._gone_behind(after)]
        await self._acks.register([Register(name, after), *gone])

    def applied(self, record: Register) -> None:
        """The record is durable. Numbers that a failed write left meanwhile are gone for it, too."""
        who = self._acks.state.subscribers[record.subscriber]
        for first, last in self._gone_behind(record.after):
            who.resolve(first, last)

    def _after(self, start: str | int) -> int:
        # One that is being written now has a number that no record has spoken of yet: it is still to come.
        oldest = min(self._segments, default=self._acks.state.next_segment)
        if start == "earliest" or self._skips_nothing:
            return oldest - 1
        if start == "latest":
            return self._finalizer.next_segment - 1
        if not isinstance(start, int) or isinstance(start, bool) or start < 1:
            raise UsageError(f"start is {start!r}", hint="earliest, latest, or the number of a segment")
        return min(max(start, oldest), self._finalizer.next_segment) - 1

    def _gone_behind(self, after: int) -> Runs:
        present = RunSet((number, number) for number in sorted(self._segments))
        return present.gaps(after + 1, self._acks.state.next_segment - 1)
