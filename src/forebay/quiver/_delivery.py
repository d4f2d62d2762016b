"""Handing segments to subscribers: claims with leases, retries that block nobody, oldest first.

**Invariant.** A segment is delivered to a subscriber until a terminal outcome for it is durable, and never
after. What is kept in memory per subscriber is bounded by what is claimed or waits for a retry; the backlog
itself is a number, `fresh`, the next segment never handed out. No step looks at all that waits: a hundred
thousand segments that were refused once must not hold up everybody else in the event loop.

**Active or not.** A subscriber becomes active by its first `next`, or by `activate`. `deactivate` pauses it:
nothing is handed out, and everything it has not resolved stays pinned. One that was not active since the
store was opened is an orphan.

Several tasks may read for one subscriber; each claim belongs to one `Delivery`. A lease that lapses puts the
segment back; its holder may still acknowledge it, as long as nobody else did.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, TypeVar

from forebay.errors import Closed, FormatError, UsageError
from forebay.formats.quiver_ack import Outcome
from forebay.kit.clock import Clock
from forebay.quiver import _aside
from forebay.quiver._ack_state import Subscriber
from forebay.quiver._acks import Acks
from forebay.quiver._config import QuiverConfig
from forebay.quiver._disk import Disk, Piece
from forebay.quiver._errors import UnknownSubscriber, from_os_error
from forebay.quiver._finalizer import TIMER_S
from forebay.quiver._metrics import QuiverMetrics
from forebay.quiver._reading import SegmentReader, SegmentView
from forebay.quiver._segment_file import SegmentInfo, segment_name
from forebay.quiver._to_the_end import on_its_own

__all__ = ["Deliveries", "Delivery"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Claim:
    until: float
    attempt: int


@dataclass(slots=True)
class _Desk:
    """What is in memory of one subscriber."""

    fresh: int
    claims: dict[int, _Claim] = field(default_factory=dict)
    """In the order in which they lapse: all leases are equally long."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Attempts so far of each segment that waits for another: in one of the two heaps, not in both."""
    later: list[tuple[float, int]] = field(default_factory=list)
    """When a segment may be tried again."""
    ready: list[int] = field(default_factory=list)
    """Segments that may be tried now."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_active: bool = False
    is_paused: bool = False

    def put_back(self, segment: int, attempt: int, at: float | None = None) -> None:
        """Let it be tried again, now or from `at` on."""
        self.attempts[segment] = attempt
        if at is None:
            heapq.heappush(self.ready, segment)
        else:
            heapq.heappush(self.later, (at, segment))
        self.wake.set()

    def look(self, now: float, is_wanted: Callable[[int], bool]) -> None:
        """Make ready what lapsed or has waited; forget what nobody wants any more."""
        while self.claims:
            segment, claim = next(iter(self.claims.items()))
            if claim.until > now:
                break
            del self.claims[segment]
            self.put_back(segment, claim.attempt)
        while self.later and self.later[0][0] <= now:
            heapq.heappush(self.ready, heapq.heappop(self.later)[1])
        while self.ready and not is_wanted(self.ready[0]):
            del self.attempts[heapq.heappop(self.ready)]


class Delivery:
    """A segment in the hands of a subscriber. Leaving its `async with` without an outcome releases it."""

    def __init__(self, deliveries: Deliveries, subscriber: str, view: SegmentView, claim: _Claim) -> None:
        self._deliveries = deliveries
        self._claim = claim
        self._is_settled = False
        self.subscriber = subscriber
        self.view = view
        """The segment: `view.meta`, `view.schema`, `view.batches()`, `view.table()`."""

    @property
    def segment(self) -> int:
        """Its number."""
        return self.view.segment

    @property
    def attempt(self) -> int:
        """1 for the first delivery since the store was opened."""
        return self._claim.attempt

    async def ack(self) -> bool:
        """Done with it. True once that is durable; False where it had a terminal outcome already."""
        return await self._settle("ack")

    async def nack(self) -> bool:
        """Try again later, after a pause that grows. False where the claim is no longer this one's."""
        return await self._settle("nack")

    async def reject(self) -> bool:
        """Never again: a copy goes to `dead/`, the outcome is `dropped` with the reason `rejected`."""
        return await self._settle("dropped")

    def release(self) -> None:
        """Give it back at once, without an outcome."""
        if not self._is_settled:
            self._is_settled = True
            self._deliveries.release(self.subscriber, self.segment, self._claim)
            self.view.release_pages()

    async def _settle(self, outcome: Literal["ack", "nack", "dropped"]) -> bool:
        done = await self._deliveries.settle(self.subscriber, self.segment, self._claim, outcome)
        self._is_settled = True
        self.view.release_pages()
        return done

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _check_timeout(timeout_s: object) -> None:
    is_number = isinstance(timeout_s, int | float) and not math.isnan(timeout_s)
    if timeout_s is not None and not is_number:
        raise UsageError(f"timeout_s is {timeout_s!r:.80}", hint="seconds, or None to wait for ever")


