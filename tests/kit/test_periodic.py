from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Closed, OutcomeUnknown, Unavailable, UsageError
from forebay.kit.periodic import PeriodicConfig, PeriodicService
from forebay.kit.service import HealthStatus

if TYPE_CHECKING:
    from tests.kit.conftest import ManualClock

EVERY_SECOND = PeriodicConfig(
    interval_ms=1_000, jitter=0, backoff_max_ms=8_000, failures_max=3, grace_ms=5_000
)


class Chore:
    """A pass that can be made to fail, to take its time, or to ignore its end."""

    def __init__(self, clock: ManualClock) -> None:
        self.began: list[float] = []
        self.ended = 0
        self.cancelled = 0
        self.under_way = 0
        self.most_under_way = 0
        self.error: BaseException | None = None
        self.lasts_s = 0.0
        self.stubborn = False
        self.release = asyncio.Event()
        self._clock = clock

    async def __call__(self) -> None:
        self.began.append(self._clock.monotonic() - 1000)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self._work()
        finally:
            self.under_way -= 1
        self.ended += 1

    async def _work(self) -> None:
        try:
            await self._clock.sleep(self.lasts_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            if not self.stubborn:
                raise
            await self.release.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def chore(manual_clock: ManualClock) -> Chore:
    return Chore(manual_clock)


def service_of(
    chore: Chore, clock: ManualClock, config: PeriodicConfig = EVERY_SECOND, seed: int = 0
) -> PeriodicService:
    return PeriodicService("chore", chore, config, clock=clock, randomness=random.Random(seed))


@pytest.fixture
async def service(chore: Chore, manual_clock: ManualClock) -> AsyncIterator[PeriodicService]:
    """Running, its first pass done."""
    service = service_of(chore, manual_clock)
    await service.start()
    await manual_clock.settle()
    yield service
    chore.release.set()
    stopping = asyncio.create_task(service.stop())
    await manual_clock.advance(10_000)
    await stopping
    leftovers = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in leftovers if "forebay service" in task.get_name()]


