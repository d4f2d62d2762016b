"""What the subscribers have done so far: a pure state, changed by the records of `ack.log` and nothing else.

The running store and recovery apply the same records through the same function, so what is true before a
crash is true after it. Applying a record twice changes nothing.

**High-water mark.** The highest segment up to which everything is resolved. Segments resolved above it wait
in `resolved_above` until the hole fills; the missing ones in between are derived, not stored. Numbers that
never became a segment (a failed write took one) count as resolved for everybody.

**Outcomes of a subscriber that is not registered.** One that is removed while it acknowledges leaves such a
record behind its removal; it must not bring the subscriber back, which would pin everything for nobody.
Damage that took a registration leaves the same trace, and there the subscriber is taken to need everything.
Which of the two it was is known at the end of a replay: `settle_implied`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.formats import quiver_ack
from forebay.formats.quiver_ack import Checkpoint, Record, SubscriberState
from forebay.quiver._runs import RunSet

__all__ = ["AckState", "Subscriber"]


@dataclass(slots=True)
class Subscriber:
    """One subscriber's position."""

    name: str
    high_water: int
    resolved_above: RunSet = field(default_factory=RunSet)
    dropped: Counter[str] = field(default_factory=Counter)

    def is_resolved(self, segment: int) -> bool:
        """Whether it needs the segment no more."""
        return segment <= self.high_water or segment in self.resolved_above

    def resolve(self, first: int, last: int) -> None:
        """Mark a run, and let the mark rise over what is contiguous now."""
        if last <= self.high_water:
            return
        self.resolved_above.add(max(first, self.high_water + 1), last)
        end = self.resolved_above.end_of_run(self.high_water + 1)
        if end > self.high_water:
            self.resolved_above.remove(self.high_water + 1, end)
            self.high_water = end

    def unresolved(self, first: int, last: int) -> list[tuple[int, int]]:
        """The runs between `first` and `last` that it still needs."""
        first = max(first, self.high_water + 1)
        return self.resolved_above.gaps(first, last) if first <= last else []


