"""The pauses between attempts keep to the policy, as `forebay.kit.retry` does."""

from __future__ import annotations

import random

import pytest

from forebay.kit.clock import SystemClock
from forebay.kit.retry import RetryPolicy
from forebay.storage._bucket._patience import Patience


class StandingClock(SystemClock):
    """Time that passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("policy", "attempts"),
    [
        (RetryPolicy(attempts_max=5, base_ms=0), 5),
        (RetryPolicy(attempts_max=1), 1),
        (RetryPolicy(attempts_max=5, base_ms=0, deadline_ms=0), 1),
    ],
)
async def test_attempts_end_with_the_policy(policy: RetryPolicy, attempts: int) -> None:
    patience = Patience(policy, StandingClock(), random.Random(1))
    while await patience.another():
        pass
    assert patience.attempts == attempts
