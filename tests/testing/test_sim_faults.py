from __future__ import annotations

import random
import statistics

import pytest

from forebay.testing.faults import (
    FAULT_KINDS,
    NO_FAULTS,
    Constant,
    Faults,
    FaultSchedule,
    Latencies,
    Latency,
    LogNormal,
    Uniform,
)


def test_nothing_fails_by_default() -> None:
    assert Faults().kinds == ()
    assert Faults().plan("put", write=True) is None


def test_rates_may_differ_by_operation() -> None:
    faults = Faults(before={"put": 0.5, "*": 0.1}, after=0.2)
    assert faults.rate("before", "put") == 0.5
    assert faults.rate("before", "get") == 0.1
    assert faults.rate("after", "get") == 0.2
    assert Faults(before={"put": 0.5}).rate("before", "get") == 0.0


def test_reads_never_have_an_unknown_outcome_and_writes_are_never_reset() -> None:
    read, write = (Faults.all(0.1).plan("x", write=write) for write in (False, True))
    assert read is not None
    assert write is not None
    assert [kind for _, kind in read.errors] == ["before", "throttle", "reset"]
    assert [kind for _, kind in write.errors] == ["before", "throttle", "after", "lost", "late"]
    assert read.duplicate == 0.0
    assert write.duplicate == 0.1


@pytest.mark.parametrize(
    "wrong", [{"before": -0.1}, {"after": {"put": 1.1}}, {"slow_factor": 0.5}, {"late_ms_max": 0}]
)
def test_impossible_faults_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Faults(**wrong)


def test_only_keeps_the_named_kinds() -> None:
    assert Faults.all(0.1).only("after", "slow").kinds == ("after", "slow")
    with pytest.raises(ValueError, match="not one of"):
        Faults().only("fire")


def test_steady_schedule_never_changes() -> None:
    faults = Faults.all(0.1)
    schedule = FaultSchedule(faults)
    assert schedule.at(0) is schedule.at(1e6) is faults


def test_rotation_picks_subsets_and_leaves_quiet_periods() -> None:
    schedule = FaultSchedule(Faults.all(0.1), seed="s", rotate_s=2, quiet=0.25)
    picked = [schedule.at(period * 2 + 0.5) for period in range(400)]
    quiet = sum(faults is NO_FAULTS for faults in picked)
    assert 50 < quiet < 150
    assert {kind for faults in picked for kind in faults.kinds} == set(FAULT_KINDS)
    assert len({faults.kinds for faults in picked}) > 50


def test_rotation_is_a_function_of_seed_and_time() -> None:
    def kinds(seed: str, times: list[float]) -> list[tuple[str, ...]]:
        schedule = FaultSchedule(Faults.all(0.1), seed=seed, rotate_s=1)
        return [schedule.at(time).kinds for time in times]

    times = [number / 3 for number in range(60)]
    assert kinds("a", times) == kinds("a", times[::-1])[::-1]
    assert kinds("a", times) != kinds("b", times)


@pytest.mark.parametrize(
    ("latency", "low", "high"),
    [(Constant(10), 0.010, 0.010), (Uniform(5, 30), 0.005, 0.030), (LogNormal(60, max_ms=500), 0.0, 0.5)],
)
def test_latencies_stay_in_their_bounds(latency: Latency, low: float, high: float) -> None:
    draw = random.Random(1)
    samples = [latency.sample(draw) for _ in range(2000)]
    assert low <= min(samples) <= max(samples) <= high


def test_lognormal_has_its_median_and_a_long_tail() -> None:
    draw = random.Random(1)
    samples = sorted(LogNormal(60).sample(draw) for _ in range(5000))
    assert statistics.median(samples) == pytest.approx(0.060, rel=0.05)
    assert samples[4950] > 0.120


def test_moment_of_decision_is_a_share() -> None:
    with pytest.raises(ValueError, match="share"):
        Latencies(decides_at=1.5)