class AckState:
    """See the module."""

    def __init__(self) -> None:
        self.subscribers: dict[str, Subscriber] = {}
        self.live = RunSet()
        """Segments that should be there: as files, but for those in `sealed`."""
        self.sealed: dict[int, quiver_ack.Runs] = {}
        """Segments that are no files yet, and their WAL entries."""
        self.covered = RunSet()
        """WAL entries that need no replay."""
        self.next_segment = 1
        self.next_entry = 1
        self._known_from = 0
        """Segments below were finalized before the checkpoint. It knows which of them are gone: a record that
        is replayed must not bring one back, whose loss would be counted again."""
        self.losses: Counter[str] = Counter()
        self.on_resolved: Callable[[str, quiver_ack.Runs], None] = lambda name, runs: None
        """Hears what a subscriber is about to need no more."""
        self.implied: set[str] | None = None
        """While a log is replayed: subscribers that only outcomes speak of. None in a running store."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> AckState:
        """The state when the checkpoint was taken."""
        state = cls()
        state.live = RunSet(checkpoint.live)
        state.sealed = dict(checkpoint.sealed)
        state.covered = RunSet(checkpoint.covered)
        state.next_segment = state._known_from = checkpoint.next_segment
        state.next_entry = checkpoint.next_entry
        state.losses = Counter(checkpoint.losses)
        for name, each in checkpoint.subscribers.items():
            state.subscribers[name] = Subscriber(
                name, each.high_water, RunSet(each.resolved_above), Counter(each.dropped)
            )
        return state

    def checkpoint(self, generation: int) -> Checkpoint:
        """Everything, to be replayed from the log file `generation` on."""
        return Checkpoint(
            generation=generation,
            next_segment=self.next_segment,
            next_entry=self.next_entry,
            live=self.live.runs(),
            covered=self.covered.runs(),
            subscribers={
                name: SubscriberState(each.high_water, each.resolved_above.runs(), dict(each.dropped))
                for name, each in self.subscribers.items()
            },
            losses=dict(self.losses),
            sealed=list(self.sealed.items()),
        )

    def apply(self, record: Record) -> None:
        """Let a durable record take effect."""
        match record:
            case quiver_ack.Outcome():
                self._apply_outcome(record)
            case quiver_ack.Register(subscriber=name, after=after):
                self._register(name, after)
            case quiver_ack.Unregister(subscriber=name):
                self._forget(name)
            case quiver_ack.Sealed(segment=segment, entries=entries):
                self._apply_sealed(segment, entries)
            case quiver_ack.Finalized():
                self._apply_finalized(record)
            case quiver_ack.Dropped():
                self._apply_dropped(record)
            case quiver_ack.WalDropped():
                self._apply_wal_dropped(record)
            case quiver_ack.Floor(next_segment=segment, next_entry=entry):
                self.next_segment = max(self.next_segment, segment)
                self.next_entry = max(self.next_entry, entry)

    def _apply_sealed(self, segment: int, entries: quiver_ack.Runs) -> None:
        if segment >= self._known_from:
            self.live.add(segment)
            self.sealed[segment] = entries
        self.saw_segment(segment)

    def _apply_finalized(self, record: quiver_ack.Finalized) -> None:
        self.sealed.pop(record.segment, None)
        if record.segment >= self._known_from:
            self.live.add(record.segment)
        self.saw_segment(record.segment)
        for first, last in record.entries:
            self.cover(first, last)

    def _apply_dropped(self, record: quiver_ack.Dropped) -> None:
        # Without a file it would be made again, for whoever is registered next.
        for first, last in self.sealed.pop(record.segment, ()):
            self.cover(first, last)
        self.saw_segment(record.segment)
        if record.segment in self.live:
            self.live.remove(record.segment)
            self.losses[f"segments.{record.reason}"] += 1
            self.losses[f"rows.{record.reason}"] += record.rows
            self.losses[f"bytes.{record.reason}"] += record.bytes

    def cover(self, first: int, last: int) -> None:
        """These WAL entries need no replay."""
        self.covered.add(first, last)
        self.next_entry = max(self.next_entry, last + 1)

    def settle_implied(self, *, keep: bool) -> None:
        """The replay is over: subscribers without a registration stay only where damage may have taken it."""
        implied, self.implied = self.implied or set(), None
        if not keep:
            for name in implied:
                self._forget(name)

    def _register(self, name: str, after: int) -> None:
        if self.implied and name in self.implied:
            self._forget(name)
        self.subscribers.setdefault(name, Subscriber(name, after))

    def _apply_wal_dropped(self, record: quiver_ack.WalDropped) -> None:
        fresh = sum(b - a + 1 for a, b in self.covered.gaps(record.first, record.last))
        if fresh:
            self.losses[f"entries.{record.reason}"] += fresh
            self.losses[f"rows.{record.reason}"] += record.rows
            self.losses[f"bytes.{record.reason}"] += record.bytes
        self.cover(record.first, record.last)

    def _forget(self, name: str) -> None:
        self.subscribers.pop(name, None)
        if self.implied is not None:
            self.implied.discard(name)

    def is_resolved(self, segment: int) -> bool:
        """Whether there are subscribers and none of them needs the segment."""
        return bool(self.subscribers) and all(each.is_resolved(segment) for each in self.subscribers.values())

    def note_absent(self, segment: int) -> None:
        """No segment will ever have this number."""
        self.saw_segment(segment)
        for each in self.subscribers.values():
            each.resolve(segment, segment)

    def saw_segment(self, segment: int) -> None:
        """The number is given out."""
        self.next_segment = max(self.next_segment, segment + 1)

    def _apply_outcome(self, record: quiver_ack.Outcome) -> None:
        self.saw_segment(record.last)
        who = self.subscribers.get(record.subscriber)
        if who is None:
            if self.implied is None:
                return
            self.implied.add(record.subscriber)
            who = self.subscribers[record.subscriber] = Subscriber(record.subscriber, 0)
        if record.outcome == "nack":
            return
        runs = who.unresolved(record.first, record.last)
        if record.outcome == "dropped":
            for first, last in runs:
                who.dropped[record.reason] += last - first + 1
        self.on_resolved(who.name, runs)
        who.resolve(record.first, record.last)
