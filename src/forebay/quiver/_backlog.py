"""How much lies in the store, and how much of it each subscriber still has before it.

Counted as things happen, because the figures are asked for every second, and after hours without a
destination there are a hundred thousand segments: looking at each of them would hold up everybody who
ingests. A look at all of them is taken at opening, and when a subscriber comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.formats.quiver_ack import Record, Register, Runs, Unregister
from forebay.quiver._ack_state import AckState
from forebay.quiver._segment_file import SegmentInfo

__all__ = ["Backlog", "Pending"]


@dataclass(slots=True)
class Pending:
    """What one subscriber has not resolved."""

    segments: int = 0
    bytes: int = 0


class Backlog:
    """See the module. `segments` and `state` are those of the store, and are only looked at."""

    def __init__(self, segments: Mapping[int, SegmentInfo], state: AckState) -> None:
        self._segments = segments
        self._state = state
        self._pending: dict[str, Pending] = {}
        self.file_bytes = 0
        """Bytes of all segment files."""
        self.rows: Counter[str] = Counter()
        """Rows in them, by signal type."""
        for info in segments.values():
            self._count(info, 1)
        for name in state.subscribers:
            self._look(name)
        state.on_resolved = self._resolved

    def of(self, name: str) -> Pending:
        """What a subscriber has before it."""
        return self._pending.get(name) or Pending()

    def oldest(self, name: str) -> SegmentInfo | None:
        """The first segment that a subscriber has not resolved."""
        who, last = self._state.subscribers[name], self._state.next_segment
        if not self.of(name).segments:
            return None
        number = who.high_water + 1
        while number < last and (number not in self._segments or who.is_resolved(number)):
            number += 1
        return self._segments.get(number)

    def added(self, info: SegmentInfo) -> None:
        """A segment is there."""
        self._count(info, 1)
        for name, who in self._state.subscribers.items():
            if not who.is_resolved(info.segment):
                self._add(name, info, 1)

    def removed(self, info: SegmentInfo) -> None:
        """A segment is gone."""
        self._count(info, -1)
        for name, who in self._state.subscribers.items():
            if not who.is_resolved(info.segment):
                self._add(name, info, -1)

    def applied(self, record: Record) -> None:
        """A subscriber may have come or gone."""
        if isinstance(record, Register):
            self._look(record.subscriber)
        elif isinstance(record, Unregister):
            self._pending.pop(record.subscriber, None)

    def _count(self, info: SegmentInfo, sign: int) -> None:
        self.file_bytes += sign * info.file_bytes
        self.rows[info.signal] += sign * info.rows

    def _add(self, name: str, info: SegmentInfo, sign: int) -> None:
        pending = self._pending.setdefault(name, Pending())
        pending.segments += sign
        pending.bytes += sign * info.file_bytes

    def _look(self, name: str) -> None:
        who = self._state.subscribers[name]
        self._pending[name] = Pending()
        for number, info in self._segments.items():
            if not who.is_resolved(number):
                self._add(name, info, 1)

    def _resolved(self, name: str, runs: Runs) -> None:
        for first, last in runs:
            for number in range(first, last + 1):
                if (info := self._segments.get(number)) is not None:
                    self._add(name, info, -1)
