"""Does a history keep the promise? Small functions that each look for one way to break it.

Every stream is compared with its final content, read when nothing could arrive any more. That read resolves
what the callers could not know: an append of unknown outcome that is found there was done, one that is not
found was not. Nothing is guessed and nothing searched, so a history of hundreds of thousands of calls takes
seconds; a general search for a linearization gives up at a few thousand once outcomes are unknown.

    lost         an acknowledged value is gone
    duplicated   a value is there twice although its sender was told something definite
    unknown      an append of unknown outcome was applied twice, or in part
    phantom      a value nobody sent, one whose append failed, one read before it was sent
    reordered    not where the sender was told, not whole, or below something acknowledged before it was sent
    stale        a read that did not know of something acknowledged before it began
    gap, overlap offsets that are missing or given twice
    fenced       a lower epoch did something after a higher one had shut it out
    ack          an acknowledgement went backwards

Reads are compared with the final content, never with each other: readers that are all wrong in the same way
agree with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from forebay.testing.history import Call, Final, History, Status

__all__ = [
    "CHECKERS",
    "Checker",
    "Problem",
    "StreamView",
    "check",
    "check_acks",
    "check_duplicated",
    "check_fenced",
    "check_lost",
    "check_monotonic_reads",
    "check_offsets",
    "check_phantom",
    "check_producer_order",
    "check_reordered",
    "check_stale",
    "check_unknown",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken promise."""

    kind: str
    """As in the table of the module."""
    message: str
    evidence: tuple[object, ...] = ()
    """The calls and values that show it."""

    def __str__(self) -> str:
        shown = "".join(f"\n    {item!r}" for item in self.evidence)
        return f"{self.kind}: {self.message}{shown}"


class StreamView:
    """One stream of a history, with what the checkers look up."""

    def __init__(self, history: History, stream: str) -> None:
        calls = [call for call in history.calls if call.stream == stream]
        self.stream = stream
        self.appends = [call for call in calls if call.kind == "append"]
        self.reads = [call for call in calls if call.kind == "read" and call.status is Status.OK]
        self.fences = [call for call in calls if call.kind == "fence" and call.status is Status.OK]
        self.acks = [call for call in calls if call.kind == "ack" and call.status is Status.OK]
        final = history.finals.get(stream)
        if final is None:
            if self.appends or self.reads:
                raise ValueError(
                    f"no final content of {stream!r}: read it at the end into history.final(...)"
                )
            final = Final(())
        self.final = final
        self.places: dict[Hashable, int] = {}
        """Offset of each value in the final content; of the first where it is there more than once."""
        self.repeats: list[tuple[Hashable, int]] = []
        """Values that were there before, with their further offsets."""
        for value, offset in zip(final.values, final.offsets, strict=True):
            if self.places.setdefault(value, offset) != offset:
                self.repeats.append((value, offset))
        self.senders: dict[Hashable, Call] = {}
        for call in self.appends:
            for value in call.values:
                if self.senders.setdefault(value, call) is not call:
                    raise ValueError(
                        f"{value!r} was sent twice to {stream!r}; make values unique to tell them apart"
                    )

    def place(self, call: Call) -> int | None:
        """Where an append really is: by the final content, else as its sender was told, else nowhere."""
        found = self.places.get(call.values[0]) if call.values else None
        if found is None and call.status is Status.OK:
            return call.offset
        return found

    def trimmed(self, call: Call, index: int) -> bool:
        """Whether a value of an append may have been removed by retention."""
        start = self.final.start
        return start > 0 and (call.offset is None or call.offset + index < start)


Checker = Callable[[StreamView], list[Problem]]


def check_lost(view: StreamView) -> list[Problem]:
    """An acknowledged value is gone."""
    return [
        Problem("lost", f"{value!r} was acknowledged and is not in {view.stream!r}", (call,))
        for call in view.appends
        if call.status is Status.OK
        for index, value in enumerate(call.values)
        if value not in view.places and not view.trimmed(call, index)
    ]


