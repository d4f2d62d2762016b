"""One actor's wire to one simulated service: latency, faults, partitions, and the moment of effect.

The effect of a request is a callback of the world, not of the actor, because that is where it happens: a
paused actor's request goes on, and a crashed actor's request, already on the wire, may still arrive. What
comes back is a wake-up of the actor's own task, which a pause holds back and a crash drops.

A request that its caller gave up (crashed, or cancelled the call) before it was decided takes effect or not;
a seeded coin says so, unless the crash named the outcome.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import Context
from typing import Generic, TypeVar

from forebay.errors import ForebayError, OutcomeUnknown, Unavailable
from forebay.testing.faults import NO_FAULTS, Faults, FaultSchedule, Latencies, Plan
from forebay.testing.sim_loop import SimLoop
from forebay.testing.sim_process import CURRENT, Process
from forebay.testing.trace import Requests, TraceLine

__all__ = ["Link"]

T = TypeVar("T")

TIMEOUT_S = 5.0
"""Virtual seconds after which a caller gives up an answer that a partition holds back."""


class Link:
    """See the module. The world makes one per actor and service."""

    def __init__(
        self,
        loop: SimLoop,
        actor: str,
        service: str,
        *,
        randomness: random.Random,
        latencies: Latencies,
        trace: list[TraceLine],
        requests: Requests,
        context: Context,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.loop = loop
        self.actor = actor
        self.service = service
        self.random = randomness
        self.latencies = latencies
        self.schedule = FaultSchedule(NO_FAULTS)
        """The faults of this wire."""
        self.cut = ""
        """`both`: nothing passes. `replies`: requests arrive, answers do not. Empty: no partition."""
        self.trace = trace
        self.timeout_s = timeout_s
        self.context = context
        self.names: dict[str, str] = {}
        """Operations as traces and counters call them."""
        self._requests = requests
        self._counters: dict[str, list[int]] = {}
        self._forced: list[tuple[str, str]] = []
        self._faults = NO_FAULTS
        self._plans: dict[str, Plan | None] = {}

    def force(self, operation: str, kind: str, times: int = 1) -> None:
        """Let the next requests of one operation meet one kind of fault."""
        self._forced.extend([(operation, kind)] * times)

    async def call(
        self, operation: str, subject: str, effect: Callable[[], T], *, write: bool, sent: int = 0
    ) -> T:
        """Send a request whose effect is `effect()`, and wait for the answer."""
        loop = self.loop
        process = CURRENT.get()
        future = loop.create_future()
        if loop.is_closed() or (process is not None and not process.alive):
            await future  # The dead do not act: this never returns.
        counter = self._counters.get(operation) or self.counter(operation)
        counter[0] += 1
        counter[1] += sent
        request = _Request(self, operation, subject, effect, future, process, write)
        request.send()
        await future
        if request.error is None:
            return request.result
        try:
            raise request.error
        finally:
            # The error knows this frame by its traceback, and the frame would know the error: without the
            # ring, what a refused request leaves behind goes away at once and not by a collection.
            del request

    def counter(self, operation: str) -> list[int]:
        """Requests, bytes sent and bytes received of one operation."""
        counter = self._counters.get(operation)
        if counter is None:
            self.names[operation] = f"{self.service}.{operation}"
            counter = self._requests.counter(self.actor, self.names[operation])
            self._counters[operation] = counter
        return counter

    def plan(self, operation: str, write: bool) -> Plan | None:
        """What may go wrong with a request sent now."""
        faults = self.schedule.at(self.loop.time())
        if faults is not self._faults:
            self._faults = faults
            self._plans = {}
        if operation not in self._plans:
            self._plans[operation] = faults.plan(operation, write=write)
        return self._plans[operation]

    def forced(self, operation: str) -> str:
        """The fault that was ordered for the next request of this operation, if any."""
        for index, (name, kind) in enumerate(self._forced):
            if name == operation:
                del self._forced[index]
                return kind
        return ""

    @property
    def faults(self) -> Faults:
        """The faults that hold now."""
        return self.schedule.at(self.loop.time())


class _Request(Generic[T]):
    """One request on its way. Its two moments, decision and answer, are timers of the world."""

    __slots__ = (
        "effect",
        "error",
        "fault",
        "future",
        "link",
        "operation",
        "place",
        "process",
        "result",
        "subject",
        "write",
    )
    result: T

    def __init__(
        self,
        link: Link,
        operation: str,
        subject: str,
        effect: Callable[[], T],
        future: asyncio.Future[None],
        process: Process | None,
        write: bool,
    ) -> None:
        self.link = link
        self.operation = operation
        self.subject = subject
        self.effect = effect
        self.future = future
        self.process = process
        self.write = write
        self.fault = ""
        self.error: ForebayError | None = None
        self.place = link.random.random()

    def send(self) -> None:
        """Draw what will happen, and set the timers for it."""
        link = self.link
        draw = link.random
        latency = link.latencies.of(self.operation).sample(draw)
        plan = link.plan(self.operation, self.write)
        again = False
        if plan is not None:
            if plan.errors:
                at = draw.random()
                self.fault = next((kind for end, kind in plan.errors if at < end), "")
            if plan.slow and draw.random() < plan.slow:
                latency *= link.faults.slow_factor
            again = plan.duplicate > 0 and draw.random() < plan.duplicate
        if link._forced:
            kind = link.forced(self.operation)
            again = again or kind == "duplicate"
            latency *= link.faults.slow_factor if kind == "slow" else 1.0
            self.fault = kind if kind not in ("", "duplicate", "slow") else self.fault
        if link.cut == "both":
            self._send_into_the_void()
        elif self.fault:
            self._send_faulty(latency)
        else:
            self._send_plainly(latency, again)

    def _send_plainly(self, latency: float, again: bool) -> None:
        link = self.link
        share = link.latencies.decides_at
        if share is None:
            share = link.random.random()
        if share == 1.0:
            self._after(latency, self.decide_and_answer)
        else:
            if share == 0.0:
                self.decide()
            else:
                self._after(latency * share, self.decide)
            self._after(latency, self.answer)
        if again:
            self._after(latency + self._lateness(), self.decide_again)

    def _send_faulty(self, latency: float) -> None:
        what = self.link.names[self.operation]
        fault = self.fault
        if fault == "throttle":
            self.error = Unavailable(f"{what} was throttled", hint="slow down and try again")
            latency /= 10
        elif fault in ("before", "reset"):
            reason = "failed" if fault == "before" else "ended in the middle of the answer"
            self.error = Unavailable(f"{what} {reason}", hint="try again")
        else:
            self.error = OutcomeUnknown(what, reason="the answer was lost")
            if fault == "after":
                self._after(latency, self.decide)
            elif fault == "late":
                self._after(latency + self._lateness(), self.decide)
        if fault not in ("after", "late"):
            self._note(fault)
        self._after(latency, self.answer)

    def _send_into_the_void(self) -> None:
        """A caller behind a partition waits, then knows nothing, or knows that it never connected."""
        what = self.link.names[self.operation]
        if self.write and self.link.random.random() < 0.5:
            self.error = OutcomeUnknown(what, reason="no answer in time")
        else:
            self.error = Unavailable(f"{what}: cannot connect", hint="try again")
        self.fault = "partition"
        self._note("partition")
        self._after(self.link.timeout_s, self.answer)

    def _lateness(self) -> float:
        return self.link.random.random() * self.link.faults.late_ms_max / 1000

    def _after(self, delay: float, moment: Callable[[], None]) -> None:
        loop = self.link.loop
        loop.act_at(loop.time() + delay, self.place, moment)

    def decide_and_answer(self) -> None:
        """Both moments at once."""
        self.decide()
        self.answer()

    def decide(self) -> None:
        """The effect, unless the caller is gone and the coin says no."""
        if self._abandoned() and not self._arrives():
            self._note("dropped")
            return
        try:
            result = self.effect()
        except ForebayError as error:
            self._note(type(error).__name__)
            if not self.fault:
                # No wire carries a traceback, and its frames would hold this request in a ring.
                self.error = error.with_traceback(None)
        else:
            self._note(f"ok, {self.fault}" if self.fault else "ok")
            self.result = result

    def decide_again(self) -> None:
        """The second arrival of the same request. Nobody waits for its answer."""
        try:
            self.effect()
        except ForebayError as error:
            self._note(f"duplicate {type(error).__name__}")
        else:
            self._note("duplicate ok")

    def answer(self) -> None:
        """Wake the caller, unless a partition holds the answer back until the caller gives up."""
        if self.link.cut and not self.fault:
            self.fault = "partition"
            what = self.link.names[self.operation]
            if self.write:
                self.error = OutcomeUnknown(what, reason="no answer in time")
            else:
                self.error = Unavailable(f"{what}: no answer in time", hint="try again")
            self._after(self.link.timeout_s, self.answer)
        elif not self.future.done():
            self.future.set_result(None)

    def _abandoned(self) -> bool:
        if self.future.done():
            return self.future.cancelled()
        return self.process is not None and not self.process.alive

    def _arrives(self) -> bool:
        process = self.process
        if process is not None and not process.alive and process.in_flight is not None:
            return process.in_flight
        return self.link.random.random() < 0.5

    def _note(self, outcome: str) -> None:
        link = self.link
        link.trace.append((link.loop.time(), link.actor, link.names[self.operation], self.subject, outcome))
