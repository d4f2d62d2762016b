from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import (
    AccessDenied,
    ForebayError,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    Unavailable,
    UsageError,
)
from forebay.kit.retry import RetryPolicy, retry

if TYPE_CHECKING:
    from tests.kit.conftest import LeapingClock, ManualClock

MANY = RetryPolicy(attempts_max=50, base_ms=10, cap_ms=400, deadline_ms=10**9)


class Flaky:
    """Fails with the given errors one after the other, then succeeds."""

    def __init__(self, *errors: BaseException) -> None:
        self.calls = 0
        self._errors: Iterator[BaseException] = iter(errors)

    async def __call__(self) -> str:
        self.calls += 1
        for error in self._errors:
            raise error
        return "done"


def failures(count: int) -> list[Unavailable]:
    return [Unavailable(f"failure {number}") for number in range(1, count + 1)]


async def test_success_at_once_waits_for_nothing(leaping_clock: LeapingClock) -> None:
    operation = Flaky()
    assert await retry(operation, policy=MANY, clock=leaping_clock, randomness=random.Random(0)) == "done"
    assert operation.calls == 1
    assert leaping_clock.slept == []


async def test_transient_failures_are_repeated_until_success(leaping_clock: LeapingClock) -> None:
    operation = Flaky(*failures(5))
    assert await retry(operation, policy=MANY, clock=leaping_clock, randomness=random.Random(0)) == "done"
    assert operation.calls == 6
    assert len(leaping_clock.slept) == 5


@pytest.mark.parametrize("attempts", [1, 2, 7])
async def test_attempts_are_bounded_and_the_last_error_is_raised(
    leaping_clock: LeapingClock, attempts: int
) -> None:
    operation = Flaky(*failures(100))
    policy = RetryPolicy(attempts_max=attempts, base_ms=1, deadline_ms=10**9)
    with pytest.raises(Unavailable, match=f"^failure {attempts}$"):
        await retry(operation, policy=policy, clock=leaping_clock, randomness=random.Random(0))
    assert operation.calls == attempts
    assert len(leaping_clock.slept) == attempts - 1


@pytest.mark.parametrize("seed", range(20))
async def test_no_attempt_begins_at_or_after_the_deadline(leaping_clock: LeapingClock, seed: int) -> None:
    policy = RetryPolicy(attempts_max=10_000, base_ms=50, cap_ms=500, deadline_ms=2_000)
    began: list[float] = []

    async def slow() -> None:
        began.append(leaping_clock.monotonic())
        leaping_clock.seconds += 0.003
        raise Unavailable("still down")

    with pytest.raises(Unavailable):
        await retry(slow, policy=policy, clock=leaping_clock, randomness=random.Random(seed))
    assert 1 < len(began) < 10_000
    assert max(began) < 2.0


async def test_a_deadline_of_nothing_means_one_attempt(leaping_clock: LeapingClock) -> None:
    operation = Flaky(*failures(3))
    policy = RetryPolicy(base_ms=0, deadline_ms=0)
    with pytest.raises(Unavailable, match="failure 1"):
        await retry(operation, policy=policy, clock=leaping_clock, randomness=random.Random(0))


@given(
    attempt=st.integers(1, 10_000),
    base_ms=st.integers(0, 10_000),
    cap_ms=st.integers(0, 100_000),
    seed=st.integers(),
)
def test_waits_lie_between_nothing_and_the_doubling_ceiling(
    attempt: int, base_ms: int, cap_ms: int, seed: int
) -> None:
    wait = RetryPolicy(base_ms=base_ms, cap_ms=cap_ms).wait_s(attempt, random.Random(seed))
    assert 0 <= wait <= min(cap_ms, base_ms * 2 ** (attempt - 1)) / 1000


def test_jitter_is_full_it_uses_the_whole_range() -> None:
    randomness = random.Random(1)
    policy = RetryPolicy(base_ms=100, cap_ms=100)
    waits = [policy.wait_s(3, randomness) for _ in range(1_000)]
    assert min(waits) < 0.005
    assert max(waits) > 0.095
    assert 0.045 < sum(waits) / len(waits) < 0.055


async def test_the_same_seed_waits_the_same(leaping_clock: LeapingClock) -> None:
    slept = []
    for _ in range(2):
        leaping_clock.slept = []
        await retry(Flaky(*failures(8)), policy=MANY, clock=leaping_clock, randomness=random.Random(7))
        slept.append(leaping_clock.slept)
    assert slept[0] == slept[1]


@pytest.mark.parametrize(
    "error",
    [
        PreconditionFailed("k", expected="v1"),
        AccessDenied("no"),
        NotFound("k"),
        OutcomeUnknown("put"),
        UsageError("wrong"),
        KeyError("not one of ours"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_is_not_transient_passes_at_once(leaping_clock: LeapingClock, error: Exception) -> None:
    operation = Flaky(error)
    with pytest.raises(type(error)) as caught:
        await retry(operation, policy=MANY, clock=leaping_clock, randomness=random.Random(0))
    assert caught.value is error
    assert operation.calls == 1
    assert leaping_clock.slept == []


async def test_the_caller_decides_what_is_retryable(leaping_clock: LeapingClock) -> None:
    operation = Flaky(PreconditionFailed("k", expected="v1"), Unavailable("down"))
    with pytest.raises(Unavailable):
        await retry(
            operation,
            policy=MANY,
            clock=leaping_clock,
            randomness=random.Random(0),
            retryable=lambda error: isinstance(error, PreconditionFailed),
        )
    assert operation.calls == 2


async def test_on_retry_hears_of_repeated_failures_but_not_of_the_last_one(
    leaping_clock: LeapingClock,
) -> None:
    heard: list[tuple[int, str]] = []

    def listen(attempt: int, error: ForebayError) -> None:
        heard.append((attempt, error.message))

    with pytest.raises(Unavailable):
        await retry(
            Flaky(*failures(9)),
            policy=RetryPolicy(attempts_max=3, base_ms=1),
            clock=leaping_clock,
            randomness=random.Random(0),
            on_retry=listen,
        )
    assert heard == [(1, "failure 1"), (2, "failure 2")]


async def test_cancellation_passes_through_the_operation(leaping_clock: LeapingClock) -> None:
    operation = Flaky(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await retry(operation, policy=MANY, clock=leaping_clock, randomness=random.Random(0))
    assert operation.calls == 1


async def test_cancellation_ends_the_wait_between_attempts(manual_clock: ManualClock) -> None:
    operation = Flaky(*failures(9))
    policy = RetryPolicy(base_ms=10_000, cap_ms=10_000)
    task = asyncio.create_task(
        retry(operation, policy=policy, clock=manual_clock, randomness=random.Random(0))
    )
    await manual_clock.settle()
    assert manual_clock.sleeping == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert operation.calls == 1


@pytest.mark.parametrize(
    "wrong", [{"attempts_max": 0}, {"base_ms": -1}, {"cap_ms": -1}, {"deadline_ms": -1}], ids=str
)
def test_a_policy_that_cannot_work_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="not a usable retry policy") as caught:
        RetryPolicy(**wrong)
    assert "at least" in caught.value.hint