def check_duplicated(view: StreamView) -> list[Problem]:
    """A value is there twice although its sender was told something definite."""
    return list(_repeated(view, "duplicated", unknown=False))


def check_unknown(view: StreamView) -> list[Problem]:
    """An append of unknown outcome was applied twice, or in part."""
    problems = list(_repeated(view, "unknown", unknown=True))
    for call in view.appends:
        if call.status is Status.UNKNOWN and len(call.values) > 1:
            found = [value for value in call.values if value in view.places]
            if 0 < len(found) < len(call.values) and not view.final.start:
                message = f"{len(found)} of {len(call.values)} values of one batch are in {view.stream!r}"
                problems.append(Problem("unknown", message, (call, *found)))
    return problems


def _repeated(view: StreamView, kind: str, *, unknown: bool) -> Iterator[Problem]:
    for value, offset in view.repeats:
        sender = view.senders.get(value)
        if (sender is not None and sender.status is Status.UNKNOWN) == unknown:
            message = f"{value!r} is at {view.places[value]} and again at {offset} of {view.stream!r}"
            yield Problem(kind, message, (sender,) if sender else ())


def check_phantom(view: StreamView) -> list[Problem]:
    """A value nobody sent, one whose append failed, or one read before it was sent."""
    problems = []
    for value in view.places:
        sender = view.senders.get(value)
        if sender is None or sender.status is Status.FAILED:
            problems.append(_phantom(view, value, sender, ()))
    called = {value: call.called for value, call in view.senders.items() if call.status is not Status.FAILED}
    for read in view.reads:
        moments = [called.get(value) for value in read.values]
        for value, moment in zip(read.values, moments, strict=True):
            if moment is None:
                problems.append(_phantom(view, value, view.senders.get(value), (read,)))
            elif moment > read.returned:
                message = f"{value!r} was read from {view.stream!r} before it was sent"
                problems.append(Problem("phantom", message, (read, view.senders[value])))
        end = view.final.offsets[-1] + 1 if view.final.offsets else view.final.start
        if read.tail is not None and read.tail > end:
            message = f"a read saw the tail of {view.stream!r} at {read.tail}, but it ends at {end}"
            problems.append(Problem("phantom", message, (read,)))
    return problems


def _phantom(view: StreamView, value: Hashable, sender: Call | None, evidence: tuple[Call, ...]) -> Problem:
    why = "was never sent" if sender is None else "belongs to an append that failed"
    return Problem(
        "phantom", f"{value!r} in {view.stream!r} {why}", (*evidence, sender) if sender else evidence
    )


def check_reordered(view: StreamView) -> list[Problem]:
    """Not where the sender was told, not whole, or before something that had been acknowledged first."""
    problems = []
    present: list[tuple[Call, int]] = []
    for call in view.appends:
        place = view.place(call)
        if place is None or call.status is Status.FAILED:
            continue
        present.append((call, place))
        if call.status is Status.OK and call.offset is not None and call.offset != place:
            message = f"the sender was told {call.offset} of {view.stream!r}, the values are at {place}"
            problems.append(Problem("reordered", message, (call,)))
        for index, value in enumerate(call.values):
            at = view.places.get(value, place + index)
            if at != place + index:
                message = f"{value!r} of one batch is at {at} of {view.stream!r}, not at {place + index}"
                problems.append(Problem("reordered", message, (call,)))
    problems.extend(_against_real_time(view, present))
    for read in view.reads:
        problems.extend(_misread(view, read))
    return problems


def _against_real_time(view: StreamView, present: list[tuple[Call, int]]) -> Iterator[Problem]:
    """Appends that lie below one that had returned before they were called."""
    returned = sorted(
        ((call.returned, place, call) for call, place in present if call.status is Status.OK),
        key=lambda item: item[:2],
    )
    highest: tuple[int, Call] | None = None
    next_return = 0
    for call, place in sorted(present, key=lambda item: item[0].called):
        while next_return < len(returned) and returned[next_return][0] < call.called:
            _, at, earlier = returned[next_return]
            if highest is None or at > highest[0]:
                highest = (at, earlier)
            next_return += 1
        if highest is not None and place < highest[0]:
            message = f"{place} of {view.stream!r} was given after {highest[0]} had been acknowledged"
            yield Problem("reordered", message, (highest[1], call))