class Deliveries:
    """See the module."""

    def __init__(
        self,
        disk: Disk,
        config: QuiverConfig,
        clock: Clock,
        randomness: random.Random,
        acks: Acks,
        segments: dict[int, SegmentInfo],
        metrics: QuiverMetrics,
        on_nack: Callable[[int], None],
    ) -> None:
        self._disk = disk
        self._config = config
        self._clock = clock
        self._random = randomness
        self._acks = acks
        self._segments = segments
        self._metrics = metrics
        self._on_nack = on_nack
        self._desks: dict[str, _Desk] = {}
        self._is_closed = False
        self._damaged: set[int] = set()
        self.reader = SegmentReader(disk, config.maps_max)
        self.aside_bytes = 0
        """Bytes in `dead/` and `quarantine/`."""

    def notify(self) -> None:
        """There may be something new for everybody."""
        for desk in self._desks.values():
            desk.wake.set()

    def close(self) -> None:
        """Nobody waits any longer."""
        self._is_closed = True
        self.notify()

    def forget(self, name: str) -> None:
        """The subscriber is gone."""
        desk = self._desks.pop(name, None)
        if desk is not None:
            desk.wake.set()

    def is_leased(self, segment: int) -> bool:
        """Whether somebody works on it now."""
        now = self._clock.monotonic()
        return any(
            (claim := desk.claims.get(segment)) is not None and claim.until > now
            for desk in self._desks.values()
        )

    def leased(self) -> set[int]:
        """Segments that somebody works on now."""
        claimed = {segment for desk in self._desks.values() for segment in desk.claims}
        return {each for each in claimed if self.is_leased(each)}

    def activate(self, name: str) -> None:
        """Hand out again, or for the first time."""
        desk = self._desk(name)
        desk.is_active, desk.is_paused = True, False
        desk.wake.set()

    def deactivate(self, name: str) -> None:
        """Hand nothing out until `activate`. What is claimed may still be settled."""
        desk = self._desk(name)
        desk.is_active, desk.is_paused = False, True

    def is_active(self, name: str) -> bool:
        """Whether the subscriber has asked for anything since the store was opened, and is not paused."""
        desk = self._desks.get(name)
        return desk is not None and desk.is_active

    def is_orphaned(self, name: str) -> bool:
        """Whether nobody has spoken for the subscriber since the store was opened."""
        desk = self._desks.get(name)
        return desk is None or not (desk.is_active or desk.is_paused)

    def in_flight(self, name: str) -> int:
        """Segments under a lease."""
        desk = self._desks.get(name)
        return 0 if desk is None else len(desk.claims)

    async def next(self, name: str, timeout_s: float | None) -> Delivery | None:
        """The oldest segment that the subscriber needs and nobody works on; None after `timeout_s`."""
        _check_timeout(timeout_s)
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        while True:
            if self._is_closed:
                raise Closed("the store was closed", hint="open it again")
            desk = self._desk(name)
            desk.is_active = not desk.is_paused
            # Cleared before the look, so that what comes after it is not slept through.
            desk.wake.clear()
            found = None if desk.is_paused else self._take(name, desk)
            if found is not None:
                delivery = await self._open(name, *found)
                if delivery is not None:
                    return delivery
                continue
            now = self._clock.monotonic()
            if deadline is not None and now >= deadline:
                return None
            await self._sleep(desk, deadline, now)

    async def run(self, work: Callable[[], T]) -> T:
        """Do work with a segment that is handed out, in the thread that reads them."""
        return await self._disk.run("reads", work)

    async def look(self, segment: int) -> SegmentView | None:
        """A segment without a claim. None where it is gone, or damaged beyond reading, which is counted."""
        try:
            return await self._view(segment)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error("reading a segment", error) from error
        except FormatError as error:
            self._metrics.read_errors.inc()
            _log.warning("quiver.segment.unreadable: segment %d: %s", segment, error)
            return None

    def _desk(self, name: str) -> _Desk:
        state = self._acks.state.subscribers.get(name)
        if state is None:
            raise UnknownSubscriber(name)
        desk = self._desks.get(name)
        if desk is None:
            desk = self._desks[name] = _Desk(state.high_water + 1)
        return desk

    def _take(self, name: str, desk: _Desk) -> tuple[int, _Claim] | None:
        now = self._clock.monotonic()
        who = self._acks.state.subscribers[name]

        def is_wanted(segment: int) -> bool:
            return segment in self._segments and not who.is_resolved(segment)

        desk.look(now, is_wanted)
        last = self._acks.state.next_segment
        while desk.fresh < last and not is_wanted(desk.fresh):
            desk.fresh += 1
        # What was handed out before is below what never was.
        if desk.ready:
            segment = heapq.heappop(desk.ready)
        elif desk.fresh < last:
            segment = desk.fresh
            desk.fresh += 1
        else:
            return None
        attempt = desk.attempts.pop(segment, 0) + 1
        claim = desk.claims[segment] = _Claim(now + self._config.lease_ms / 1000, attempt)
        return segment, claim

    async def _open(self, name: str, segment: int, claim: _Claim) -> Delivery | None:
        try:
            return await self._open_claimed(name, segment, claim)
        except BaseException:
            # An error, or nobody who waits any more: others need not wait for the lease to lapse.
            self.release(name, segment, claim)
            raise

    async def _open_claimed(self, name: str, segment: int, claim: _Claim) -> Delivery | None:
        try:
            view = await self._view(segment)
        except OSError:
            self._metrics.read_errors.inc()
            if segment in self._segments:
                self._defer(name, segment, claim)
            return None
        except FormatError:
            await self._lose(name, segment)
            return None
        if view.bad_parts and len(view.bad_parts) == len(view.meta.parts):
            await self._lose(name, segment)
            return None
        if view.bad_parts and segment not in self._damaged:
            self._metrics.quarantined.inc(len(view.bad_parts))
            parts = [view.meta.parts[each] for each in view.bad_parts]
            await self._quarantine(
                segment,
                lambda: {
                    f"part-{segment:016d}-{each.offset}.bin": view.data[
                        each.offset : each.offset + each.length
                    ]
                    for each in parts
                },
            )
        who = self._acks.state.subscribers.get(name)
        if who is None or who.is_resolved(segment):
            # Whoever had it before has settled it in the meantime, or retention took it.
            self._drop_claim(name, segment, claim)
            return None
        return Delivery(self, name, view, claim)

    async def _view(self, segment: int) -> SegmentView:
        view = await self.reader.open(segment)
        if segment not in self._segments:
            # Deleted meanwhile: kept mapped, it would keep its space on the disk.
            self.reader.forget(segment)
        return view

    def _drop_claim(self, name: str, segment: int, claim: _Claim) -> None:
        desk = self._desks.get(name)
        if desk is not None and desk.claims.get(segment) is claim:
            del desk.claims[segment]

    async def _quarantine(self, segment: int, files: Callable[[], dict[str, Piece]]) -> None:
        """Damaged bytes outlive their segment, within the bound. Once, and never at the cost of delivery."""
        self._damaged.add(segment)
        with contextlib.suppress(OSError):
            await self._keep("quarantine", files)

    async def _keep(self, directory: str, files: Callable[[], dict[str, Piece]]) -> None:
        limit = self._config.aside_bytes_max

        def work() -> tuple[int | None, OSError | None]:
            try:
                return _aside.keep(self._disk, directory, files(), limit), None
            except OSError as error:
                # The oldest may be gone all the same, to make room.
                with contextlib.suppress(OSError):
                    return _aside.total_bytes(self._disk), error
                return None, error

        async def keep() -> None:
            total, problem = await self._disk.run("reads", work)
            self.aside_bytes = self.aside_bytes if total is None else total
            if problem is not None:
                raise problem

        await on_its_own(keep())

    async def bound_aside(self) -> None:
        """Hold what was put aside at opening to the bound, once everybody has been told of it."""
        if self.aside_bytes > self._config.aside_bytes_max:
            with contextlib.suppress(OSError):
                await self._keep("quarantine", dict)

    async def _lose(self, name: str, segment: int) -> None:
        """Nothing of it can be read: say so, rather than deliver nothing as if it were something."""
        if segment not in self._damaged:
            self._metrics.quarantined.inc()
            await self._quarantine(
                segment,
                lambda: {f"segment-{segment:016d}.arrow": self._disk.read(segment_name(segment))},
            )
        await self._acks.commit([Outcome(name, segment, segment, "dropped", "lost")])
        desk = self._desks.get(name)
        if desk is not None:
            desk.claims.pop(segment, None)

    async def _sleep(self, desk: _Desk, deadline: float | None, now: float) -> None:
        moments: list[float] = []
        if not desk.is_paused:
            moments += [at for at, _ in desk.later[:1]]
            moments += [claim.until for claim in itertools.islice(desk.claims.values(), 1)]
        if deadline is not None:
            moments.append(deadline)
        if not moments:
            await desk.wake.wait()
            return
        sleep = asyncio.ensure_future(self._clock.sleep(max(TIMER_S, min(moments) - now)))
        wake = asyncio.ensure_future(desk.wake.wait())
        try:
            await asyncio.wait({sleep, wake}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (sleep, wake):
                each.cancel()

    # Outcomes.

    async def settle(
        self, name: str, segment: int, claim: _Claim, outcome: Literal["ack", "nack", "dropped"]
    ) -> bool:
        """Record an outcome. False where it changes nothing."""
        if self._is_closed:
            # The directory may be somebody else's by now, and a rejected segment is copied there.
            raise Closed("the store was closed", hint="open it again; what was not settled comes again")
        who = self._acks.state.subscribers.get(name)
        desk = self._desks.get(name)
        if who is None or desk is None:
            raise UnknownSubscriber(name)
        holds = desk.claims.get(segment) is claim
        if who.is_resolved(segment) or (outcome == "nack" and not holds):
            if holds:
                del desk.claims[segment]
            return False
        info = self._segments.get(segment)
        if outcome == "dropped" and not await self._keep_dead(who, segment):
            self._drop_claim(name, segment, claim)
            return False
        reason: Literal["", "rejected"] = "rejected" if outcome == "dropped" else ""
        await self._acks.commit([Outcome(name, segment, segment, outcome, reason)])
        self._metrics.outcomes.labels(name, outcome).inc()
        self._count_rows(name, info, outcome)
        if outcome == "nack":
            self._on_nack(segment)
            self._defer(name, segment, claim)
        elif desk.claims.get(segment) is claim:
            del desk.claims[segment]
        return True

    def _count_rows(
        self, name: str, info: SegmentInfo | None, outcome: Literal["ack", "nack", "dropped"]
    ) -> None:
        if info is None:
            return
        metrics = self._metrics
        families = {
            "ack": metrics.items_delivered,
            "nack": metrics.items_requeued,
            "dropped": metrics.items_rejected,
        }
        families[outcome].labels(name, info.signal).inc(info.rows)

    def release(self, name: str, segment: int, claim: _Claim) -> None:
        """Back to the front, at once."""
        desk = self._desks.get(name)
        if desk is not None and desk.claims.get(segment) is claim:
            del desk.claims[segment]
            desk.put_back(segment, claim.attempt)

    def _defer(self, name: str, segment: int, claim: _Claim) -> None:
        desk = self._desks.get(name)
        if desk is None or desk.claims.get(segment) is not claim:
            return
        del desk.claims[segment]
        self._metrics.retries.labels(name).inc()
        ceiling = min(self._config.retry_cap_ms, self._config.retry_base_ms << min(claim.attempt - 1, 30))
        # Half of it at least, so that a destination that is down is not asked at once again.
        wait = self._random.uniform(ceiling / 2, ceiling) / 1000
        desk.put_back(segment, claim.attempt, self._clock.monotonic() + wait)

    async def _keep_dead(self, who: Subscriber, segment: int) -> bool:
        """A copy for whoever wants to look at it; the oldest copies make room. False where another holder
        settled it meanwhile, or retention took it."""
        file = f"{segment:016d}.{who.name}.arrow"
        try:
            held = self.reader.held.get(segment)
            await self._keep(
                "dead", lambda: {file: held.data if held else self._disk.read(segment_name(segment))}
            )
        except OSError as error:
            if not who.is_resolved(segment):
                raise from_os_error("keeping a rejected segment", error) from error
        return not who.is_resolved(segment)
