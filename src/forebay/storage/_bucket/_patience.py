"""The pauses between attempts, for loops whose body decides whether to go on.

`forebay.kit.retry.retry` repeats one call until it succeeds. Settling a write is not of that shape: between
two attempts stands a look at what is there. It keeps to the same policy.
"""

from __future__ import annotations

import random

from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy

__all__ = ["Patience"]


class Patience:
    """Counts attempts and time of one operation."""

    def __init__(self, policy: RetryPolicy, clock: Clock, randomness: random.Random) -> None:
        self._policy = policy
        self._clock = clock
        self._random = randomness
        self._deadline = clock.monotonic() + policy.deadline_ms / 1000
        self.attempts = 1

    async def another(self) -> bool:
        """Wait; whether another attempt may begin. False at once where the policy is at its end."""
        wait = self._policy.wait_s(self.attempts, self._random)
        if self.attempts >= self._policy.attempts_max or self._clock.monotonic() + wait >= self._deadline:
            return False
        self.attempts += 1
        await self._clock.sleep(wait)
        return True
