"""A coroutine function that runs again and again in the background.

The interval counts from the end of one pass to the beginning of the next: passes never overlap, and a pass
that takes longer than the interval does not leave a queue of missed ones behind. Every wait is varied at
random, so that a fleet that was started together does not knock at the store together.

A failed pass is reported and repeated after a growing wait. A background chore that dies of its first error
goes unnoticed until the disk is full; one that repeats it at full speed makes an outage worse.

Nothing is awaited while a coroutine is being closed: a simulated crash ends every task of an actor that way,
and a dead process tidies up nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forebay.errors import Closed, OutcomeUnknown, UsageError
from forebay.kit.clock import Clock
from forebay.kit.service import Health, HealthStatus, Service

__all__ = ["PeriodicConfig", "PeriodicService"]

_log = logging.getLogger(__name__)

ERROR_CHARS_MAX = 500
"""Longest error text in a health report."""


@dataclass(frozen=True, slots=True)
class PeriodicConfig:
    """How often, and how patiently."""

    interval_ms: int
    """Milliseconds from the end of a pass to the beginning of the next. At least 1."""
    jitter: float = 0.1
    """Share of every wait by which it varies either way; the first pass begins within it. 0 to 1."""
    backoff_max_ms: int = 300_000
    """Longest wait after failures in milliseconds; it doubles from the interval with each. At least 0."""
    failures_max: int = 5
    """Failures in a row from which on the service counts as failed, no longer as degraded. At least 1."""
    stalled_ms: int = 300_000
    """Milliseconds after which a pass under way makes the service count as degraded. At least 1."""
    grace_ms: int = 10_000
    """Milliseconds a stop waits for the pass under way before it is cancelled. At least 0."""

    def __post_init__(self) -> None:
        low = min(self.interval_ms, self.failures_max, self.stalled_ms)
        if low < 1 or min(self.backoff_max_ms, self.grace_ms) < 0 or not 0 <= self.jitter <= 1:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")

    def wait_s(self, failures: int, randomness: random.Random) -> float:
        """Seconds to wait after this many failures in a row."""
        ceiling_ms = max(self.interval_ms, self.backoff_max_ms)
        wait_ms = min(self.interval_ms << min(max(failures - 1, 0), 40), ceiling_ms)
        return wait_ms * randomness.uniform(1 - self.jitter, 1 + self.jitter) / 1000


class PeriodicService(Service):
    """Runs `run_once` again and again until stopped."""

    def __init__(
        self,
        name: str,
        run_once: Callable[[], Awaitable[object]],
        config: PeriodicConfig,
        *,
        clock: Clock,
        randomness: random.Random,
    ) -> None:
        self.name = name
        self._run_once = run_once
        self._config = config
        self._clock = clock
        self._random = randomness
        self._loop: asyncio.Task[None] | None = None
        self._pause: asyncio.Task[None] | None = None
        self._stopping = False
        self._waiters: list[asyncio.Future[None]] = []
        self._passes = 0
        self._failures = 0
        self._failures_in_row = 0
        self._last_error = ""
        self._last_success_ms: int | None = None
        self._last_pass_s: float | None = None
        self._pass_began: float | None = None

    async def start(self) -> None:
        """Begin. The first pass comes at once, but for the jitter."""
        if self._loop is not None:
            raise UsageError(f"service {self.name!r} runs already", hint="stop it first")
        self._stopping = False
        self._failures_in_row = 0
        self._loop = asyncio.create_task(self._run(), name=f"forebay service {self.name}")

    async def stop(self) -> None:
        """Let the pass under way end, cancel it after the grace period; return when nothing runs any more."""
        loop = self._loop
        if loop is None:
            return
        self._check_not_inside()
        self._stopping = True
        self._wake()
        try:
            if not await self._ended(loop):
                loop.cancel()
                if not await self._ended(loop):
                    raise OutcomeUnknown(
                        f"a pass of service {self.name!r}",
                        reason="it goes on in spite of being cancelled",
                        hint="end the process; the pass must not swallow CancelledError",
                    )
        except asyncio.CancelledError:
            loop.cancel()
            raise
        if self._loop is loop:
            self._loop = None

    async def trigger(self) -> None:
        """Run a pass that begins after this call, and return when it is done. Raises what the pass raises.

        A pass under way is not enough, as it may have begun before whatever the caller wants it to see. All
        callers that wait for the next pass share it.
        """
        if self._loop is None or self._loop.done() or self._stopping:
            raise self._closed()
        self._check_not_inside()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake()
        await waiter

    def health(self) -> Health:
        """Healthy while passes succeed, degraded after a failure or while one stalls, then failed."""
        status, reason = self._status()
        running_s = None if self._pass_began is None else self._clock.monotonic() - self._pass_began
        details = {
            "passes": self._passes,
            "failures": self._failures,
            "failures_in_row": self._failures_in_row,
            "last_error": self._last_error or None,
            "last_success_ms": self._last_success_ms,
            "last_pass_seconds": self._last_pass_s,
            "running_seconds": running_s,
        }
        return Health(status, (reason,) if reason else (), details)

    def _status(self) -> tuple[HealthStatus, str]:
        if self._loop is None:
            return HealthStatus.STOPPED, ""
        if self._loop.done() and not self._stopping:
            return HealthStatus.FAILED, f"its loop ended: {self._last_error or 'cancelled from outside'}"
        if self._failures_in_row:
            text = f"{self._failures_in_row} failed in a row, last: {self._last_error}"
            enough = self._failures_in_row >= self._config.failures_max
            return (HealthStatus.FAILED if enough else HealthStatus.DEGRADED), text
        began = self._pass_began
        if began is not None and (self._clock.monotonic() - began) * 1000 >= self._config.stalled_ms:
            return (
                HealthStatus.DEGRADED,
                f"a pass has been running for {self._clock.monotonic() - began:.0f} s",
            )
        return HealthStatus.HEALTHY, ""

    async def _run(self) -> None:
        try:
            wait = self._random.uniform(0, self._config.jitter) * self._config.interval_ms / 1000
            while True:
                await self._sleep(wait)
                if self._stopping:
                    self._answer(self._take_waiters(), self._closed())
                    return
                await self._pass()
                wait = self._config.wait_s(self._failures_in_row, self._random)
        except asyncio.CancelledError:
            self._answer(self._take_waiters(), self._closed())
            raise
        except Exception as error:
            # Not a pass: those are caught below. The clock or the configuration is broken.
            self._last_error = _text(error)
            _log.exception("service %s: its loop ended", self.name)
            self._answer(self._take_waiters(), self._closed())

    async def _sleep(self, seconds: float) -> None:
        """Wait for the time to pass, or for `_wake`."""
        if self._waiters or self._stopping:
            return
        self._pause = pause = asyncio.create_task(self._sleep_on_clock(seconds))
        try:
            await asyncio.wait({pause})
        except asyncio.CancelledError:
            pause.cancel()
            raise
        self._pause = None
        if not pause.cancelled():
            pause.result()

    async def _sleep_on_clock(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    def _wake(self) -> None:
        if self._pause is not None:
            self._pause.cancel()

    async def _pass(self) -> None:
        """One pass. Every failure ends here, but for a cancellation of the loop itself."""
        waiters = self._take_waiters()
        self._pass_began = began = self._clock.monotonic()
        problem: Exception | None = None
        try:
            await self._run_once()
        except asyncio.CancelledError as error:
            if _is_cancelled():
                self._answer(waiters, self._closed())
                raise
            # Something the pass waited for was cancelled, not the pass.
            problem = Closed(f"a pass of service {self.name!r} was cut short", hint="see what it waited for")
            problem.__cause__ = error
        except Exception as error:
            problem = error
        finally:
            self._pass_began = None
        self._last_pass_s = self._clock.monotonic() - began
        self._note(problem)
        self._answer(waiters, problem)

    def _note(self, problem: Exception | None) -> None:
        self._passes += 1
        if problem is None:
            self._failures_in_row = 0
            self._last_success_ms = self._clock.now_ms()
            return
        self._failures += 1
        self._failures_in_row += 1
        self._last_error = _text(problem)
        _log.warning(
            "service %s: pass failed, %d in a row", self.name, self._failures_in_row, exc_info=problem
        )

    def _take_waiters(self) -> list[asyncio.Future[None]]:
        waiters, self._waiters = self._waiters, []
        return waiters

    def _answer(self, waiters: list[asyncio.Future[None]], problem: Exception | None) -> None:
        for waiter in waiters:
            if waiter.done():
                continue
            if problem is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(problem)

    async def _ended(self, loop: asyncio.Task[None]) -> bool:
        """Whether the loop ends within the grace period."""
        timer = asyncio.create_task(self._sleep_on_clock(self._config.grace_ms / 1000))
        try:
            await asyncio.wait({loop, timer}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            timer.cancel()
            raise
        timer.cancel()
        await asyncio.wait({timer})
        return loop.done()

    def _check_not_inside(self) -> None:
        if asyncio.current_task() is self._loop:
            raise UsageError(
                f"a pass of service {self.name!r} would wait for itself", hint="return from the pass instead"
            )

    def _closed(self) -> Closed:
        return Closed(f"service {self.name!r} does not run", hint="start it first")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
