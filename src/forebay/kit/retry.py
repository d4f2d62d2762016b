"""Trying again, with limits: full jitter, a bound on attempts and a bound on time.

Full jitter (wait anywhere between nothing and the current ceiling) is what spreads a crowd of writers that
all lost the same race; an exponential wait without it sends them back together.

Only errors that say that nothing happened are tried again by themselves. An `OutcomeUnknown` never is:
whoever knows how to look whether it happened passes a `retryable` of its own.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from forebay.errors import ForebayError, Unavailable, UsageError
from forebay.kit.clock import Clock

__all__ = ["RetryPolicy", "retry"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, how long, how patiently."""

    attempts_max: int = 10
    """Calls in all, the first one included. At least 1."""
    base_ms: int = 20
    """Ceiling of the first wait in milliseconds; it doubles with every attempt. At least 0."""
    cap_ms: int = 2_000
    """Highest ceiling of a wait in milliseconds. At least 0."""
    deadline_ms: int = 30_000
    """Milliseconds from the first call from which on no new attempt begins. 0 means one attempt."""

    def __post_init__(self) -> None:
        if self.attempts_max < 1 or self.base_ms < 0 or self.cap_ms < 0 or self.deadline_ms < 0:
            raise UsageError(
                f"not a usable retry policy: {self}",
                hint="attempts_max is at least 1, every time at least 0",
            )

    def wait_s(self, attempt: int, randomness: random.Random) -> float:
        """Seconds to wait after the given attempt (1 for the first)."""
        ceiling_ms = min(self.cap_ms, self.base_ms * (1 << min(attempt - 1, 40)))
        return randomness.uniform(0, ceiling_ms) / 1000


def _is_transient(error: ForebayError) -> bool:
    return isinstance(error, Unavailable)


async def retry(
    operation: Callable[[], Awaitable[T]],
    *,
    policy: RetryPolicy,
    clock: Clock,
    randomness: random.Random,
    retryable: Callable[[ForebayError], bool] = _is_transient,
    on_retry: Callable[[int, ForebayError], None] | None = None,
) -> T:
    """Await `operation()` until it succeeds, fails for good, or the policy ends; then raise its last error.

    Only errors that `retryable` accepts are tried again; by default those that say that the other side was
    not reached. `on_retry` hears of every attempt that failed and will be repeated. The deadline keeps new
    attempts from beginning; it does not interrupt one that hangs.
    """
    deadline = clock.monotonic() + policy.deadline_ms / 1000
    attempt = 1
    while True:
        try:
            return await operation()
        except ForebayError as error:
            if attempt >= policy.attempts_max or not retryable(error):
                raise
            wait = policy.wait_s(attempt, randomness)
            if clock.monotonic() + wait >= deadline:
                raise
            if on_retry is not None:
                on_retry(attempt, error)
        await clock.sleep(wait)
        attempt += 1