def _misread(view: StreamView, read: Call) -> Iterator[Problem]:
    """Values at another offset than in the final content. Unknown values are phantoms, not ours."""
    final = view.final
    if read.offset is None:
        yield from _misread_without_offset(view, read)
        return
    gapless = not final.offsets or final.offsets[-1] - final.offsets[0] == len(final.offsets) - 1
    first = read.offset - (final.offsets[0] if final.offsets else final.start)
    if gapless and first >= 0 and final.values[first : first + len(read.values)] == read.values:
        return
    for index, value in enumerate(read.values):
        at = view.places.get(value)
        offset = read.offset + index
        if at is None and offset >= final.start and view.senders.get(value):
            yield Problem("lost", f"{value!r} was read at {offset} of {view.stream!r} and is gone", (read,))
        elif at is not None and at != offset:
            message = f"{value!r} was read at {offset} of {view.stream!r} and is at {at}"
            yield Problem("reordered", message, (read, view.senders.get(value)))


def _misread_without_offset(view: StreamView, read: Call) -> Iterator[Problem]:
    """What can be told of a read that does not say where: its values are there, each once, in order."""
    highest = -1
    for value in read.values:
        at = view.places.get(value)
        if at is None:
            if not view.final.start and view.senders.get(value):
                yield Problem("lost", f"{value!r} was read from {view.stream!r} and is gone", (read,))
        elif at <= highest:
            yield Problem(
                "reordered", f"{value!r}, at {at} of {view.stream!r}, was read after {highest}", (read,)
            )
        else:
            highest = at


def check_producer_order(view: StreamView) -> list[Problem]:
    """Appends of one actor lie in another order than they were called. For senders that promise order."""
    problems = []
    last: dict[str, tuple[int, Call]] = {}
    for call in view.appends:
        place = view.place(call)
        if place is None or call.status is Status.FAILED:
            continue
        before = last.get(call.actor)
        if before is not None and place < before[0]:
            message = (
                f"{call.actor} sent it after what lies at {before[0]} of {view.stream!r}, it is at {place}"
            )
            problems.append(Problem("reordered", message, (before[1], call)))
        else:
            last[call.actor] = (place, call)
    return problems


def check_stale(view: StreamView) -> list[Problem]:
    """A read that did not know of something acknowledged, or read by anybody, before it began."""
    return list(_stale(view, [*view.appends, *view.reads], view.reads))


def check_monotonic_reads(view: StreamView) -> list[Problem]:
    """A reader went back behind its own earlier read: what weaker readers must keep as well."""
    problems: list[Problem] = []
    for actor in sorted({read.actor for read in view.reads}):
        reads = [read for read in view.reads if read.actor == actor]
        problems.extend(_stale(view, reads, reads))
    return problems


def _stale(view: StreamView, known: Sequence[Call], reads: Sequence[Call]) -> Iterator[Problem]:
    ends = sorted(
        ((call.returned, end, call) for call in known if (end := _end(call)) is not None),
        key=lambda item: item[:2],
    )
    highest: tuple[int, Call] | None = None
    next_return = 0
    for read in sorted(reads, key=attrgetter("called")):
        while next_return < len(ends) and ends[next_return][0] < read.called:
            _, end, call = ends[next_return]
            if highest is None or end > highest[0]:
                highest = (end, call)
            next_return += 1
        if highest is not None and read.tail is not None and read.tail < highest[0]:
            message = f"a read saw the tail of {view.stream!r} at {read.tail} after it had been {highest[0]}"
            yield Problem("stale", message, (highest[1], read))


def _end(call: Call) -> int | None:
    """The lowest tail that whoever got this answer knows of."""
    if call.status is not Status.OK:
        return None
    if call.tail is not None:
        return call.tail
    return None if call.offset is None else call.offset + len(call.values)