async def test_passes_repeat_at_the_interval(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    await manual_clock.advance(3.5)
    assert chore.began == [0, 1, 2, 3]
    assert service.health().details["passes"] == 4


async def test_passes_never_overlap_and_missed_ones_are_not_made_up(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.lasts_s = 2.5
    await manual_clock.advance(8.5)
    assert chore.began == [0, 1, 4.5, 8]
    assert chore.most_under_way == 1
    assert service.health().status is HealthStatus.HEALTHY


async def test_a_stopped_service_runs_no_more_and_leaves_no_sleeper(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    await service.stop()
    await manual_clock.advance(100)
    assert chore.began == [0]
    assert manual_clock.sleeping == 0
    assert service.health().status is HealthStatus.STOPPED
    await service.stop()


async def test_a_failing_pass_is_repeated_with_growing_waits(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.error = Unavailable("bucket is down")
    await manual_clock.advance(40)
    # Fails at 1, then waits 1, 2, 4, 8, and 8 from there on.
    assert chore.began == [0, 1, 2, 4, 8, 16, 24, 32, 40]


async def test_health_goes_from_degraded_to_failed_and_back(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    succeeded_ms = manual_clock.now_ms()
    chore.error = Unavailable("bucket is down")
    seen = []
    for wait in (1, 1, 2):
        await manual_clock.advance(wait)
        seen.append(service.health().status)
    assert seen == [HealthStatus.DEGRADED, HealthStatus.DEGRADED, HealthStatus.FAILED]
    health = service.health()
    assert health.reasons == ("3 failed in a row, last: Unavailable: bucket is down",)
    assert health.details["failures_in_row"] == 3
    assert health.details["last_success_ms"] == succeeded_ms

    chore.error = None
    await manual_clock.advance(4)
    health = service.health()
    assert health.status is HealthStatus.HEALTHY
    assert health.reasons == ()
    assert (health.details["failures"], health.details["failures_in_row"]) == (3, 0)
    assert health.details["last_error"] == "Unavailable: bucket is down"
    assert health.details["last_success_ms"] == succeeded_ms + 8_000
    json.dumps(health.as_json(), allow_nan=False)


async def test_failures_are_logged_with_their_traceback(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    chore.error = Unavailable("bucket is down")
    await manual_clock.advance(1)
    [record] = [record for record in caplog.records if record.name == "forebay.kit.periodic"]
    assert record.levelname == "WARNING"
    assert record.exc_info is not None
    assert record.exc_info[1] is chore.error


async def test_a_pass_cut_short_by_a_cancellation_of_its_own_counts_as_failed_not_as_the_end(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.error = asyncio.CancelledError()
    await manual_clock.advance(1)
    assert service.health().status is HealthStatus.DEGRADED
    chore.error = None
    await manual_clock.advance(1)
    assert service.health().status is HealthStatus.HEALTHY


async def test_a_pass_that_stalls_degrades_the_service(chore: Chore, manual_clock: ManualClock) -> None:
    config = PeriodicConfig(interval_ms=1_000, jitter=0, stalled_ms=60_000)
    chore.lasts_s = 100
    async with service_of(chore, manual_clock, config) as service:
        await manual_clock.advance(59)
        assert service.health().status is HealthStatus.HEALTHY
        await manual_clock.advance(1)
        health = service.health()
        assert health.status is HealthStatus.DEGRADED
        assert health.reasons == ("a pass has been running for 60 s",)
        assert health.details["running_seconds"] == pytest.approx(60)
        await manual_clock.advance(40)
        assert service.health().status is HealthStatus.HEALTHY
        assert service.health().details["last_pass_seconds"] == pytest.approx(100)


async def test_stop_waits_for_the_pass_under_way(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.lasts_s = 4
    await manual_clock.advance(1)
    stopping = asyncio.create_task(service.stop())
    await manual_clock.advance(3)
    assert not stopping.done()
    await manual_clock.advance(1)
    await stopping
    assert (chore.ended, chore.cancelled) == (2, 0)
    assert manual_clock.sleeping == 0


async def test_stop_cancels_the_pass_after_the_grace_period(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.lasts_s = 1_000
    await manual_clock.advance(1)
    stopping = asyncio.create_task(service.stop())
    await manual_clock.advance(4.9)
    assert chore.cancelled == 0
    await manual_clock.advance(0.1)
    await stopping
    assert (chore.ended, chore.cancelled) == (1, 1)
    assert service.health().status is HealthStatus.STOPPED


async def test_a_pass_that_ignores_cancellation_makes_stop_fail_instead_of_hang(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.lasts_s, chore.stubborn = 1_000, True
    await manual_clock.advance(1)
    stopping = asyncio.create_task(service.stop())
    await manual_clock.advance(10)
    with pytest.raises(OutcomeUnknown, match="in spite of being cancelled"):
        await stopping
    assert chore.under_way == 1
    chore.release.set()
    await service.stop()
    assert chore.under_way == 0


async def test_a_cancelled_stop_cancels_the_pass_and_can_be_repeated(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.lasts_s = 1_000
    await manual_clock.advance(1)
    stopping = asyncio.create_task(service.stop())
    await manual_clock.settle()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await service.stop()
    assert chore.cancelled == 1


async def test_trigger_runs_a_pass_now_and_returns_after_it(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    await manual_clock.advance(0.25)
    await service.trigger()
    assert chore.began == [0, 0.25]
    assert chore.ended == 2
    await manual_clock.advance(1)
    assert chore.began == [0, 0.25, 1.25]


async def test_trigger_during_a_pass_waits_for_a_whole_new_one_that_all_callers_share(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.lasts_s = 2
    await manual_clock.advance(1.5)
    calls = [asyncio.create_task(service.trigger()) for _ in range(5)]
    await manual_clock.advance(1.5)
    assert not any(call.done() for call in calls)
    await manual_clock.advance(2)
    await asyncio.gather(*calls)
    assert chore.began == [0, 1, 3]
    assert chore.most_under_way == 1


async def test_trigger_raises_what_the_pass_raises_and_the_service_goes_on(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.error = Unavailable("bucket is down")
    with pytest.raises(Unavailable, match="bucket is down"):
        await service.trigger()
    chore.error = None
    await service.trigger()
    assert service.health().status is HealthStatus.HEALTHY


async def test_a_caller_that_gives_up_waiting_disturbs_nobody(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.lasts_s = 2
    impatient = asyncio.create_task(service.trigger())
    patient = asyncio.create_task(service.trigger())
    await manual_clock.advance(1)
    impatient.cancel()
    await manual_clock.advance(1)
    await patient
    assert impatient.cancelled()
    assert service.health().status is HealthStatus.HEALTHY


async def test_trigger_needs_a_running_service(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    await service.stop()
    with pytest.raises(Closed, match="does not run"):
        await service.trigger()


async def test_callers_waiting_for_a_pass_learn_that_the_service_stopped(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    chore.lasts_s = 1_000
    served = asyncio.create_task(service.trigger())
    await manual_clock.settle()
    queued = asyncio.create_task(service.trigger())
    await manual_clock.settle()
    stopping = asyncio.create_task(service.stop())
    await manual_clock.advance(6)
    await stopping
    for call in (served, queued):
        with pytest.raises(Closed):
            await call


async def test_a_pass_cannot_wait_for_itself(manual_clock: ManualClock) -> None:
    errors: list[UsageError] = []

    async def confused() -> None:
        for call in (itself.trigger, itself.stop):
            try:
                await call()
            except UsageError as error:
                errors.append(error)

    itself = PeriodicService(
        "confused", confused, EVERY_SECOND, clock=manual_clock, randomness=random.Random(0)
    )
    async with itself:
        await itself.trigger()
    assert len(errors) == 2
    assert all("wait for itself" in str(error) for error in errors)


async def test_a_service_starts_again_after_a_stop_but_not_twice(
    service: PeriodicService, chore: Chore, manual_clock: ManualClock
) -> None:
    with pytest.raises(UsageError, match="runs already"):
        await service.start()
    await service.stop()
    await manual_clock.advance(10)
    await service.start()
    await manual_clock.advance(1.5)
    assert chore.began == [0, 10, 11]


async def test_a_broken_clock_is_reported_as_a_failed_service(
    chore: Chore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(chore, manual_clock)

    async def broken(seconds: float) -> None:
        raise OSError("no time")

    await service.start()
    await manual_clock.settle()
    await service.stop()
    monkeypatch.setattr(service, "_sleep_on_clock", broken)
    await service.start()
    await manual_clock.settle()
    health = service.health()
    assert health.status is HealthStatus.FAILED
    assert health.reasons == ("its loop ended: OSError: no time",)
    with pytest.raises(Closed):
        await service.trigger()
    monkeypatch.undo()
    await service.stop()
    assert service.health().status is HealthStatus.STOPPED


@given(
    interval_ms=st.integers(1, 100_000),
    jitter=st.floats(0, 1),
    backoff_max_ms=st.integers(0, 1_000_000),
    failures=st.integers(0, 1_000),
    seed=st.integers(),
)
def test_waits_stay_within_jitter_of_the_doubling_interval(
    interval_ms: int, jitter: float, backoff_max_ms: int, failures: int, seed: int
) -> None:
    config = PeriodicConfig(interval_ms=interval_ms, jitter=jitter, backoff_max_ms=backoff_max_ms)
    wait_ms = config.wait_s(failures, random.Random(seed)) * 1000
    middle = min(interval_ms * 2 ** max(failures - 1, 0), max(interval_ms, backoff_max_ms))
    assert middle * (1 - jitter) - 1e-6 <= wait_ms <= middle * (1 + jitter) + 1e-6


async def test_the_first_passes_of_a_fleet_are_spread_over_the_jitter(manual_clock: ManualClock) -> None:
    config = PeriodicConfig(interval_ms=10_000, jitter=0.5)
    chores = [Chore(manual_clock) for _ in range(20)]
    services = [service_of(chore, manual_clock, config, seed) for seed, chore in enumerate(chores)]
    for service in services:
        await service.start()
    await manual_clock.advance(5)
    first = [chore.began[0] for chore in chores]
    assert min(first) < 1
    assert max(first) > 4
    assert len(set(first)) == 20
    for service in services:
        await service.stop()


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_ms": 0},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": float("nan")},
        {"backoff_max_ms": -1},
        {"failures_max": 0},
        {"stalled_ms": 0},
        {"grace_ms": -1},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="not a usable configuration"):
        PeriodicConfig(**{**asdict(EVERY_SECOND), **wrong})