def check_offsets(view: StreamView) -> list[Problem]:
    """Offsets that are missing, or given twice."""
    problems = []
    offsets = view.final.offsets
    if offsets and offsets[0] != view.final.start:
        kind = "gap" if offsets[0] > view.final.start else "overlap"
        problems.append(
            Problem(kind, f"{view.stream!r} begins at {view.final.start} and holds {offsets[0]} first")
        )
    for before, after in pairwise(offsets):
        if after != before + 1:
            kind = "gap" if after > before else "overlap"
            problems.append(Problem(kind, f"{view.stream!r} holds {before}, then {after}"))
    claims = [
        call for call in view.appends if call.status is Status.OK and call.offset is not None and call.values
    ]
    claims.sort(key=lambda call: (call.offset, call.called))
    reached: Call | None = None
    end = -1
    for call in claims:
        assert call.offset is not None
        if reached is not None and call.offset < end:
            message = f"offset {call.offset} of {view.stream!r} was given to two appends"
            problems.append(Problem("overlap", message, (reached, call)))
        if call.offset + len(call.values) > end:
            end, reached = call.offset + len(call.values), call
    return problems


def check_fenced(view: StreamView) -> list[Problem]:
    """A lower epoch did something after a higher one had shut it out.

    An append or ack that was under way while the fence was set may be older than it, so it counts only if it
    lies behind the offset that the fence returned.
    """
    fences = sorted(view.fences, key=attrgetter("returned"))
    problems: list[Problem] = []
    later = [call for call in (*view.appends, *view.acks, *view.fences) if call.epoch is not None]
    highest: Call | None = None
    next_fence = 0
    for call in sorted(later, key=attrgetter("called")):
        while next_fence < len(fences) and fences[next_fence].returned < call.called:
            if highest is None or (fences[next_fence].epoch or 0) > (highest.epoch or 0):
                highest = fences[next_fence]
            next_fence += 1
        if highest is not None and _happened(view, call) and (call.epoch or 0) < (highest.epoch or 0):
            problems.append(_fenced(view, highest, call))
    for fence in fences:
        if fence.offset is not None:
            problems.extend(
                _fenced(view, fence, call)
                for call in later
                if call.kind == "append"
                and call.called <= fence.returned
                and (call.epoch or 0) < (fence.epoch or 0)
                and _happened(view, call)
                and (view.place(call) or 0) >= fence.offset
            )
    return problems


def _happened(view: StreamView, call: Call) -> bool:
    return call.status is Status.OK or (call.kind == "append" and view.place(call) is not None)


def _fenced(view: StreamView, fence: Call, call: Call) -> Problem:
    message = f"{call.kind} of epoch {call.epoch} on {view.stream!r} after fence {fence.epoch}"
    return Problem("fenced", message, (fence, call))


def check_acks(view: StreamView) -> list[Problem]:
    """An acknowledgement went backwards: called after a higher one of the same group had returned."""
    problems = []
    for group in sorted({call.group for call in view.acks}):
        acks = [call for call in view.acks if call.group == group]
        returned = sorted(acks, key=attrgetter("returned"))
        highest: Call | None = None
        next_return = 0
        for call in sorted(acks, key=attrgetter("called")):
            while next_return < len(returned) and returned[next_return].returned < call.called:
                if highest is None or (returned[next_return].offset or 0) > (highest.offset or 0):
                    highest = returned[next_return]
                next_return += 1
            if highest is not None and (call.offset or 0) < (highest.offset or 0):
                message = f"{view.stream!r} acknowledged up to {call.offset} after {highest.offset}"
                problems.append(Problem("ack", message, (highest, call)))
    return problems


CHECKERS: tuple[Checker, ...] = (
    check_lost,
    check_duplicated,
    check_unknown,
    check_phantom,
    check_reordered,
    check_stale,
    check_offsets,
    check_fenced,
    check_acks,
)
"""What a log promises: all of these."""


def check(history: History, checkers: Sequence[Checker] = CHECKERS) -> list[Problem]:
    """Everything that is wrong with a history. Empty: nothing was found."""
    views = [StreamView(history, stream) for stream in history.streams]
    return [problem for view in views for checker in checkers for problem in checker(view)]
